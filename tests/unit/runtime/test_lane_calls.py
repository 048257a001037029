"""Calls over lanes in detail; what holds for plain gRPC as well is in test_transports.py."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from pierhead import BadRequest, UserCodeError
from pierhead.errors import DeadlineExceeded, PayloadTooLarge, PierheadError, ReplicaDied
from pierhead.lanes.client import CallerLane
from pierhead.lanes.metadata import MAX_BYTES

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, until
from tests.unit.runtime.pipes import LARGE, Pipes, Served, idle, serve


@pytest.fixture
async def pipes(cluster: Cluster) -> Served:
    return await serve(cluster, max_ongoing_requests=10_000)


def numbers_of(messages: list[bytes]) -> list[int]:
    """Of the messages of `Split`: the number that each begins with."""
    return [int.from_bytes(message[:4], "big") for message in messages]


class TestUnary:
    @pytest.mark.parametrize(
        ("key", "value"), [("mine", 5), ("mine", "\udc80"), ("", "x"), ("a b", "x"), ("k\x80", "x")]
    )
    async def test_metadata_that_cannot_be_sent_fails_one_call_only(self, pipes: Served, key: str, value: Any) -> None:
        stub, service, server = pipes
        service.gate.clear()
        other = asyncio.ensure_future(stub.One(b"other"))
        await until(lambda: server.readiness().ongoing == 1, "the other call is in flight")
        with pytest.raises((TypeError, ValueError)):
            await stub.One(b"hi", metadata=((key, value),))
        assert server.readiness().ongoing == 1, "it was not sent"
        service.gate.set()
        assert await other == b"other"

    async def test_the_caller_may_set_the_request_id(self, pipes: Served) -> None:
        assert b"('x-request-id', 'mine')" in await pipes[0].One(b"metadata", metadata=(("x-request-id", "mine"),))

    @pytest.mark.parametrize("timeout", [1e14, 2**63 - 1, float("inf")])
    async def test_a_timeout_may_be_endless(self, pipes: Served, timeout: float) -> None:
        assert await pipes[0].One(b"hi", timeout=timeout) == b"hi"

    async def test_much_metadata_fits_into_one_turn(self, pipes: Served) -> None:
        calls = [pipes[0].One(b"%d" % index, metadata=(("token", "x" * 2000),)) for index in range(3000)]
        assert await asyncio.gather(*calls) == [b"%d" % index for index in range(3000)]

    async def test_a_large_reply_can_be_awaited_by_two_tasks(self, pipes: Served) -> None:
        call = pipes[0].One(b"make %d" % LARGE)

        async def wait() -> bytes:
            return await call  # type: ignore[no-any-return]

        one, other = await asyncio.gather(wait(), wait())
        assert len(one) == LARGE
        assert one == other == await call


@pytest.mark.parametrize("end", ["deadline", "cancel"])
async def test_a_call_lasts_until_its_large_reply_is_here(
    pipes: Served, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    fetching = asyncio.Event()

    async def fetch(*_: object) -> bytes:
        fetching.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(CallerLane, "fetch", fetch)
    await pipes[0].One(b"connect")  # the deadline is the work's alone
    call = pipes[0].One(b"make %d" % LARGE, timeout=1.0 if end == "deadline" else 30)
    waiting = asyncio.ensure_future(call)
    await fetching.wait()
    assert not call.done()
    if end == "cancel":
        call.cancel()
    with pytest.raises(DeadlineExceeded if end == "deadline" else asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(
    ("code", "details", "error", "words"),
    [
        (grpc.StatusCode.NOT_FOUND, "it was fetched", ReplicaDied, "it went away after it may have begun"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max", PayloadTooLarge, "One could not be fetched: larger"),
    ],
)
async def test_a_large_reply_that_cannot_be_fetched_fails_its_call(
    pipes: Served,
    monkeypatch: pytest.MonkeyPatch,
    code: grpc.StatusCode,
    details: str,
    error: type[Exception],
    words: str,
) -> None:
    async def fetch(*_: object) -> bytes:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    monkeypatch.setattr(CallerLane, "fetch", fetch)
    with pytest.raises(error, match=words):
        await pipes[0].One(b"make %d" % LARGE)
    with pytest.raises(error):
        await pipes[0].Split(b"5 %d" % LARGE).read()
    await idle(pipes[2])


@dataclass(frozen=True)
class Frozen(Exception):
    what: str


class Odd(PierheadError):
    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        return (("key", 5),)  # type: ignore[return-value]


def raises(error: Callable[[], Exception]) -> Callable[[Any], Any]:
    async def raise_(_: Any) -> None:
        raise error()

    return raise_


def aborts(details: Any) -> Callable[[Any], Any]:
    return lambda context: context.abort(grpc.StatusCode.NOT_FOUND, details)


def sets(trailers: Any, then: Exception | None = None) -> Callable[[Any], Any]:
    async def set_(context: Any) -> None:
        context.set_trailing_metadata(trailers)
        if then is not None:
            raise then

    return set_


async def _number_as_details(context: Any) -> None:
    context.set_code(grpc.StatusCode.NOT_FOUND)
    context.set_details(5)


UNSENDABLE: dict[str, Callable[[Any], Any]] = {
    "error as details": aborts(ValueError("x")),
    "no details": aborts(None),
    "endless details": aborts("x" * 5_000_000),
    "number as details": _number_as_details,
    "number as metadata": sets((("key", 5),)),
    "endless metadata": sets((("key", "x" * 100_000),)),
    "number as headers": lambda context: context.send_initial_metadata((("key", 5),)),
    "error with the most metadata that is allowed": sets((("key", "x" * (MAX_BYTES - 20)),), BadRequest("x")),
    "error as message": raises(lambda: BadRequest(ValueError("x"))),  # type: ignore[arg-type]  # as untyped code does
    "error that takes no note": raises(lambda: Frozen("x")),
    "error with a number as metadata": raises(lambda: Odd("x")),
}


class Careless(Pipes):
    """Ends its calls with what cannot be sent."""

    async def One(self, request: bytes, context: Any) -> bytes:
        if request.decode() in UNSENDABLE:
            await UNSENDABLE[request.decode()](context)
        return await super().One(request, context)


@pytest.mark.parametrize("what", UNSENDABLE)
async def test_an_answer_that_cannot_be_sent_is_an_error_of_its_own_call(cluster: Cluster, what: str) -> None:
    stub, service, server = await serve(cluster, Careless())
    service.gate.clear()
    other = asyncio.ensure_future(stub.One(b"other"))
    await until(lambda: server.readiness().ongoing == 1, "the other call is in flight")
    with pytest.raises(PierheadError) as raised:
        await stub.One(what.encode(), timeout=PATIENCE_S)
    assert raised.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    if what == "error that takes no note":
        assert isinstance(raised.value, UserCodeError)
        assert raised.value.error_id
    service.gate.set()
    assert await other == b"other"


class Sink:
    """Takes messages, and does something the first time."""

    def __init__(self, then: Callable[[], bool] = lambda: True) -> None:
        self.got: list[bytes] = []
        self.times = 0
        self._then = then

    def __call__(self, messages: list[bytes]) -> bool:
        assert messages
        self.times += 1
        self.got += messages
        return self._then()


class TestReplies:
    async def test_messages_that_have_arrived_can_be_taken_at_once(self, pipes: Served) -> None:
        stub, _, server = pipes
        call = stub.Split(b"500 10")
        got, most = [], 0
        async for message in call:
            ready = call.read_ready()
            most = max(most, len(ready))
            got += [message, *ready]
        assert numbers_of(got) == list(range(500))
        assert most > 10
        await idle(server)

    async def test_a_sink_is_given_all_messages_that_come(self, pipes: Served) -> None:
        stub, _, server = pipes
        call = stub.Split(b"5000 1000")  # more than a window: the sink gives credit, too
        first = await anext(aiter(call))
        call.deliver(sink := Sink())
        rest = [message async for message in call]
        assert numbers_of([first, *sink.got, *rest]) == list(range(5000))
        assert len(sink.got) == 4999
        await idle(server)

    async def test_a_sink_that_returns_false_is_given_no_more(self, pipes: Served) -> None:
        stub, _, server = pipes
        call = stub.Split(b"500 10")
        first = await call.read()
        call.deliver(sink := Sink(lambda: False))
        rest = []
        while (message := await call.read()) is not grpc.aio.EOF:
            rest.append(message)
        assert numbers_of([first, *sink.got, *rest]) == list(range(500))
        assert sink.times == 1
        await idle(server)

    async def test_large_messages_are_read_in_their_turn_with_a_sink(self, pipes: Served) -> None:
        stub, _, server = pipes
        call = stub.Split(b"5 %d" % LARGE)
        sink = Sink()
        sink.got.append(await anext(aiter(call)))
        call.deliver(sink)
        async for message in call:
            sink.got.append(message)
            call.deliver(sink)
        assert numbers_of(sink.got) == list(range(5))
        await idle(server)

    @pytest.mark.parametrize(
        ("error", "seen", "words"),
        [
            (ZeroDivisionError("of the sink"), ZeroDivisionError, "of the sink"),
            (asyncio.CancelledError(), RuntimeError, "raised CancelledError"),
        ],
        ids=["an exception", "a cancellation"],
    )
    async def test_the_reader_sees_what_a_sink_raises_and_no_other_call_does(
        self, pipes: Served, error: BaseException, seen: type[Exception], words: str
    ) -> None:
        stub, service, server = pipes
        service.gate.clear()
        other = asyncio.ensure_future(stub.One(b"other"))
        call = stub.Split(b"1000000 1000")
        await call.read()

        def fail(_: list[bytes]) -> bool:
            raise error

        call.deliver(fail)
        with pytest.raises(seen, match=words):
            await call.read()
        service.gate.set()
        assert await other == b"other"
        await until(lambda: service.ended == 1, "the generator is closed")
        await idle(server)

    async def test_a_sink_runs_in_the_context_of_the_code_that_set_it(self, pipes: Served) -> None:
        stub, _, server = pipes
        who: contextvars.ContextVar[str] = contextvars.ContextVar("who")
        seen: set[str] = set()

        def take(_: list[bytes]) -> bool:
            seen.add(who.get())
            return True

        async def ask(name: str) -> None:
            who.set(name)
            call = stub.Split(b"2000 1000")
            await anext(aiter(call))
            call.deliver(take)
            async for _ in call:
                pass

        await asyncio.create_task(ask("who opened the lane"))
        seen.clear()
        await asyncio.create_task(ask("who asks"))
        assert seen == {"who asks"}
        await idle(server)

    async def test_a_sink_is_given_nothing_after_cancel(self, pipes: Served) -> None:
        stub, service, server = pipes
        call = stub.Split(b"1000000 1000")
        await call.read()
        call.deliver(sink := Sink(lambda: bool(call.cancel()) or True))
        await until(lambda: sink.times > 0, "something was delivered")
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        assert sink.times == 1
        await until(lambda: service.ended == 1, "the generator is closed")
        await idle(server)

    async def test_dropping_the_call_ends_the_work(self, pipes: Served) -> None:
        stub, service, server = pipes
        await anext(aiter(stub.Split(b"1000000 1000")))
        await until(lambda: service.ended == 1, "the generator is closed")
        await idle(server)


class Several(Pipes):
    """Writes each call's replies with several tasks, as gRPC's own contexts cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.left: asyncio.Task[None] | None = None

    async def Split(self, request: bytes, context: Any) -> None:  # type: ignore[override]  # writes by itself
        async def write(task: int, count: int) -> None:
            for _ in range(count):
                await context.write(b"%d" % task + b"x" * 1000)

        if request == b"outlive":
            self.left = asyncio.ensure_future(write(9, 1_000_000))
            await asyncio.Event().wait()
        await asyncio.gather(*[write(task, 1000) for task in range(3)])


async def test_several_tasks_may_write_the_replies_of_one_call(cluster: Cluster) -> None:
    stub, _, _ = await serve(cluster, Several())
    got = [message[:1] async for message in stub.Split(b"", timeout=20)]
    assert sorted(got) == [b"0"] * 1000 + [b"1"] * 1000 + [b"2"] * 1000


async def test_a_task_that_outlives_its_call_fails_instead_of_waiting_for_ever(cluster: Cluster) -> None:
    stub, service, server = await serve(cluster, Several())
    call = stub.Split(b"outlive", timeout=20)
    await call.read()
    call.cancel()
    await idle(server)
    await until(lambda: service.left is not None and service.left.done(), "the task has ended")
    assert isinstance(service.left.exception(), asyncio.InvalidStateError)


async def test_a_thousand_calls_at_once(pipes: Served) -> None:
    stub, _, server = pipes

    async def one(index: int) -> Any:
        if index % 2:
            return len([message async for message in stub.Split(b"20 100")]) == 20
        return await stub.One(b"%d" % index) == b"%d" % index

    assert all(await asyncio.gather(*[one(index) for index in range(1000)]))
    await idle(server)
