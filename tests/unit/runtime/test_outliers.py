"""Who is left out, and for how long; the clock is a number here."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pierhead.calls.outliers import (
    FAILURES,
    FIRST_AGAIN_S,
    JITTER,
    LONGEST_S,
    SHORTEST_S,
    Outliers,
    Standing,
    left_out,
    most_out,
    next_change,
)

NOW = 1000.0


class World:
    """Some replicas."""

    def __init__(self, count: int, seed: int = 1) -> None:
        self.rules = Outliers(Random(seed))
        self.all = [Standing() for _ in range(count)]

    def fail(self, number: int, times: int = 1, now: float = NOW, began: float | None = None) -> None:
        for _ in range(times):
            self.rules.failed(self.all[number], now if began is None else began, now, self.all)

    def out(self, now: float = NOW) -> list[int]:
        left = left_out(self.all, now)
        return [number for number, standing in enumerate(self.all) if standing in left]


def test_failures_in_a_row_leave_a_replica_out_and_one_answer_restarts_the_count() -> None:
    world = World(2)
    world.fail(0, FAILURES - 1)
    world.all[0].answered(NOW, NOW)
    world.fail(0, FAILURES - 1)
    assert world.out() == []
    world.fail(0)
    assert world.out() == [0]


def test_where_all_fail_alike_nobody_is_left_out() -> None:
    world = World(4)
    for _ in range(3 * FAILURES):
        for number in range(4):
            world.fail(number)
    assert world.out() == []
    world.all[3].answered(NOW, NOW)
    world.fail(0)
    assert world.out() == [0], "one of them works again: now the others are outliers"


def test_the_time_out_doubles_up_to_a_minute_and_a_good_minute_forgives() -> None:
    world, now, times = World(2), NOW, []
    for _ in range(7):
        world.fail(0, FAILURES, now)
        times.append(world.all[0].until - now)
        now = world.all[0].until
        world.all[0].begin_trial()
        world.all[0].answered(now, now)
        now += 1
    for expected, found in zip([5, 10, 20, 40, 60, 60, 60], times, strict=True):
        assert expected * (1 - JITTER) <= found <= expected
    now += FIRST_AGAIN_S
    world.fail(0, FAILURES, now)
    assert world.all[0].until - now <= SHORTEST_S


def test_one_call_decides_after_the_time_out() -> None:
    world = World(2)
    world.fail(0, FAILURES)
    back = world.all[0].until
    assert world.out(back - 0.001) == [0]
    assert world.out(back) == []
    world.all[0].begin_trial()
    assert world.out(back) == [0], "nobody else while the trial runs"
    world.fail(0, now=back + 1, began=back)
    assert world.out(back + 1) == [0]
    assert world.all[0].until - back - 1 >= 2 * SHORTEST_S * (1 - JITTER), "one failure, and longer"


def test_a_call_made_during_the_time_out_makes_it_no_longer() -> None:
    """By a handle that leaves nobody out."""
    world = World(2)
    world.fail(0, FAILURES)
    until = world.all[0].until
    world.fail(0, FAILURES, now=NOW + 1)
    world.fail(0, FAILURES, now=until + 1, began=NOW + 1)
    assert world.all[0].until == until
    world.all[0].answered(NOW + 1, NOW + 2)
    assert world.all[0].in_service, "but what works is taken back at once"


def test_a_lost_connection_is_one_failure_however_many_calls_it_takes_along() -> None:
    world = World(2)
    world.rules.lost_connection(world.all[0], NOW, world.all)
    world.fail(0, 64, now=NOW, began=NOW - 1)
    assert world.all[0].failures == 1
    for later in range(1, FAILURES):
        assert world.out(NOW + later) == []
        world.rules.lost_connection(world.all[0], NOW + later, world.all)
    assert world.out(NOW + FAILURES) == [0], "it keeps falling over"


def test_deadlines_count_only_where_nobody_was_answered() -> None:
    slow, hanging = World(2), World(2)
    for number in range(2 * FAILURES):
        now = NOW + number
        slow.all[0].answered_at = now - 0.1
        slow.rules.timed_out(slow.all[0], now - 0.2, now, slow.all)
        hanging.rules.timed_out(hanging.all[0], now - 0.2, now, hanging.all)
    assert slow.out() == []
    assert hanging.out() == [0]


class Machine(RuleBasedStateMachine):
    """Any number of replicas, calls that end in any order and any way, a clock that continues."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(5)
        self.now = NOW
        self.calls: list[tuple[int, float, bool]] = []
        """Which replica, since when, whether it is the trial."""

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.06, 1.0, 5.0, 20.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(number=st.integers(0, 4))
    def a_call_begins(self, number: int) -> None:
        standing = self.world.all[number]
        if standing in left_out(self.world.all, self.now):
            return
        trial = not standing.in_service and not standing.unwanted(self.now)
        if trial:
            standing.begin_trial()
        self.calls.append((number, self.now, trial))

    @precondition(lambda self: self.calls)
    @rule(index=st.integers(0, 1000), how=st.sampled_from(["answered", "failed", "timed out", "nothing"]))
    def a_call_ends(self, index: int, how: str) -> None:
        number, began, trial = self.calls.pop(index % len(self.calls))
        standing = self.world.all[number]
        if trial:
            standing.end_trial(self.now)
        before = (standing.until, standing.failures)
        if how == "answered":
            standing.answered(began, self.now)
        elif how == "failed":
            self.world.rules.failed(standing, began, self.now, self.world.all)
        elif how == "timed out":
            self.world.rules.timed_out(standing, began, self.now, self.world.all)
        if how == "nothing" or (how != "answered" and began < standing.judged_at < self.now):
            assert (standing.until, standing.failures) == before

    @rule(number=st.integers(0, 4))
    def a_connection_is_lost(self, number: int) -> None:
        self.world.rules.lost_connection(self.world.all[number], self.now, self.world.all)

    @invariant()
    def half_of_them_may_be_called(self) -> None:
        assert len(left_out(self.world.all, self.now)) <= most_out(len(self.world.all))
        assert sum(not standing.in_service for standing in self.world.all) <= most_out(len(self.world.all))

    @invariant()
    def one_trial_at_a_time(self) -> None:
        for number, standing in enumerate(self.world.all):
            # One begun in the very moment of a verdict was begun before it: a trial comes seconds after.
            trials = [call for call in self.calls if call[0] == number and call[2] and call[1] > standing.judged_at]
            assert len(trials) <= 1 or not standing.on_trial

    @invariant()
    def nobody_is_out_for_good(self) -> None:
        for standing in self.world.all:
            if standing.unwanted(self.now) and not standing.on_trial:
                assert standing.next_trial_at <= self.now + LONGEST_S
                assert next_change(self.world.all, self.now) <= standing.next_trial_at


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(0, 2**32))
def test_times_out_of_many_callers_are_spread(seed: int) -> None:
    ends = set()
    for caller in range(5):
        world = World(2, seed + caller)
        world.fail(0, FAILURES)
        ends.add(world.all[0].until)
    assert len(ends) == 5
