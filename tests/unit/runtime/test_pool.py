"""The line of waiting calls, and what replicas say of their load, with a clock in the test's hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from pierhead.calls.absence import switched_off
from pierhead.calls.lease import CallPlace
from pierhead.calls.outliers import FAILURES, SHORTEST_S
from pierhead.calls.pool import Pool
from pierhead.calls.queue import QueuePlace
from pierhead.calls.replica import CONNECT_S, REFUSAL_TRUSTED_S, Endpoint, Replica, ReplicaListing
from pierhead.errors import ScaledToZero, UserCodeError
from pierhead.policies.policy import RoutedCall
from pierhead.policies.registry import register_policy
from pierhead.policies.router import PolicyRouter

from tests.unit.runtime.fake_transport import FakeConnection
from tests.unit.runtime.harness import until
from tests.unit.runtime.test_policies import CALL

OFF = switched_off("`pierhead scale`")


class Timers:
    """Times at which somebody wants to be called, on a clock in the test's hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.made = 0
        self.pending: list[Timer] = []

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        self.made += 1
        timer = Timer(self, self.now + delay, callback)
        self.pending.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        """Let time pass, and everything happen that is due in it."""
        end = self.now + seconds
        while due := [timer for timer in self.pending if timer.when <= end]:
            timer = min(due, key=lambda timer: timer.when)
            self.now = max(self.now, timer.when)
            self.pending.remove(timer)
            timer.callback()
        self.now = end


class Timer:
    def __init__(self, timers: Timers, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback = callback
        self._timers = timers

    def cancel(self) -> None:
        if self in self._timers.pending:
            self._timers.pending.remove(self)


class Waiting:
    """A call in the line, and what came of it."""

    def __init__(self, world: World, age: float, router: PolicyRouter, call: RoutedCall = CALL) -> None:
        self.lease: CallPlace | None = None
        self.error: Exception | None = None
        self.place = QueuePlace(age, call, router, self._granted, self._denied)
        self._world = world

    def _granted(self, lease: CallPlace) -> None:
        assert self.lease is None
        assert self.error is None
        self.lease = lease
        self._world.order.append(self)

    def _denied(self, error: Exception) -> None:
        assert self.lease is None
        assert self.error is None
        self.error = error

    @property
    def replica(self) -> str | None:
        return self.lease.replica.name if self.lease else None


class World:
    """A pool with fake connections, timers and a clock."""

    def __init__(self, *limits: int) -> None:
        self.timers = Timers()
        self.connections: dict[str, FakeConnection] = {}
        self.ejections = 0
        self.order: list[Waiting] = []
        self.pool = Pool(
            "ranker",
            self._connect,
            clock=lambda: self.timers.now,
            rng=Random(1),
            ejected=self._ejected,
            call_later=self.timers.call_later,
        )
        self.router = PolicyRouter("power_of_two", Random(1))
        self.say(*limits)

    @property
    def now(self) -> float:
        return self.timers.now

    def say(self, *limits: int, draining: tuple[int, ...] = ()) -> None:
        self.pool.update(
            ReplicaListing([Endpoint(f"r{n}", f"10.0.0.{n}:1", n in draining, limit) for n, limit in enumerate(limits)])
        )

    def replica(self, name: str) -> Replica:
        return next(replica for replica in self.pool.replicas() if replica.name == name)

    def connection(self, name: str) -> FakeConnection:
        return self.connections[self.replica(name).address]

    def take(self, router: PolicyRouter | None = None, call: RoutedCall = CALL) -> CallPlace | None:
        return self.pool.take(router or self.router, call, self.now)

    def must_take(self, router: PolicyRouter | None = None) -> CallPlace:
        lease = self.take(router)
        assert lease is not None
        return lease

    def join(self, router: PolicyRouter | None = None, age: float | None = None) -> Waiting:
        waiting = Waiting(self, self.now if age is None else age, router or self.router)
        self.pool.join(waiting.place)
        return waiting

    def fail(self, name: str, times: int = 1) -> None:
        for _ in range(times):
            lease = CallPlace(self.pool, self.replica(name), self.now)
            lease.end()
            self.pool.failed(lease, self.now)

    def _ejected(self) -> None:
        self.ejections += 1

    def _connect(self, address: str, changed: Callable[[], None]) -> FakeConnection:
        made = self.connections[address] = FakeConnection(address, changed)
        return made


class TestLine:
    def test_one_who_could_not_be_served_holds_up_nobody_when_it_leaves(self) -> None:
        """The first accepts no replica that is left out; the second does."""
        world = World(1, 1)
        world.fail("r0", FAILURES)
        world.must_take()
        picky, hardy = world.join(), world.join(PolicyRouter("power_of_two", Random(1), eject_outliers=False))
        assert hardy.lease is None
        world.pool.leave(picky.place)
        assert hardy.replica == "r0"

    def test_a_replica_that_others_fill_is_asked_again_after_a_moment(self) -> None:
        world = World(4)
        lease = world.must_take()
        lease.end()
        world.pool.refused(lease, 4)
        waiting = [world.join() for _ in range(3)]
        assert [call.lease for call in waiting] == [None] * 3
        world.timers.advance(0.06)
        assert [call.replica for call in waiting] == ["r0", None, None], "by one call, not by all at once"

    def test_nobody_waits_for_a_service_that_is_switched_off(self) -> None:
        world = World(1)
        taken = world.must_take()
        early = world.join()
        world.pool.update(ReplicaListing([Endpoint("r0", "10.0.0.0:1", draining=True)], absence=OFF))
        late = world.join()
        for waiting in (early, late):
            assert isinstance(waiting.error, ScaledToZero)
            assert "`pierhead scale ranker 1` does" in str(waiting.error)
        assert early.error is not late.error, "each has its own traceback"
        assert world.pool.waiting == 0
        taken.end()
        world.say(1)
        assert world.take() is not None, "it is back"
        assert world.join().error is None, "and who comes next waits as ever"

    def test_a_replica_that_may_still_be_called_is_waited_for_until_it_goes(self) -> None:
        world = World(1)
        taken = world.must_take()
        world.pool.update(ReplicaListing([Endpoint("r0", "10.0.0.0:1", max_ongoing_requests=1)], absence=OFF))
        served, waiting = world.join(), world.join()
        taken.end()
        assert (served.replica, waiting.error) == ("r0", None)
        world.connection("r0").become(False)
        assert isinstance(waiting.error, ScaledToZero)

    def test_a_grant_that_fails_at_once_serves_the_next_without_going_deeper(self) -> None:
        world = World(1)
        taken = world.must_take()

        def fail_to_open(lease: CallPlace) -> None:
            lease.end()

        for _ in range(2000):
            world.pool.join(QueuePlace(1, CALL, world.router, fail_to_open, lambda _: None))
        last = world.join()
        taken.end()
        assert last.replica == "r0"


class TestLoad:
    def test_others_calls_count_for_a_while(self) -> None:
        world = World(10)
        lease = world.must_take()
        lease.end()
        world.pool.report(lease, 10, world.now)
        assert lease.replica.load == 10
        assert world.take() is None
        world.timers.advance(1.01)
        assert world.must_take().replica is lease.replica

    def test_a_limit_learnt_is_forgotten_with_the_connection(self) -> None:
        world = World(0)
        lease = world.must_take()
        lease.end()
        world.pool.refused(lease, 3)
        assert lease.replica.limit == 3
        world.connection("r0").become(False)
        world.connection("r0").become(True)
        assert [world.must_take().replica for _ in range(5)] == [lease.replica] * 5

    def test_the_models_that_a_replica_holds_are_its_last_word_on_them(self) -> None:
        world = World(10)
        lease = world.must_take()
        world.pool.report(lease, 1, world.now, frozenset({"a", "b"}))
        world.pool.report(lease, 1, world.now)
        assert lease.replica.models == {"a", "b"}
        world.pool.report(lease, 1, world.now, frozenset())
        assert lease.replica.models == set()

    def test_a_reply_to_a_call_for_a_model_that_was_not_known_to_be_there_is_read(self) -> None:
        world = World(10, 10)
        lease = world.must_take()
        world.pool.report(lease, 1, world.now, frozenset({"a"}))
        wanted = [world.pool.wants_report(lease.replica, world.now, model_id) for model_id in (None, "a", "b")]
        assert wanted == [False, False, True]


class TestComingAndGoing:
    def test_a_drain_told_by_the_replica_itself_ends_with_its_connection(self) -> None:
        world = World(5)
        lease = world.must_take()
        world.pool.refuses(lease.replica)
        assert world.take() is None
        world.say(5)
        assert world.take() is None, "a list that has not heard of the drain does not end it"
        world.connection("r0").become(False)
        world.connection("r0").become(True)
        assert world.must_take().replica is lease.replica

    def test_a_replica_that_slept_is_called_again_although_no_list_has_said_that_it_slept(self) -> None:
        world = World(5)
        replica = world.replica("r0")
        for _ in range(3):  # as calls in flight are refused together, and while it sleeps on
            world.pool.refuses(replica)
            world.pool.refuses(replica)
            assert world.take() is None
            world.timers.advance(REFUSAL_TRUSTED_S)
        assert world.must_take().replica is replica
        world.pool.refuses(replica)
        world.say(5, draining=(0,))
        world.timers.advance(REFUSAL_TRUSTED_S)
        assert world.take() is None, "a list has the last word"

    async def test_a_replica_no_longer_listed_keeps_its_connection_until_its_last_call(self) -> None:
        world = World(5)
        lease = world.must_take()
        connection = world.connection("r0")
        world.say()
        assert world.take() is None
        assert connection.ready
        lease.end()
        await until(lambda: not connection.ready, "the connection is closed")
        assert not world.pool.replicas()

    def test_one_that_is_listed_again_in_time_continues(self) -> None:
        world = World(5)
        lease = world.must_take()
        world.say()
        world.say(5)
        assert world.must_take().replica is lease.replica

    def test_the_replicas_to_which_no_call_goes_are_listed_with_the_reason(self) -> None:
        world = World(1, 1, 1)
        world.connection("r0").become(False)
        world.fail("r1", FAILURES)
        assert world.pool.unreached() == {"r1": "its calls there fail"}, "a connection may come back at once"
        world.timers.advance(CONNECT_S)
        assert world.pool.unreached() == {"r0": "no connection", "r1": "its calls there fail"}
        world.timers.advance(SHORTEST_S)
        assert world.pool.unreached() == {"r0": "no connection"}, "it may have recovered"
        world.say(1, 1, 1, draining=(0,))
        assert world.pool.unreached() == {}

    def test_messages_name_the_replicas_in_one_line(self) -> None:
        world = World()
        assert world.pool.describe() == "no replica is known"
        world.pool.listed = False  # as before any source has answered
        assert world.pool.describe() == "nothing has said yet where it is"
        world = World(4, 0, 2, 0, 0)
        world.must_take(PolicyRouter("round_robin", Random(1)))
        world.connection("r1").ready = False
        world.say(4, 0, 2, 0, 0, draining=(2,))
        world.fail("r3", FAILURES)
        world.timers.advance(1)
        out = world.replica("r3").standing.until - world.now
        assert world.pool.describe() == (
            "r0 works on 1 of 4, r1 is not connected, r2 is draining, "
            f"r3 works on 0, is left out for {out:.1f} s more (its last 5 calls failed), r4 works on 0"
        )
        world.timers.advance(out)
        assert "r3 works on 0, is tried by one call at a time (its last 5 calls failed)" in world.pool.describe()


class TestOutliers:
    def test_one_that_fails_gets_no_calls_until_its_time_is_over_and_then_one(self) -> None:
        world = World(0, 0)
        world.fail("r0", FAILURES)
        assert world.ejections == 1
        assert {world.must_take().replica.name for _ in range(50)} == {"r1"}
        world.timers.advance(5)
        taken = [world.must_take() for _ in range(50)]
        trials = [lease for lease in taken if lease.replica.name == "r0"]
        assert len(trials) == 1
        trials[0].end()
        assert world.must_take().replica.name == "r1", "what came of it is not known yet"
        world.pool.answered(trials[0], world.now)
        assert [world.must_take().replica.name for _ in range(50)] == ["r0"] * 50, "it has the fewest calls now"
        assert world.ejections == 1

    def test_the_last_one_is_called_again_when_the_others_go(self) -> None:
        world = World(0, 0)
        world.fail("r0", FAILURES)
        world.connection("r1").become(False)
        assert world.must_take().replica.name == "r0"

    def test_a_handle_may_do_without(self) -> None:
        world = World(0, 0)
        world.fail("r0", FAILURES)
        calm = PolicyRouter("round_robin", Random(1), eject_outliers=False)
        leases = [world.must_take(calm) for _ in range(4)]
        assert [lease.replica.name for lease in leases] == ["r0", "r1", "r0", "r1"]
        for lease in leases:
            lease.end()
        world.timers.advance(0.1)
        assert {world.must_take().replica.name for _ in range(9)} == {"r1"}, "which shortens nobody's time out"

    def test_a_connection_lost_in_order_is_no_failure(self) -> None:
        world = World(0, 0)
        for _ in range(2 * FAILURES):
            world.pool.refuses(world.replica("r0"))
            world.connection("r0").become(False)
            world.connection("r0").become(True)
        assert world.ejections == 0
        for _ in range(FAILURES):
            world.connection("r0").become(False)
            world.connection("r0").become(True)
        assert world.ejections == 1


class Recording:
    """A policy with hooks and a given choice."""

    def __init__(self, _: Random) -> None:
        self.routed: list[str] = []
        self.gone: list[str] = []
        self.choice: Callable[[Sequence[Any]], Any] = lambda candidates: candidates[0]
        self.fails = False

    def choose(self, candidates: Sequence[Any], _: object) -> Any:
        return self.choice(candidates)

    def on_routed(self, candidate: Any, _: object) -> None:
        if self.fails:
            raise ValueError("no")
        self.routed.append(candidate.name)

    def on_replica_gone(self, name: str) -> None:
        if self.fails:
            raise ValueError("no")
        self.gone.append(name)


register_policy("recording", Recording)


def recording(world: World) -> tuple[PolicyRouter, Recording]:
    router = PolicyRouter("recording", Random(1))
    world.pool.watch(router)
    assert isinstance(router.policy, Recording)
    return router, router.policy


class TestPolicies:
    async def test_hooks_hear_of_every_call_and_of_every_replica_that_is_gone(self) -> None:
        world = World(1, 1, 1)
        router, policy = recording(world)
        leases = [world.must_take(router) for _ in range(3)]
        waiting = world.join(router)
        leases[1].end()
        assert waiting.replica == "r1"
        assert policy.routed == ["r0", "r1", "r2", "r1"]
        world.say(1, 1, 1, draining=(2,))
        world.connection("r1").become(False)
        assert policy.gone == []
        world.say(1)
        assert policy.gone == ["r1", "r2"]
        await world.pool.close()
        assert policy.gone == ["r1", "r2", "r0"]

    @pytest.mark.parametrize("choice", [lambda _: None, lambda _: "r0", lambda candidates: 1 / 0])
    def test_one_that_fails_costs_its_own_call_and_nothing_else(self, choice: Callable[[Any], Any]) -> None:
        world = World(1, 1)
        router, policy = recording(world)
        policy.choice = choice
        with pytest.raises(UserCodeError, match=r'policy "recording": choose failed: .*\[error id \w{16}\]'):
            world.take(router)
        leases = [world.must_take(), world.must_take()]
        waiting, next_one = world.join(router), world.join()
        leases[0].end()
        assert isinstance(waiting.error, UserCodeError)
        assert next_one.lease is not None
        leases[1].end()
        next_one.lease.end()
        assert [(replica.inflight, replica.load) for replica in world.pool.replicas()] == [(0, 0)] * 2

    async def test_a_hook_that_fails_leaks_no_count(self) -> None:
        world = World(1)
        router, policy = recording(world)
        policy.fails = True
        with pytest.raises(UserCodeError, match=r"on_routed failed: ValueError: no"):
            world.take(router)
        assert world.replica("r0").inflight == 0
        world.say()
        assert policy.gone == []


async def test_a_change_of_who_may_be_called_can_be_waited_for() -> None:
    world = World(1)
    waiting = asyncio.create_task(world.pool.changed())
    await asyncio.sleep(0)
    world.connection("r0").become(False)
    await waiting
    assert not world.pool.has_callable


def test_a_share_of_the_calls_goes_to_the_new_version() -> None:
    world = World(100, 100, 100)
    shares = {"r0": 1, "r1": 2, "r2": 2}
    world.pool.update(
        ReplicaListing([Endpoint(name, f"10.0.0.{name[1]}:1", weight=weight) for name, weight in shares.items()])
    )
    taken = [world.must_take() for _ in range(200)]
    counts = {name: sum(lease.replica.name == name for lease in taken) for name in shares}
    assert 25 <= counts["r0"] <= 55, "a fifth of them, by chance"
    assert abs(counts["r1"] - counts["r2"]) <= 1, "within a group the policy balances"


def test_a_group_that_is_full_leaves_its_share_to_the_other() -> None:
    world = World(1, 1)
    world.pool.update(
        ReplicaListing([Endpoint("r0", "10.0.0.0:1", weight=99, max_ongoing_requests=1), Endpoint("r1", "10.0.0.1:1")])
    )
    assert {world.must_take().replica.name for _ in range(9)} == {"r0", "r1"}
