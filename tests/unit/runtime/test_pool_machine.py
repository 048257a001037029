"""The pool under any sequence of events: calls that come, wait, give up, end well, badly or unheard, replicas that
refuse, drain, vanish and fail, policies that raise, on a clock in the test's hand.

After each event: no count has leaked, no call waits that could be served, and the oldest is served first.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pierhead.calls.lease import CallPlace
from pierhead.calls.outliers import most_out
from pierhead.calls.replica import Replica
from pierhead.errors import UserCodeError
from pierhead.policies.balanced import PowerOfTwo
from pierhead.policies.policy import RoutedCall
from pierhead.policies.registry import register_policy
from pierhead.policies.router import PolicyRouter

from tests.unit.runtime.test_policies import CALL, FakeCall
from tests.unit.runtime.test_pool import Waiting, World

LIMITS = (1, 2, 3, 2)
NAMES = st.sampled_from([f"r{number}" for number in range(len(LIMITS))])


class Suspicious(PowerOfTwo):
    """Looks whether what it is shown may be called, and fails for some calls."""

    machine: PoolMachine

    def choose(self, candidates: Sequence[Any], call: Any) -> Any:
        world = self.machine.world
        self.machine.shown_well &= (
            all(replica.connection.ready and not replica.drains for replica in candidates)
            and all(replica.load < replica.limit for replica in candidates)
            and [replica.name for replica in candidates] == sorted({replica.name for replica in candidates})
        )
        every = len(world.pool._callable)
        unwanted = sum(replica.standing.unwanted(world.now) for replica in world.pool._callable)
        shown_unwanted = sum(replica.standing.unwanted(world.now) for replica in candidates)
        self.machine.shown_well &= shown_unwanted <= max(0, unwanted - most_out(every))
        if self.machine.policy_fails:
            raise ValueError("it fails now")
        return super().choose(candidates, call)


register_policy("suspicious", Suspicious)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(*LIMITS)
        self.policy_fails = False
        self.shown_well = True
        self.router = PolicyRouter("suspicious", Random(1))
        assert isinstance(self.router.policy, Suspicious)
        self.router.policy.machine = self
        self.leases: list[CallPlace] = []
        self.waiting: list[Waiting] = []
        self.heard: list[CallPlace] = []
        """Ended, but the caller has not been told how."""
        self.seen = 0
        self.draining: set[int] = set()

    # ---- events

    @rule(seconds=st.sampled_from([0.0, 0.002, 0.03, 0.06, 1.1, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.timers.advance(seconds)

    @rule()
    def a_call_comes(self) -> None:
        self.world.timers.advance(0.0001)
        try:
            lease = self.world.take(self.router, call := self.new_call())
        except UserCodeError:
            assert self.policy_fails
            return
        if lease is not None:
            assert not self.waiting, "it has overtaken those in line"
            self.leases.append(lease)
        else:
            self._join(self.world.now, call)

    def new_call(self) -> RoutedCall:
        return CALL

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 100))
    def one_gives_up(self, index: int) -> None:
        leaver = self.waiting.pop(index % len(self.waiting))
        self.world.pool.leave(leaver.place)
        self.world.pool.leave(leaver.place)
        assert leaver.lease is None

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 100), heard=st.booleans())
    def a_call_ends(self, index: int, heard: bool) -> None:
        """One in two is dropped: its end is all that is ever heard of it."""
        lease = self.leases.pop(index % len(self.leases))
        lease.end()
        lease.end()
        if heard:
            self.heard.append(lease)

    @precondition(lambda self: self.heard)
    @rule(
        index=st.integers(0, 100),
        how=st.sampled_from(["well", "with its load", "refused", "refused, returns", "draining", "failed", "late"]),
        others=st.integers(0, 3),
    )
    def its_caller_is_told(self, index: int, how: str, others: int) -> None:
        lease = self.heard.pop(index % len(self.heard))
        pool, now = self.world.pool, self.world.now
        if how == "well":
            pool.answered(lease, now)
        elif how == "with its load":
            pool.report(lease, max(0, lease.left) + others, now)
        elif how.startswith("refused"):
            pool.refused(lease, lease.left + others)
            if how.endswith("returns"):
                self._join(lease.began)
        elif how == "draining":
            pool.refuses(lease.replica)
        elif how == "failed":
            pool.failed(lease, now)
        else:
            pool.timed_out(lease, now)

    @rule(name=NAMES, ready=st.booleans())
    def a_connection_changes(self, name: str, ready: bool) -> None:
        if self.world.connection(name).ready is not ready:
            self.world.connection(name).become(ready)

    @rule(number=st.integers(0, len(LIMITS) - 1))
    def the_list_changes(self, number: int) -> None:
        self.draining ^= {number}
        self.world.say(*LIMITS, draining=tuple(self.draining))

    @rule(fails=st.booleans())
    def the_policy_changes(self, fails: bool) -> None:
        self.policy_fails = fails

    # ---- what holds always

    @invariant()
    def all_is_well(self) -> None:
        self.whoever_was_served_was_the_oldest()
        self.counts_are_true()
        self.nobody_waits_who_could_be_served()
        assert self.shown_well, "a policy was shown a replica that must not be called"

    def whoever_was_served_was_the_oldest(self) -> None:
        served, self.seen = self.world.order[self.seen :], len(self.world.order)
        for call in served:
            assert call.place.age == min(other.place.age for other in self.waiting if other.error is None)
            self.waiting.remove(call)
            assert call.lease is not None
            self.leases.append(call.lease)
        for call in [call for call in self.waiting if call.error is not None]:
            assert isinstance(call.error, UserCodeError)
            self.waiting.remove(call)

    def counts_are_true(self) -> None:
        for replica in self.world.pool.replicas():
            assert replica.inflight == sum(lease.replica is replica for lease in self.leases)
            assert replica.load >= replica.inflight
        assert self.world.pool.waiting == len(self.waiting)

    def nobody_waits_who_could_be_served(self) -> None:
        if not self.waiting:
            return
        room = [replica for replica in self.world.pool._in_service if replica.load < replica.limit]
        if room:  # made by a call that has ended a moment ago; perhaps it was refused
            assert all(replica.full for replica in room)
            assert self.world.timers.pending
        if not self.leases and self.world.pool.has_callable:
            assert self.world.timers.pending, "nothing would ever look at the line again"

    def teardown(self) -> None:
        """When all is well again, everybody is served, in order."""
        self.policy_fails = False
        self.world.say(*LIMITS)
        for name in ("r0", "r1", "r2", "r3"):
            self.world.connection(name).become(False)
            self.world.connection(name).become(True)
        for _ in range(1000):
            self.whoever_was_served_was_the_oldest()
            if not self.waiting and not self.leases:
                break
            if self.leases:
                self.leases.pop().end()
            self.world.timers.advance(0.06)
        assert self.world.pool.waiting == 0
        self.world.timers.advance(100)
        assert [(replica.inflight, replica.load) for replica in self.world.pool.replicas()] == [(0, 0)] * len(LIMITS)

    def _join(self, age: float, call: RoutedCall | None = None) -> None:
        waiting = Waiting(self.world, age, self.router, call or self.new_call())
        self.waiting.append(waiting)
        self.world.pool.join(waiting.place)


class RankedCall(FakeCall):
    """A call for which an asynchronous policy has returned ranks."""

    def __init__(self, ranks: Sequence[Sequence[Replica]]) -> None:
        super().__init__()
        object.__setattr__(self, "ranks", ranks)


class Ranking:
    """Is never asked: the calls come with their ranks."""

    def __init__(self, _: Random) -> None: ...

    async def choose(self, _: object, __: object) -> Any:
        raise NotImplementedError


register_policy("ranking", Ranking)


class RankedPoolMachine(PoolMachine):
    """The same for calls with ranks, which may name replicas that are full, drain or are not there any more."""

    def __init__(self) -> None:
        super().__init__()
        self.router = PolicyRouter("ranking", Random(1))
        self.draw = Random(1)

    def new_call(self) -> RoutedCall:
        known = list(self.world.pool.replicas())
        return RankedCall([self.draw.sample(known, self.draw.randint(0, 2)) for _ in range(self.draw.randint(0, 2))])


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestRankedPool = RankedPoolMachine.TestCase
TestRankedPool.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
