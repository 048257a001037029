"""Calls over lanes in detail; what holds for plain gRPC as well is in test_transports.py."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from pierhead import BadRequest, UserCodeError
from pierhead.calls.channel import HandleChannel
from pierhead.errors import DeadlineExceeded, PayloadTooLarge, PierheadError
from pierhead.lanes.caller import CallerLane
from pierhead.lanes.metadata import MAX_BYTES
from pierhead.metrics import RuntimeMetrics
from pierhead.replica.server import ReplicaServer

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, know, until
from tests.unit.runtime.pipes import LARGE, Pipes, PipesStub, idle, numbers


@pytest.fixture
async def pipes(cluster: Cluster) -> tuple[PipesStub, Pipes, ReplicaServer]:
    service = Pipes()
    server = await cluster.start(service, max_ongoing_requests=10_000)
    know(server)
    return PipesStub(HandleChannel("echo-child", metrics=RuntimeMetrics())), service, server


Served = tuple[PipesStub, Pipes, ReplicaServer]


class TestUnary:
    async def test_what_cannot_be_sent_harms_only_its_own_call(self, pipes: Served) -> None:
        stub, service, server = pipes
        service.gate.clear()
        other = asyncio.ensure_future(stub.One(b"other"))
        await until(lambda: server.readiness().ongoing == 1, "the other call is in flight")
        for value in (5, "\udc80"):
            with pytest.raises((TypeError, ValueError)):
                await stub.One(b"hi", metadata=(("mine", value),))
        for key in ("", "a b", "k\udc80"):
            with pytest.raises((ValueError, grpc.aio.InternalError)):
                await stub.One(b"hi", metadata=((key, "value"),))
        assert server.readiness().ongoing == 1, "nothing of them has come there"
        service.gate.set()
        assert await other == b"other"
        assert await stub.One(b"hi") == b"hi"

    async def test_the_callers_own_request_id(self, pipes: Served) -> None:
        assert b"('x-request-id', 'mine')" in await pipes[0].One(b"metadata", metadata=(("x-request-id", "mine"),))

    @pytest.mark.parametrize("timeout", [1e14, 2**63 - 1, float("inf")])
    async def test_a_timeout_without_end(self, pipes: Served, timeout: float) -> None:
        assert await pipes[0].One(b"hi", timeout=timeout) == b"hi"

    async def test_much_metadata_in_one_turn(self, pipes: Served) -> None:
        stub, _, _ = pipes
        calls = [stub.One(b"%d" % index, metadata=(("token", "x" * 2000),)) for index in range(3000)]
        assert await asyncio.gather(*calls) == [b"%d" % index for index in range(3000)]

    async def test_a_large_reply_can_be_asked_for_again(self, pipes: Served) -> None:
        call = pipes[0].One(b"make %d" % LARGE)

        async def wait() -> bytes:
            return await call  # type: ignore[no-any-return]

        one, other = await asyncio.gather(wait(), wait())
        assert len(one) == LARGE
        assert one == other == await call


@dataclass(frozen=True)
class Frozen(Exception):
    what: str


class Odd(PierheadError):
    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        return (("key", 5),)  # type: ignore[return-value]


RAISED: dict[bytes, Callable[[], Exception]] = {
    b"error as message": lambda: BadRequest(ValueError("x")),  # type: ignore[arg-type]  # as code without types has it
    b"error that nothing can be noted on": lambda: Frozen("x"),
    b"error with a number as metadata": lambda: Odd("x"),
}


class Careless(Pipes):
    """Ends its calls with what cannot be sent."""

    async def One(self, request: bytes, context: Any) -> bytes:
        match request:
            case b"error as details":
                await context.abort(grpc.StatusCode.NOT_FOUND, ValueError("x"))
            case b"no details":
                await context.abort(grpc.StatusCode.NOT_FOUND, None)
            case b"endless details":
                await context.abort(grpc.StatusCode.NOT_FOUND, "x" * 5_000_000)
            case b"number as details":
                context.set_code(grpc.StatusCode.NOT_FOUND)
                context.set_details(5)
            case b"number as metadata":
                context.set_trailing_metadata((("key", 5),))
            case b"endless metadata":
                context.set_trailing_metadata((("key", "x" * 100_000),))
            case b"number as headers":
                await context.send_initial_metadata((("key", 5),))
            case b"error beside all metadata that there may be":
                context.set_trailing_metadata((("key", "x" * (MAX_BYTES - 20)),))
                raise BadRequest("x")
        if request in RAISED:
            raise RAISED[request]()
        return await super().One(request, context)


@pytest.mark.parametrize(
    "what",
    [
        "error as details", "no details", "endless details", "number as details", "number as metadata",
        "endless metadata", "number as headers", "error as message", "error that nothing can be noted on",
        "error with a number as metadata", "error beside all metadata that there may be",
    ],
)  # fmt: skip
async def test_an_answer_that_cannot_be_sent_is_an_error_of_its_own_call(cluster: Cluster, what: str) -> None:
    service = Careless()
    server = await cluster.start(service)
    know(server)
    stub = PipesStub(HandleChannel("echo-child", metrics=RuntimeMetrics()))
    service.gate.clear()
    other = asyncio.ensure_future(stub.One(b"other"))
    await until(lambda: server.readiness().ongoing == 1, "the other call is in flight")
    with pytest.raises(PierheadError) as raised:
        await stub.One(what.encode(), timeout=PATIENCE_S)
    assert raised.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    service.gate.set()
    assert await other == b"other"


async def test_an_error_that_nothing_can_be_noted_on_is_told_as_any_other(cluster: Cluster) -> None:
    server = await cluster.start(Careless())
    know(server)
    stub = PipesStub(HandleChannel("echo-child", metrics=RuntimeMetrics()))
    with pytest.raises(UserCodeError, match="Frozen") as raised:
        await stub.One(b"error that nothing can be noted on", timeout=PATIENCE_S)
    assert raised.value.error_id


class Hasty(Pipes):
    """Sends what it can at once."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = 0
        self.full = 0
        self.late = ""

    async def Split(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        count, size = (int(word) for word in request.split())
        context.add_done_callback(self._too_late)
        while self.sent < count:
            message = self.sent.to_bytes(4, "big") + b"x" * size
            self.sent += 1
            if context.takes_now:
                self.at_once += 1
                assert context.write_now(message) == context.takes_now
            else:
                self.full += 1
                with pytest.raises(asyncio.InvalidStateError, match="takes no message now"):
                    context.write_now(message)
                yield message

    def _too_late(self, context: Any) -> None:
        assert not context.takes_now
        try:
            context.write_now(b"")
        except asyncio.InvalidStateError as error:
            self.late = str(error)


class TestReplies:
    async def test_what_has_arrived_can_be_taken_at_once(self, pipes: Served) -> None:
        stub, _, server = pipes
        call = stub.Split(b"500 10")
        got, most = [], 0
        async for message in call:
            ready = call.read_ready()
            most = max(most, len(ready))
            got += [message, *ready]
        assert [int.from_bytes(message[:4], "big") for message in got] == list(range(500))
        assert most > 10
        await idle(server)

    async def test_what_comes_can_be_handed_over(self, pipes: Served) -> None:
        stub, _, server = pipes
        call = stub.Split(b"5000 1000")  # more than a window, so what is handed over gives credit, too
        got = [await anext(aiter(call))]
        handed: list[bytes] = []

        def take(messages: list[bytes]) -> bool:
            assert messages
            handed.extend(messages)
            got.extend(messages)
            return True

        call.deliver(take)
        got += [message async for message in call]
        assert [int.from_bytes(message[:4], "big") for message in got] == list(range(5000))
        assert len(handed) == 4999
        await idle(server)

    async def test_who_wants_no_more_is_given_no_more(self, pipes: Served) -> None:
        stub, _, server = pipes
        call = stub.Split(b"500 10")
        got, times = [await call.read()], 0

        def take_once(messages: list[bytes]) -> bool:
            nonlocal times
            times += 1
            got.extend(messages)
            return False

        call.deliver(take_once)
        rest = await call.read()
        before = times
        while rest is not grpc.aio.EOF:
            got.append(rest)
            rest = await call.read()
        assert [int.from_bytes(message[:4], "big") for message in got] == list(range(500))
        assert times == before == 1
        await idle(server)

    async def test_large_ones_are_not_handed_over_and_nothing_overtakes_them(self, pipes: Served) -> None:
        stub, _, server = pipes
        call = stub.Split(b"5 %d" % LARGE)
        got = [await anext(aiter(call))]

        def take(messages: list[bytes]) -> bool:
            got.extend(messages)
            return True

        call.deliver(take)
        async for message in call:
            got.append(message)
            call.deliver(take)
        assert [int.from_bytes(message[:4], "big") for message in got] == list(range(5))
        await idle(server)

    async def test_what_the_taker_raises_the_reader_sees(self, pipes: Served) -> None:
        stub, service, server = pipes
        call = stub.Split(b"1000000 1000")
        await call.read()

        def fail(messages: list[bytes]) -> bool:
            raise ZeroDivisionError("of the taker")

        call.deliver(fail)
        with pytest.raises(ZeroDivisionError, match="of the taker"):
            await call.read()
        await until(lambda: service.ended == 1, "the generator is closed")
        await idle(server)

    async def test_a_taker_that_is_cancelled_harms_no_other_call(self, pipes: Served) -> None:
        stub, service, server = pipes
        service.gate.clear()
        other = asyncio.ensure_future(stub.One(b"other"))
        call = stub.Split(b"1000000 1000")
        await call.read()

        def fail(messages: list[bytes]) -> bool:
            raise asyncio.CancelledError

        call.deliver(fail)
        with pytest.raises(RuntimeError, match="was cancelled"):
            await call.read()
        service.gate.set()
        assert await other == b"other"
        await idle(server)

    async def test_what_takes_runs_in_the_context_of_who_asked_for_it(self, pipes: Served) -> None:
        stub, _, server = pipes
        who: contextvars.ContextVar[str] = contextvars.ContextVar("who")
        seen: set[str] = set()

        def take(messages: list[bytes]) -> bool:
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

    async def test_nothing_is_handed_over_after_cancel(self, pipes: Served) -> None:
        stub, service, server = pipes
        call = stub.Split(b"1000000 1000")
        await call.read()
        handed = []

        def take(messages: list[bytes]) -> bool:
            handed.append(messages)
            call.cancel()
            return True

        call.deliver(take)
        await until(lambda: bool(handed), "something was handed over")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        assert len(handed) == 1
        await until(lambda: service.ended == 1, "the generator is closed")
        await idle(server)

    async def test_a_service_sends_without_waiting_while_the_caller_takes_it(self, cluster: Cluster) -> None:
        service = Hasty()
        server = await cluster.start(service)
        know(server)
        stub = PipesStub(HandleChannel("echo-child", metrics=RuntimeMetrics()))
        call = stub.Split(b"4000 1000")
        got = [await call.read()]
        await until(lambda: service.full > 0, "the caller, who does not read, takes no more")
        assert service.sent < 1000, "a window full"
        async for message in call:
            got.append(message)  # noqa: PERF401 - read one by one
        assert [int.from_bytes(message[:4], "big") for message in got] == list(range(4000))
        assert service.at_once > 3000
        assert service.late == "the call has ended: no message can follow"
        await idle(server)

    async def test_dropping_the_call_ends_the_work(self, pipes: Served) -> None:
        stub, service, server = pipes
        await anext(aiter(stub.Split(b"1000000 1000")))
        await until(lambda: service.ended == 1, "the generator is closed")
        await idle(server)


class TestRequests:
    async def test_written_one_by_one(self, pipes: Served) -> None:
        stub, _, server = pipes
        call = stub.Join()
        for _ in range(10):
            await call.write(b"12345")
        await call.done_writing()
        assert await call == b"10 50"
        await idle(server)

    async def test_a_service_that_does_not_read_stops_the_writer(self, pipes: Served) -> None:
        stub, service, server = pipes
        service.gate.clear()
        call = stub.Join()
        written = 0

        async def write_all() -> None:
            nonlocal written
            for _ in range(20_000):
                await call.write(b"x" * 1000)
                written += 1
            await call.done_writing()

        writing = asyncio.create_task(write_all())
        before = -1
        while before != written:
            before = written
            for _ in range(20):
                reply = await stub.Split(b"1 1").read()
                assert reply == b"\0\0\0\0x"
        assert written < 20_000
        service.gate.set()
        await writing
        assert await call == b"20000 20000000"
        await idle(server)


class TestBeside:
    """What only connections have: a second way for large messages, and a limit for them."""

    @pytest.mark.parametrize("end", ["deadline", "cancel"])
    async def test_a_large_reply_that_does_not_come(
        self, pipes: Served, monkeypatch: pytest.MonkeyPatch, end: str
    ) -> None:
        """The call goes on until all of its reply is here: its deadline holds, and it can be cancelled."""
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

    async def test_a_message_larger_than_any_may_be(self, pipes: Served) -> None:
        with pytest.raises(PayloadTooLarge):
            await pipes[0].Join(iter([b"x" * 70_000_000]), timeout=20)
        await idle(pipes[2])


class TestBoth:
    async def test_from_an_iterator(self, pipes: Served) -> None:
        stub, _, server = pipes
        got = [message async for message in stub.Talk(numbers(3000, 500))]
        assert got == [b"x" * 500] * 3000
        await idle(server)

    async def test_large_ones(self, pipes: Served) -> None:
        stub, _, server = pipes
        got = [len(message) async for message in stub.Talk(numbers(4, LARGE))]
        assert got == [LARGE] * 4
        await idle(server)

    async def test_the_service_may_end_it(self, pipes: Served) -> None:
        stub, service, server = pipes
        call = stub.Talk()
        await call.write(b"one")
        assert await call.read() == b"one"
        await call.write(b"stop")
        assert await call.read() is grpc.aio.EOF
        assert service.ended == 1
        await idle(server)


class Several(Pipes):
    """Works on each call with several tasks at a time."""

    async def Split(self, request: bytes, context: Any) -> None:  # type: ignore[override]  # writes by itself
        async def write(task: int) -> None:
            for _ in range(1000):
                await context.write(b"%d" % task + b"x" * 1000)

        await asyncio.gather(*[write(task) for task in range(3)])

    async def Talk(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        async def answer(task: int) -> None:
            while (message := await context.read()) is not grpc.aio.EOF:
                await context.write(message)

        await asyncio.gather(*[answer(task) for task in range(3)])


class TestSeveralTasks:
    """Beyond gRPC's own, whose contexts fail where a second task writes meanwhile."""

    @pytest.fixture
    async def stub(self, cluster: Cluster) -> PipesStub:
        know(await cluster.start(Several()))
        return PipesStub(HandleChannel("echo-child", metrics=RuntimeMetrics()))

    async def test_write_replies(self, stub: PipesStub) -> None:
        got = [message[:1] async for message in stub.Split(b"", timeout=20)]
        assert sorted(got) == [b"0"] * 1000 + [b"1"] * 1000 + [b"2"] * 1000

    async def test_read_requests(self, stub: PipesStub) -> None:
        call = stub.Talk(timeout=20)
        for turn in range(50):
            for number in range(3):
                await call.write(b"%d" % (3 * turn + number))
            got = {await call.read() for _ in range(3)}
            assert got == {b"%d" % (3 * turn + number) for number in range(3)}
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


class Outliving(Pipes):
    """Leaves a task to write and one to read to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[asyncio.Task[Any]] = []

    async def Talk(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        async def write() -> None:
            while True:
                await context.write(b"x" * 100_000)

        self.left = [asyncio.ensure_future(write()), asyncio.ensure_future(context.read())]
        await asyncio.Event().wait()


async def test_tasks_that_outlive_their_call_are_told_of_its_end(cluster: Cluster) -> None:
    """They would wait for ever: nobody takes a message of it any more, and none comes."""
    service = Outliving()
    server = await cluster.start(service)
    know(server)
    call = PipesStub(HandleChannel("echo-child", metrics=RuntimeMetrics())).Talk(timeout=20)
    await call.read()
    call.cancel()
    await idle(server)
    await until(lambda: all(task.done() for task in service.left), "both have heard")
    assert service.left[0].exception() is not None, "nothing that is written can reach anybody"


async def test_a_thousand_calls_of_all_kinds_at_once(pipes: Served) -> None:
    stub, _, server = pipes

    async def one(index: int) -> Any:
        match index % 4:
            case 0:
                return await stub.One(b"%d" % index) == b"%d" % index
            case 1:
                return len([m async for m in stub.Split(b"20 100")]) == 20
            case 2:
                return await stub.Join(numbers(20, 100)) == b"20 2000"
            case _:
                return [m async for m in stub.Talk(numbers(20, 100))] == [b"x" * 100] * 20

    assert all(await asyncio.gather(*[one(index) for index in range(1000)]))
    await idle(server)
