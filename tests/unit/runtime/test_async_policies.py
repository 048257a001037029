"""Policies that are awaited, and policies that return ranked groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead import Backpressure, DeadlineExceeded, NoReplica, UserCodeError, close_handles, current_request
from pierhead.calls.channel import HandleChannel
from pierhead.calls.replica import Endpoint, ReplicaListing
from pierhead.policies.policy import Policy, RoutedCall
from pierhead.policies.registry import register_policy
from pierhead.policies.router import PolicyRouter
from pierhead.request import CURRENT, RequestContext

from tests.unit.runtime.fake_transport import FakeService, Make
from tests.unit.runtime.harness import until
from tests.unit.runtime.test_calls import begin, counts, turns, unary
from tests.unit.runtime.test_policies import CALL, Fake, candidates, loads, seeds


class Asked:
    """An asynchronous policy with a given answer, which records its calls."""

    def __init__(self, _: Random) -> None:
        self.shown: list[list[str]] = []
        self.gone: list[str] = []
        self.routed: list[str] = []
        self.answer: Callable[[dict[str, Any]], Awaitable[Any]] = answer()

    async def choose(self, of: Sequence[Any], call: RoutedCall) -> Any:
        self.shown.append([one.name for one in of])
        return await self.answer({one.name.partition(":")[0]: one for one in of})

    def on_routed(self, candidate: Any, call: RoutedCall) -> None:
        self.routed.append(candidate.name)

    def on_replica_gone(self, name: str) -> None:
        self.gone.append(name)


def answer(*groups: str) -> Callable[[dict[str, Any]], Awaitable[Any]]:
    """Groups by the names in them: answer("r0 r2", "r1")."""

    async def answered(of: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        return [[of[name] for name in group.split() if name in of] for group in groups]

    return answered


class Patient(Asked):
    waits_for_named = True


register_policy("questioned", Asked)
register_policy("patient", Patient)


def asked(
    fake: FakeService, *groups: str, policy: str = "questioned", **options: Any
) -> tuple[FakeService, HandleChannel, Asked]:
    """A service, and a handle to it whose policy answers with these groups."""
    channel = fake.channel(policy=policy, **options)
    found = channel.binding().router.policy
    assert isinstance(found, Asked)
    found.answer = answer(*groups)
    return fake, channel, found


def limit(channel: HandleChannel, *limits: int) -> None:
    """How many calls each replica takes."""
    listed = [Endpoint(f"r{n}", f"r{n}:1", max_ongoing_requests=most) for n, most in enumerate(limits)]
    channel.pool().update(ReplicaListing(listed))


async def replied(fake: FakeService, call: asyncio.Future[Any]) -> None:
    """The replica that has the call answers it."""
    fake.calls[0].reply("A")
    assert await call == "A"


def where(fake: FakeService) -> list[str]:
    """The replicas of the calls in flight, in the order of the requests."""
    return [call.connection.address.partition(":")[0] for call in sorted(fake.calls, key=lambda call: call.request)]


class Groups:
    """A plain policy that returns the groups that it was given."""

    def __init__(self, groups: Any) -> None:
        self.groups = groups

    def choose(self, _: object, __: object) -> Any:
        return self.groups


def router_of(policy: Policy, seed: int = 1) -> PolicyRouter:
    name = f"test {id(policy)} {time.monotonic_ns()}"
    register_policy(name, lambda _: policy)
    return PolicyRouter(name, Random(seed))


class Ranked:
    """A call as an asynchronous policy has ranked it."""

    session_id = model_id = request = None
    path = "/test.Test/Test"

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks


class Awaited:
    async def choose(self, _: object, __: object) -> Any:
        raise NotImplementedError


AWAITED = router_of(Awaited())
GROUPS = Groups(None)
PLAIN = router_of(GROUPS)


@given(loads, seeds, st.data(), st.booleans())
def test_the_first_group_that_has_one_with_room_gets_the_call_and_at_last_any(
    numbers: list[int], seed: int, data: st.DataObject, is_plain: bool
) -> None:
    everyone = candidates(numbers)
    ranks = data.draw(st.lists(st.lists(st.sampled_from(everyone), unique_by=lambda one: one.name), max_size=4))
    room = everyone if is_plain else data.draw(st.lists(st.sampled_from(everyone), min_size=1, unique_by=id))
    if is_plain:
        GROUPS.groups = ranks
        chosen = PLAIN.choose(room, CALL)
    else:
        chosen = AWAITED.choose(room, Ranked(ranks))
    best: list[Fake] = next((members for group in ranks if (members := [one for one in group if one in room])), room)
    assert chosen in best
    if len(best) <= 2:
        assert chosen.load == min(one.load for one in best)
    elif len({one.load for one in best}) == len(best):
        assert chosen is not max(best, key=lambda one: one.load), "the less loaded of two"


@pytest.mark.parametrize(
    "wrong",
    [None, "replica-00", [Fake("replica-00", 0)], [[Fake("other", 0)]], [["replica-00"]], {"replica-00": 1}],
    ids=str,
)
def test_anything_else_is_an_error_that_says_what_was_expected(wrong: Any) -> None:
    expected = r"expected one of its candidates \(replica-00\), or a list of lists of them, best first, found a "
    with pytest.raises(UserCodeError, match=expected):
        router_of(Groups(wrong)).choose(candidates([0]), CALL)


class TestCalls:
    async def test_the_best_group_with_room_is_taken_and_the_policy_told(self, service: Make) -> None:
        fake, channel, policy = asked(service(3), "r1", "r2", "r0")
        limit(channel, 1, 1, 1)
        calls = [begin(unary(channel)(name)) for name in "abc"]
        await until(lambda: len(fake.calls) == 3, "each has found room")
        assert where(fake) == ["r1", "r2", "r0"]
        assert policy.routed == ["r1", "r2", "r0"]
        for call in fake.calls:
            call.reply(call.request.upper())
        assert [await call for call in calls] == ["A", "B", "C"]

    async def test_one_candidate_is_a_group_of_its_own(self, service: Make) -> None:
        fake, channel, policy = asked(service(3))

        async def last(of: dict[str, Any]) -> Any:
            return of["r2"]

        policy.answer = last
        call = begin(unary(channel)("a"))
        await until(lambda: where(fake) == ["r2"], "it is called")
        await replied(fake, call)

    async def test_a_refused_call_goes_to_the_next_group_and_the_policy_is_asked_once(self, service: Make) -> None:
        fake, channel, policy = asked(service(3), "r2", "r0")
        call = begin(unary(channel)("a"))
        tried = []
        for _ in range(3):
            await until(lambda: bool(fake.calls), "it is at a replica")
            tried += where(fake)
            fake.calls[0].refuse()
            await turns()
        assert tried == ["r2", "r0", "r1"]
        assert len(policy.shown) == 1
        await until(lambda: bool(fake.calls), "it comes from the line to one of them")
        await replied(fake, call)
        assert len(policy.shown) == 1

    async def test_a_call_may_wait_for_its_replica_and_holds_up_no_other(self, service: Make) -> None:
        fake, channel, policy = asked(service(2), "r0", policy="patient")
        limit(channel, 1, 1)
        calls = [begin(unary(channel)(name)) for name in "ab"]
        await until(lambda: channel.queued == 1, "the second waits, although r1 has room")
        policy.answer = answer("r1")
        other = begin(unary(channel)("c"))
        await until(lambda: where(fake) == ["r0", "r1"], "the third does not stand behind it")
        fake.calls[0].reply("A")
        await until(lambda: where(fake) == ["r0", "r1"] and channel.queued == 0, "its turn has come")
        for call in list(fake.calls):
            call.reply(call.request.upper())
        assert [await call for call in (*calls, other)] == ["A", "B", "C"]

    async def test_a_call_does_not_wait_for_a_replica_that_has_gone(self, service: Make) -> None:
        fake, channel, _ = asked(service(2), "r0", policy="patient")
        limit(channel, 1, 1)
        calls = [begin(unary(channel)(name)) for name in "ab"]
        await until(lambda: channel.queued == 1, "the second waits")
        channel.pool().update(ReplicaListing([Endpoint("r1", "r1:1", max_ongoing_requests=1)]))
        await until(lambda: where(fake) == ["r0", "r1"], "it goes to another one")
        for call in list(fake.calls):
            call.reply(call.request.upper())
        assert [await call for call in calls] == ["A", "B"]

    async def test_full_replicas_are_shown_and_a_call_in_line_keeps_its_ranks(self, service: Make) -> None:
        fake, channel, policy = asked(service(2), "r0", "r1")
        limit(channel, 1, 1)
        calls = [begin(unary(channel)(name)) for name in "abc"]
        await until(lambda: channel.queued == 1, "the third is in line")
        assert policy.shown == [["r0", "r1"]] * 3
        at_one, at_other = sorted(fake.calls, key=lambda call: call.request)
        at_other.reply("B")
        await until(lambda: where(fake) == ["r0", "r1"], "it takes what is free")
        assert len(policy.shown) == 3
        for call in (at_one, *fake.calls):
            call.reply(call.request.upper())
        assert [await call for call in calls] == ["A", "B", "C"]

    async def test_a_call_that_the_line_has_no_place_for_is_refused_unasked(self, service: Make) -> None:
        fake, channel, policy = asked(service(1), max_queued_requests=0)
        limit(channel, 1)
        first = begin(unary(channel)("a"))
        await until(lambda: bool(fake.calls), "it is called")
        with pytest.raises(Backpressure):
            await unary(channel)("b")
        assert len(policy.shown) == 1
        await replied(fake, first)

    async def test_calls_that_came_before_any_replica_are_asked_when_one_can_be_called(self, service: Make) -> None:
        fake, channel, policy = asked(service(2))
        for name in ("r0", "r1"):
            fake[name].become(False)
        seen: list[str | None] = []

        async def noticing(of: dict[str, Any]) -> Any:
            context = current_request()
            seen.append(context and context.request_id)
            return []

        policy.answer = noticing
        CURRENT.set(RequestContext("mine", time.monotonic() + 60))
        call = begin(unary(channel)("a"))
        await turns()
        CURRENT.set(None)
        assert (channel.queued, policy.shown) == (1, [])
        fake["r1"].become(True)
        await until(lambda: where(fake) == ["r1"], "it is called")
        assert policy.shown == [["r1:1"]]
        assert seen == ["mine"], "in the context of its own request"
        await replied(fake, call)
        assert channel.queued == 0

    async def test_what_it_raises_is_the_error_of_the_call(self, service: Make) -> None:
        _, channel, policy = asked(service(2))

        async def fail(_: object) -> Any:
            raise KeyError("session")

        async def cancelled(_: object) -> Any:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

        async def wrong(_: object) -> Any:
            return "r0"

        for how, words in ((fail, "KeyError: 'session'"), (cancelled, "CancelledError: "), (wrong, "TypeError: exp")):
            policy.answer = how
            expected = rf'policy "questioned": choose failed: {words}.*\[error id \w{{16}}\]'
            with pytest.raises(UserCodeError, match=expected):
                await unary(channel)("a")
        assert counts(channel) == [0, 0]
        assert channel.metrics.handle_requests.values[("fake", "internal")] == 3

    async def test_one_that_does_not_return_ends_with_the_deadline(self, service: Make) -> None:
        _, channel, policy = asked(service(2))
        ended = asyncio.Event()

        async def wait(_: object) -> Any:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        policy.answer = wait
        with pytest.raises(DeadlineExceeded, match=r"test.Test/One: not sent, the policy has chosen no replica within"):
            await unary(channel)("a", timeout=0.05)
        await asyncio.wait_for(ended.wait(), 10)
        assert counts(channel) == [0, 0]

    async def test_a_call_that_is_cancelled_asks_no_more(self, service: Make) -> None:
        fake, channel, policy = asked(service(2))
        begun, ended = asyncio.Event(), asyncio.Event()

        async def wait(_: object) -> Any:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        policy.answer = wait
        awaited, at_once = begin(unary(channel)("a")), unary(channel)("b")
        at_once.cancel()  # before it has been asked
        await begun.wait()
        awaited.cancel()
        await asyncio.wait([awaited])
        await ended.wait()
        assert awaited.cancelled()
        assert at_once.cancelled()
        assert (fake.calls, len(policy.shown), channel.queued) == ([], 1, 0)

    async def test_a_replica_that_goes_in_that_time_is_not_called(self, service: Make) -> None:
        fake, channel, policy = asked(service(2))
        limit(channel, 1, 1)
        go = asyncio.Event()

        async def slow(of: dict[str, Any]) -> Any:
            await go.wait()
            return of["r1"]

        policy.answer = slow
        call = begin(unary(channel)("a"))
        await turns()
        policy.gone.clear()
        limit(channel, 1)
        assert policy.gone == ["r1"], "the hook is called while it is asked"
        go.set()
        await until(lambda: where(fake) == ["r0"], "another one takes it")
        await replied(fake, call)

    async def test_calls_that_are_being_ranked_when_all_is_closed_end(self, service: Make) -> None:
        _, channel, policy = asked(service(2))
        go = asyncio.Event()

        async def slow(of: dict[str, Any]) -> Any:
            await go.wait()
            return []

        policy.answer = slow
        call = begin(unary(channel)("a"))
        await turns()
        await close_handles()
        go.set()
        with pytest.raises(NoReplica, match="were closed by this process"):
            await call


async def test_a_call_in_line_is_asked_when_the_service_changes_to_an_asynchronous_policy(service: Make) -> None:
    fake = service(1)
    channel = fake.channel(limit=1)
    first, second = begin(unary(channel)("a")), begin(unary(channel)("b"))
    await turns()
    assert channel.queued == 1
    channel.pool().update(ReplicaListing([Endpoint("r0", "r0:1", max_ongoing_requests=1)], policy="questioned"))
    policy = channel.binding().router.policy
    assert isinstance(policy, Asked)
    fake.calls[0].reply("A")
    await until(lambda: len(fake.calls) == 1, "the second is called")
    assert policy.shown == [["r0"]]
    fake.calls[0].reply("B")
    assert [await first, await second] == ["A", "B"]


async def test_a_stream_goes_by_the_ranks_too(service: Make) -> None:
    fake, channel, _ = asked(service(2), "r1")
    call = channel.stream_stream("/test.Test/Both")()
    await call.write("a")
    (there,) = fake.calls
    assert there.connection is fake["r1"]
    there.message("A")
    assert await call.read() == "A"
    call.cancel()
