from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.deadlines import LONG_SLOTS, SLOT_S, Deadlines

from tests.harness.waiting import PATIENCE_S


class FakeLoop:
    """A loop's timers and the clock they go by."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[FakeTimer] = []
        self.made = 0

    def call_later(self, delay: float, callback: Any) -> FakeTimer:
        self.made += 1
        timer = FakeTimer(self.now + delay, callback)
        self.timers.append(timer)
        return timer

    def advance(self, to: float) -> None:
        while True:
            due = [timer for timer in self.timers if not timer.cancelled and timer.when <= to]
            if not due:
                break
            timer = min(due, key=lambda timer: timer.when)
            self.timers.remove(timer)
            self.now = max(self.now, timer.when)
            timer.callback()
        self.now = to


class FakeTimer:
    def __init__(self, when: float, callback: Any) -> None:
        self.when = when
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


@given(
    added=st.lists(st.tuples(st.sampled_from([0, 0, 0.003, 1, 30]), st.floats(0, 5), st.booleans()), max_size=40),
    steps=st.lists(st.floats(0.001, 1), max_size=20),
)
def test_each_strikes_once_never_early_and_late_by_a_slot_at_most(
    added: list[tuple[float, float, bool]], steps: list[float]
) -> None:
    """Added at any time, also after a while in which there was nothing to do."""
    loop = FakeLoop()
    deadlines = Deadlines(loop.call_later, lambda: loop.now)  # type: ignore[arg-type]
    due: dict[int, float] = {}
    struck: dict[int, float] = {}
    for number, (pause, delay, cancelled) in enumerate(added):
        loop.advance(loop.now + pause)

        def strike(number: int = number) -> None:
            assert number not in struck
            struck[number] = loop.now

        entry = deadlines.add(loop.now + delay, strike)
        if cancelled:
            entry.cancel()
        else:
            due[number] = loop.now + delay
    for step in steps:
        loop.advance(loop.now + step)
    loop.advance(loop.now + 6)
    assert struck.keys() == due.keys()
    for number, at in struck.items():
        assert due[number] <= at + 1e-9
        assert at <= due[number] + SLOT_S + 1e-9


def test_a_callback_that_raises_leaves_the_others() -> None:
    loop = FakeLoop()
    deadlines = Deadlines(loop.call_later, lambda: loop.now)  # type: ignore[arg-type]
    struck: list[str] = []
    deadlines.add(1000.1, lambda: 1 / 0)
    deadlines.add(1000.1, lambda: struck.append("of the same slot"))
    deadlines.add(1000.2, lambda: struck.append("second"))
    with pytest.raises(ZeroDivisionError):
        loop.advance(1000.15)
    loop.advance(1001.0)
    assert struck == ["of the same slot", "second"]


def test_slots_are_few_however_far_ahead_deadlines_are() -> None:
    """They stay until their time has come: their number is memory that only time gives back."""
    loop = FakeLoop()
    deadlines = Deadlines(loop.call_later, lambda: loop.now)  # type: ignore[arg-type]
    for _ in range(20_000):
        deadlines.add(loop.now + 600, lambda: None).cancel()
        deadlines.add(loop.now + 0.1, lambda: None).cancel()
        loop.advance(loop.now + 0.01)
    assert len(deadlines._slots) < 600 / (LONG_SLOTS * SLOT_S) + LONG_SLOTS


def test_the_timer_fires_no_more_than_there_is_to_do() -> None:
    """Also after a pause, when the first deadlines are put where those far ahead are."""
    loop = FakeLoop()
    deadlines = Deadlines(loop.call_later, lambda: loop.now)  # type: ignore[arg-type]
    loop.advance(loop.now + 100)
    before = loop.made
    for _ in range(1000):
        deadlines.add(loop.now + 0.5, lambda: None).cancel()
        loop.advance(loop.now + 0.0001)
    assert loop.made - before < 60  # 0.1 s have 20 slots


async def test_one_set_of_deadlines_per_loop_which_dies_with_it() -> None:
    assert Deadlines.current() is Deadlines.current()
    struck = asyncio.Event()
    Deadlines.current().add(0.0, struck.set)
    async with asyncio.timeout(PATIENCE_S):
        await struck.wait()
    gc.collect()
