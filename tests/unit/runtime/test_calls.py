"""A call's way to a replica and back, over a transport that does what the test says."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from pierhead import Backpressure, DeadlineExceeded, NoReplica, PierheadError, ReplicaDied, Unavailable, UserCodeError
from pierhead.calls.channel import HandleChannel
from pierhead.calls.outliers import FAILURES
from pierhead.calls.replica import Endpoint, ReplicaListing
from pierhead.deadlines import Deadlines
from pierhead.lanes.connection import NEVER_SENT
from pierhead.policies.policy import RoutedCall
from pierhead.policies.registry import register_policy
from pierhead.request import CURRENT, RequestContext

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.fake_transport import FakeCall, FakeService, Make
from tests.unit.runtime.harness import until


def called(fake: FakeService, **options: Any) -> tuple[FakeService, HandleChannel]:
    return fake, fake.channel(**options)


def unary(channel: HandleChannel) -> Any:
    return channel.unary_unary("/test.Test/One")


def stream(channel: HandleChannel) -> Any:
    return channel.unary_stream("/test.Test/Many")


def begin(call: Any) -> asyncio.Future[Any]:
    """Await a call in a task of its own."""

    async def awaited() -> Any:
        return await call

    return asyncio.ensure_future(awaited())


async def turns(count: int = 5) -> None:
    """Let what is ready run; nothing here waits for a network."""
    for _ in range(count):
        await asyncio.sleep(0)


def counts(channel: HandleChannel) -> list[int]:
    return [replica.inflight for replica in channel.pool().replicas()]


class TestGettingThere:
    async def test_the_first_of_two_calls_takes_the_place_and_the_second_waits_for_it(self, service: Make) -> None:
        fake, channel = called(service(), limit=1)
        first, second = begin(unary(channel)("a")), begin(unary(channel)("b"))
        await turns()
        assert [call.request for call in fake.calls] == ["a"]
        assert channel.queued == 1
        fake.calls[0].reply("A")
        assert [call.request for call in fake.calls] == ["b"], "in the very turn in which there is room"
        fake.calls[0].reply("B")
        assert [await first, await second] == ["A", "B"]
        assert channel.queued == 0

    async def test_a_refused_call_goes_elsewhere_once_however_many_await_it(self, service: Make) -> None:
        fake = service(3)
        call = unary(fake.channel())("a")
        both = begin(call), begin(call)
        await turns()
        fake.calls[0].refuse()
        await turns()
        assert len(fake.calls) == 1
        fake.calls[0].reply("A")
        assert [await waiting for waiting in both] == ["A", "A"]

    async def test_a_line_that_is_full_takes_back_what_came_from_it(self, service: Make) -> None:
        fake, channel = called(service(), max_queued_requests=0)
        call = begin(unary(channel)("a"))
        await turns()
        fake.calls[0].refuse()
        await turns()
        assert channel.queued == 1
        await until(lambda: bool(fake.calls), "it is asked again")
        fake.calls[0].reply("A")
        assert await call == "A"

    async def test_refused_too_late_it_goes_nowhere(self, service: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        fake, channel = called(service(2))
        clock = Clock(channel, monkeypatch)
        call = begin(unary(channel)("a", timeout=1))
        await turns()
        clock.now += 1
        fake.calls[0].refuse()
        with pytest.raises(Backpressure):
            await call
        assert fake.calls == []

    async def test_without_budget_it_pauses_and_can_be_cancelled_then(self, service: Make) -> None:
        fake, channel = called(service(2))
        while channel.pool().budget.spend(time.monotonic()):
            pass
        call = unary(channel)("a")
        waiting = begin(call)
        await turns()
        fake.calls[0].refuse()
        await turns()
        assert fake.calls == []
        assert not call.done()
        assert call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert channel.metrics.handle_requests.values[("fake", "cancelled")] == 1
        assert counts(channel) == [0, 0]

    async def test_it_continues_after_any_number_of_pauses(
        self, service: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake, channel = called(service())
        clock = Clock(channel, monkeypatch)
        waiting = begin(unary(channel)("a", timeout=3600))

        async def asked() -> None:
            while not fake.calls:
                clock.now += 0.2
                await clock.turn()

        for _ in range(1100):
            await asyncio.wait_for(asked(), PATIENCE_S)
            while channel.pool().budget.spend(clock.now):
                pass
            fake.calls[0].refuse()
            await turns()
        await asyncio.wait_for(asked(), PATIENCE_S)
        fake.calls[0].reply("A")
        assert await waiting == "A"

    async def test_what_it_raises_for_one_in_line_leaves_the_next_its_turn(self, service: Make) -> None:
        fake, channel = called(service(), limit=1)
        calls = [begin(unary(channel)(number)) for number in range(3)]
        await turns()
        fake["r0"].raises = TypeError("no message")
        fake.calls[0].reply()
        fake["r0"].raises = None
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [str, TypeError, TypeError]
        assert counts(channel) == [0]
        assert channel.queued == 0

    async def test_a_request_without_time_left_reaches_nobody(self, service: Make) -> None:
        fake, channel = called(service(2))
        CURRENT.set(RequestContext("request-1", time.monotonic() - 1))
        for _ in range(2 * FAILURES):
            with pytest.raises(DeadlineExceeded, match=r"^test.Test/One: not sent, its deadline has passed already"):
                await unary(channel)("a")
        assert fake["r0"].calls == fake["r1"].calls == []


class TestLeaving:
    @pytest.fixture(autouse=True)
    def by_reference_counts_alone(self) -> Iterator[None]:
        gc.disable()
        yield
        gc.enable()

    async def test_a_call_that_nobody_holds_is_cancelled_at_once(self, service: Make) -> None:
        fake, channel = called(service())
        call = unary(channel)("a")
        (there,) = fake.calls
        del call
        assert there.cancelled()
        assert counts(channel) == [0]
        assert channel.metrics.handle_requests.values[("fake", "cancelled")] == 1

    async def test_one_that_has_ended_is_left_alone(self, service: Make) -> None:
        fake, channel = called(service())
        ended: list[Any] = []
        call = unary(channel)("a")
        call.add_done_callback(lambda _: ended.append(1))
        fake.calls[0].reply("A")
        assert await call == "A"
        assert await call == "A"
        call.add_done_callback(lambda _: ended.append(2))
        del call
        assert ended == [1, 2]
        assert channel.metrics.handle_requests.values == {("fake", "ok"): 1}

    async def test_one_that_gets_to_no_replica_has_ended_before_anybody_asks(self, service: Make) -> None:
        fake, channel = called(service(), limit=1, max_queued_requests=0)
        first = begin(unary(channel)("first"))
        ended: list[Any] = []
        refused = unary(channel)("refused")
        refused.add_done_callback(ended.append)
        assert ended == [refused]
        assert refused.done()
        assert channel.metrics.handle_requests.values[("fake", Backpressure.kind)] == 1
        with pytest.raises(Backpressure):
            await refused
        assert channel.metrics.handle_requests.values[("fake", Backpressure.kind)] == 1
        await turns()
        fake.calls[0].reply()
        await first

    async def test_what_a_done_callback_does_is_not_felt_by_other_calls(self, service: Make) -> None:
        channel = service().channel()
        pool = channel.pool()
        pool.update(ReplicaListing([]))
        calls = [unary(channel)("a"), unary(channel)("b")]
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))

        def again(call: Any) -> None:
            calls.append(unary(channel)("again"))
            raise ZeroDivisionError

        calls[0].add_done_callback(again)
        await pool.close()
        assert all(call.done() for call in calls[:2])
        await turns()
        assert [type(error) for error in told] == [ZeroDivisionError]
        for call in calls[:2]:
            with pytest.raises(NoReplica, match="were closed by this process"):
                await call
        calls[2].cancel()

    async def test_whoever_waits_for_what_comes_first_may_be_cancelled_too(self, service: Make) -> None:
        fake, channel = called(service(), limit=1)
        first, second = begin(unary(channel)("first")), unary(channel)("second")
        waiting = begin(second.initial_metadata())
        await turns()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert second.cancelled()
        assert channel.queued == channel.pool().waiting == 0
        fake.calls[0].reply()
        await first
        assert fake.calls == []


class Watching:
    """Chooses the last one, and records what it learns of the calls."""

    def __init__(self, _: Random) -> None:
        self.calls: list[tuple[str, Any, str | None, str | None]] = []
        self.routed: list[str] = []

    def choose(self, candidates: Sequence[Any], call: RoutedCall) -> Any:
        self.calls.append((call.path, call.request, call.session_id, call.model_id))
        return candidates[-1]

    def on_routed(self, candidate: Any, _: RoutedCall) -> None:
        self.routed.append(candidate.name)


register_policy("watching", Watching)


class Raising:
    def __init__(self, _: Random) -> None: ...

    def choose(self, _: object, __: object) -> Any:
        raise KeyError("session")


register_policy("raising", Raising)


class TestPolicies:
    async def test_they_know_the_call(self, service: Make) -> None:
        channel = service(2).channel(policy="watching")
        calls = [unary(channel)("a"), channel.stream_stream("/test.Test/Both")()]
        CURRENT.set(RequestContext("request-1", time.monotonic() + 9, session_id="s-1", model_id="m-1"))
        calls.append(unary(channel)("b"))
        calls.append(unary(channel)("c", metadata=(("x-session-id", "s-2"), ("other", "x"))))
        policy = channel.binding().router.policy
        assert isinstance(policy, Watching)
        assert policy.calls == [
            ("/test.Test/One", "a", None, None),
            ("/test.Test/Both", None, None, None),
            ("/test.Test/One", "b", "s-1", "m-1"),
            ("/test.Test/One", "c", "s-2", "m-1"),
        ]
        assert policy.routed == ["r1:1"] * 4

    async def test_one_that_fails_raises_where_the_call_is_awaited(self, service: Make) -> None:
        channel = service(2).channel(policy="raising")
        call = unary(channel)("a")
        with pytest.raises(UserCodeError, match=r'policy "raising": choose failed: KeyError: \'session\' \[error id'):
            await call
        assert await call.code() is grpc.StatusCode.INTERNAL
        assert channel.metrics.handle_requests.values[("fake", "internal")] == 1
        assert counts(channel) == [0, 0]


class TestBounds:
    @pytest.mark.parametrize(
        ("own", "told", "settings", "bound"),
        [(None, None, {}, -1), (None, None, {"max_queued_requests": 7}, 7), (None, 3, {"max_queued_requests": 7}, 3),
         (None, -1, {"max_queued_requests": 7}, -1), (None, 0, {}, 0), (5, 3, {}, 5), (-1, 3, {}, -1)],
    )  # fmt: skip
    async def test_the_handle_s_own_word_counts_before_the_service_s_and_that_before_the_process_s(
        self, service: Make, own: int | None, told: int | None, settings: dict[str, int], bound: int
    ) -> None:
        channel = service(**settings).channel(max_queued_requests=own)
        channel.pool().update(ReplicaListing([Endpoint("r0", "r0:1")], told))
        assert channel.binding().max_queued == bound

    async def test_a_call_gives_up_in_time_and_says_what_it_waited_for(self, service: Make) -> None:
        fake, channel = called(service(), limit=1)
        first = unary(channel)("a")
        with pytest.raises(Backpressure, match=r"every replica of fake is full: r0 works on 1 of 1; none had room"):
            await unary(channel)("b", timeout=0.1)
        fake["r0"].become(False)
        with pytest.raises(NoReplica, match=r"no replica of fake can be called: r0 is not connected"):
            await unary(channel)("b", timeout=0.1)
        first.cancel()


async def fail(fake: FakeService, channel: HandleChannel, code: grpc.StatusCode, trailers: dict[str, str]) -> FakeCall:
    call = unary(channel)("a")
    (there,) = fake.calls
    there.fail(code, "it went wrong", **trailers)
    with pytest.raises(PierheadError):
        await call
    return there


class TestOutliers:
    async def test_a_replica_that_is_broken_is_left_out_and_that_is_counted(self, service: Make) -> None:
        from pierhead.metrics import PROCESS  # the pool is the process's, not the handle's

        fake = service(2)
        channel = fake.channel(policy="watching")  # which always chooses the last one
        before = PROCESS.handle_ejections.values.get(("fake",), 0)
        for _ in range(FAILURES):
            there = await fail(fake, channel, grpc.StatusCode.INTERNAL, {"ongoing": "0", "error": "internal"})
            assert there.connection is fake["r1"]
        assert (await fail(fake, channel, grpc.StatusCode.NOT_FOUND, {})).connection is fake["r0"]
        assert "r1:1 works on 0, is left out for" in channel.pool().describe()
        assert PROCESS.handle_ejections.values[("fake",)] == before + 1

    async def test_an_answer_that_blames_the_request_is_an_answer(self, service: Make) -> None:
        fake, channel = called(service(2), policy="watching")
        for _ in range(2):
            for _ in range(FAILURES - 1):
                assert (await fail(fake, channel, grpc.StatusCode.INTERNAL, {})).connection is fake["r1"]
            await fail(fake, channel, grpc.StatusCode.NOT_FOUND, {"ongoing": "0"})
        assert fake.replica(channel, "r1").standing.failures == 0

    async def test_a_call_that_may_have_waited_for_a_place_says_nothing_by_its_deadline(self, service: Make) -> None:
        fake, channel = called(service(2), policy="watching")
        pool = channel.pool()
        for _ in range(2 * FAILURES):
            pool.update(ReplicaListing([Endpoint("r0", "r0:1", draining=True), Endpoint("r1", "r1:1", draining=True)]))
            call = begin(unary(channel)("a"))
            await turns()
            pool.update(ReplicaListing([Endpoint("r0", "r0:1"), Endpoint("r1", "r1:1")]))
            (there,) = fake.calls
            assert there.connection is fake["r1"]
            there.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            with pytest.raises(DeadlineExceeded):
                await call

    async def test_a_call_that_was_never_sent_goes_elsewhere_and_counts(self, service: Make) -> None:
        fake, channel = called(service(2), policy="watching")
        call = begin(unary(channel)("a"))
        await turns()
        fake.calls[0].fail(grpc.StatusCode.UNAVAILABLE, NEVER_SENT)
        await turns()
        assert fake["r1"].checks == 1
        assert fake.replica(channel, "r1").standing.failures == 1
        fake["r0"].now[0].reply("A")
        assert await call == "A"

    async def test_a_stream_cut_off_by_its_deadline_had_been_answered(self, service: Make) -> None:
        fake, channel = called(service(2), policy="watching")
        for _ in range(2 * FAILURES):
            call = stream(channel)("a")
            (there,) = fake.calls
            there.message(1)
            assert await anext(call) == 1
            there.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            with pytest.raises(DeadlineExceeded):
                await anext(call)
            assert there.connection is fake["r1"]


class TestStreamsOfRequests:
    def both(self, channel: HandleChannel) -> Any:
        return channel.stream_stream("/test.Test/Both")

    @pytest.mark.parametrize("as_grpc", [False, True])
    async def test_one_of_which_nothing_was_sent_may_move(self, service: Make, as_grpc: bool) -> None:
        fake, channel = called(service(2), policy="watching")
        fake["r1"].as_grpc = as_grpc
        call = self.both(channel)()
        fake.calls[0].refuse("draining")
        await call.write("a")
        (there,) = fake.calls
        assert there.connection is fake["r0"]
        assert there.written == ["a"]
        there.message("A")
        assert await call.read() == "A"
        there.reply()
        assert await call.read() is grpc.aio.EOF

    async def test_whoever_notices_first_reader_or_writer_it_moves_once(self, service: Make) -> None:
        fake, channel = called(service(3), policy="watching")
        call = self.both(channel)()
        reading = begin(call.read())
        await turns()
        fake.calls[0].refuse("draining")
        await asyncio.gather(call.write("a"), turns())
        (there,) = fake.calls
        assert there.written == ["a"]
        there.message("A")
        assert await reading == "A"
        call.cancel()

    async def test_one_of_which_something_was_sent_may_not(self, service: Make) -> None:
        fake = service(2)
        call = self.both(fake.channel())()
        await call.write("a")
        fake.calls[0].refuse("draining")
        with pytest.raises(Unavailable):
            await call.read()
        assert fake.calls == []

    async def test_one_from_an_iterator_may_not(self, service: Make) -> None:
        fake, channel = called(service(2))
        call = channel.stream_unary("/test.Test/Sum")(iter("abc"))
        fake.calls[0].fail(grpc.StatusCode.UNAVAILABLE, NEVER_SENT)
        with pytest.raises(NoReplica, match="a call that sends a stream is not moved"):
            await call
        assert counts(channel) == [0, 0]

    async def test_a_failure_is_learnt_of_once_however_many_notice(self, service: Make) -> None:
        fake, channel = called(service(2), policy="watching")
        call = self.both(channel)()
        await call.write("a")
        fake.calls[0].fail(grpc.StatusCode.UNAVAILABLE, "gone")
        for use in (call.read, call.read, lambda: call.write("b")):
            with pytest.raises(ReplicaDied):
                await use()
        assert fake.replica(channel, "r1").standing.failures == 1


class Clock:
    """The time of a channel's calls, which goes a millisecond a turn of the event loop."""

    def __init__(self, channel: HandleChannel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        loop, pool = asyncio.get_running_loop(), channel.pool()
        pool._clock = self
        pool._call_later = lambda _, callback: loop.call_soon(callback)
        channel.binding().deadlines = Deadlines(clock=self, call_later=lambda _, callback: loop.call_later(0, callback))
        for module in ("calls.call", "calls.kinds"):
            monkeypatch.setattr(f"pierhead.{module}.time", SimpleNamespace(monotonic=self))

    def __call__(self) -> float:
        return self.now

    async def turn(self) -> None:
        self.now += 0.001
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(4))
async def test_thousands_of_calls_cancelled_refused_and_failed_leave_nothing_behind(
    service: Make, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Random callers and replicas: at the end every count is back, every call is accounted for, and none was worked on
    twice.
    """
    fake, channel = called(service(3, request_timeout_s=0.5), max_queued_requests=40)
    clock, pool = Clock(channel, monkeypatch), channel.pool()
    pool.update(ReplicaListing([Endpoint(f"r{n}", f"r{n}:1", max_ongoing_requests=4) for n in range(3)]))
    rng, tasks, begun, worked = Random(seed), set[asyncio.Task[None]](), 0, Counter[int]()

    async def call() -> None:
        nonlocal begun
        begun += 1
        await unary(channel)(begun)

    for _ in range(3000):
        for _ in range(rng.choice([0, 1, 3])):
            task = asyncio.create_task(call())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks and rng.random() < 0.2:
            rng.choice(sorted(tasks, key=id)).cancel()
        for there in fake.calls:
            if rng.random() < 0.1:
                worked[there.request] += end_somehow(there, rng.random(), rng.randrange(2))
        await clock.turn()
        assert counts(channel) == [len(fake[f"r{n}"].now) for n in range(3)]
        assert max(counts(channel)) <= 4
        assert channel.queued == pool.waiting <= 40 + 12
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert counts(channel) == [0, 0, 0]
    assert channel.queued == pool.waiting == 0
    assert channel.metrics.queued.values == {("fake",): 0}
    outcomes = Counter({key[1]: value for key, value in channel.metrics.handle_requests.values.items()})
    assert outcomes.total() == begun
    assert outcomes["ok"] > 500
    assert outcomes["backpressure"] > 500
    assert outcomes["cancelled"] > 200
    assert max(worked.values()) == 1


def end_somehow(there: FakeCall, how: float, others: int) -> bool:
    """End a call in one of many ways; returns whether it was worked on."""
    load = len(there.connection.now) - 1 + others
    if how < 0.1:
        there.refuse(ongoing=4)
    elif how < 0.15:
        there.fail(grpc.StatusCode.UNAVAILABLE, NEVER_SENT)
    elif how < 0.2:
        there.fail(grpc.StatusCode.INTERNAL, "boom", ongoing=str(load))
    elif how < 0.25:
        there.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    else:
        there.reply(ongoing=str(load))
    return how >= 0.15
