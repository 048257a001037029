"""The window of `@batch`, without clock and event loop: which requests form the next batch, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.batching.window import BatchLimits, BatchWindow, Member

Window = BatchWindow[Member[float]]


def member(at: float, rows: int = 1, *, deadline: float = float("inf"), model: str | None = None) -> Member[float]:
    return Member(at, rows, at, deadline, model)


def taken(window: Window, now: float) -> list[Member[float]]:
    members, expired = window.start_batch(now)
    assert expired == []
    return members


class TestWhen:
    def test_on_an_idle_replica_no_request_waits(self) -> None:
        window = Window(BatchLimits(10, batch_wait_timeout_s=5))
        window.add(member(1.0))
        window.add(member(1.0))
        assert len(taken(window, 1.0)) == 2

    def test_a_request_may_wait_for_others_on_an_idle_replica_too(self) -> None:
        window = Window(BatchLimits(10, batch_wait_timeout_s=5, eager=False))
        window.add(member(1.0))
        assert taken(window, 1.0) == []
        assert len(taken(window, 6.0)) == 1

    def test_while_a_batch_runs_arrivals_collect(self) -> None:
        window = Window(BatchLimits(10, batch_wait_timeout_s=5))
        window.add(member(0))
        taken(window, 0)
        for at in (1.0, 2.0, 3.0):
            window.add(member(at))
        assert taken(window, 3.0) == []
        assert window.due_at() is None
        window.finished()
        assert window.due_at() == 6.0, "the window of the oldest one stays"
        assert taken(window, 5.9) == []
        assert len(taken(window, 6.0)) == 3


class TestWhich:
    def test_the_rows_of_requests_together_may_be_other_than_their_sum(self) -> None:
        def padded(members: Sequence[Member[float]]) -> float:
            return len(members) * max(each.rows for each in members)

        window = Window(BatchLimits(10, max_batch_rows=12, batch_wait_timeout_s=0), padded)
        for rows in (3, 4, 5, 1):
            window.add(member(0, rows))
        assert [each.rows for each in taken(window, 0)] == [3, 4]

    def test_a_batch_is_for_one_model_and_is_filled_from_all_that_wait(self) -> None:
        window = Window(BatchLimits(3, batch_wait_timeout_s=5, max_concurrent_batches=9))
        for model in ("a", "b", "a", "b", "a", None):
            window.add(member(0, model=model))
        assert [m.model for m in taken(window, 0)] == ["a", "a", "a"]
        assert taken(window, 0) == [], "nobody is alone in an idle replica any more"
        assert [m.model for m in taken(window, 5)] == ["b", "b"]

    def test_a_late_request_is_not_computed_and_takes_no_room(self) -> None:
        window = Window(BatchLimits(2, max_batch_rows=10, batch_wait_timeout_s=5))
        late = [member(0, 9, deadline=1.0), member(0, 9, deadline=2.0)]
        in_time = [member(0, 5, deadline=2.1), member(0, 5)]
        for each in (late[0], in_time[0], late[1], in_time[1]):
            window.add(each)
        assert window.start_batch(2.0) == (in_time, late)
        assert window.running == 1

    def test_a_batch_of_which_all_are_too_late_is_not_started(self) -> None:
        window = Window(BatchLimits(2))
        late = [member(0, deadline=1.0) for _ in range(3)]
        for each in late:
            window.add(each)
        assert window.start_batch(1.0) == ([], late)
        assert (window.running, len(window), window.due_at()) == (0, 0, None)


ARRIVAL = st.tuples(
    st.just("add"),
    st.integers(0, 8),
    st.sampled_from([float("inf"), 0.0, 0.5, 1.0, 3.0]),
    st.sampled_from([None, "a", "b"]),
)
STEP = st.one_of(ARRIVAL, ARRIVAL, st.tuples(st.sampled_from(["take", "take", "finish", "discard", "wait"])))


class World:
    """A window and a plain list of the waiting items, so that their answers can be compared."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.window = Window(limits)
        self.waiting: list[Member[float]] = []
        self.now = 0.0

    def add(self, rows: int, patience: float, model: str | None) -> None:
        self.waiting.append(member(self.now, rows, deadline=self.now + patience, model=model))
        self.window.add(self.waiting[-1])

    def oldest(self) -> dict[str | None, Member[float]]:
        found: dict[str | None, Member[float]] = {}
        for each in self.waiting:
            found.setdefault(each.model, each)
        return found

    def take(self) -> tuple[list[Member[float]], list[Member[float]]]:
        due, before, oldest = self.window.due_at(), self.window.running, self.oldest()
        members, expired = self.window.start_batch(self.now)
        assert bool(members or expired) == (due is not None and due <= self.now), (
            "due_at says when take gives something"
        )
        gone = [each for each in self.waiting if each in members or each in expired]
        if gone:
            model = gone[0].model
            assert gone == [each for each in self.waiting if each.model == model][: len(gone)], "in order"
            assert {each.model for each in gone} == {model}, "one model"
            for other in oldest.values():
                # Nobody who came after the end of another's window goes before that other.
                assert gone[0].arrived_at <= other.arrived_at + self.limits.batch_wait_timeout_s
        assert all(each.deadline > self.now for each in members)
        assert all(each.deadline <= self.now for each in expired)
        assert len(members) <= self.limits.max_batch_size
        if len(members) > 1 and self.limits.max_batch_rows is not None:
            assert sum(each.rows for each in members) <= self.limits.max_batch_rows
        if not gone and before < self.limits.max_concurrent_batches:
            wait = self.limits.batch_wait_timeout_s
            assert all(self.now < each.arrived_at + wait for each in self.waiting), "nobody waits past the window"
        self.waiting = [each for each in self.waiting if each not in gone]
        return members, expired


@given(
    st.builds(
        BatchLimits,
        st.integers(1, 5),
        st.sampled_from([0.0, 0.3, 1.0]),
        st.integers(1, 3),
        st.one_of(st.none(), st.integers(1, 20)),
    ),
    st.lists(STEP, max_size=60),
)
def test_whatever_happens(limits: BatchLimits, steps: list[tuple[Any, ...]]) -> None:
    """In order, once, within every bound, no item starves; and `start_batch` gives something if `due_at` says so."""
    world = World(limits)
    for step, *values in steps:
        if step == "add":
            world.add(*values)
        elif step == "wait":
            world.now += 0.25
        elif step == "discard" and world.waiting:
            world.window.discard(world.waiting.pop(len(world.waiting) // 2))
        elif step == "finish" and world.window.running:
            world.window.finished()
        elif step == "take":
            world.take()
        assert len(world.window) == len(world.waiting)
        assert 0 <= world.window.running <= limits.max_concurrent_batches


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size: expected an integer >= 1, found 0"),
        ({"max_batch_size": True}, "max_batch_size: expected an integer >= 1, found True"),
        ({"max_batch_rows": 1.5}, "max_batch_rows: expected an integer >= 1, found 1.5"),
        ({"max_concurrent_batches": -1}, "max_concurrent_batches: expected an integer >= 1, found -1"),
        ({"max_buffered_results": 0}, "max_buffered_results: expected an integer >= 1, found 0"),
        ({"batch_wait_timeout_s": float("nan")}, "batch_wait_timeout_s: expected seconds >= 0, found nan"),
        ({"batch_timeout_s": 0}, "batch_timeout_s: expected seconds > 0, or None, found 0"),
    ],
)
def test_limits_that_make_no_sense_are_named(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchLimits(**limits)
