from __future__ import annotations

import asyncio
import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.deadlines import LONG_SLOTS, SLOT_S, Deadlines

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.test_pool import Timers


@given(
    added=st.lists(st.tuples(st.sampled_from([0, 0, 0.003, 1, 30]), st.floats(0, 5), st.booleans()), max_size=40),
    steps=st.lists(st.floats(0.001, 1), max_size=20),
)
def test_each_strikes_once_never_early_and_late_by_a_slot_at_most(
    added: list[tuple[float, float, bool]], steps: list[float]
) -> None:
    """Added at any time, also after a while in which there was nothing to do."""
    timers = Timers()
    deadlines = Deadlines(timers.call_later, lambda: timers.now)  # type: ignore[arg-type]
    due: dict[int, float] = {}
    struck: dict[int, float] = {}
    for number, (pause, delay, cancelled) in enumerate(added):
        timers.advance(pause)

        def strike(number: int = number) -> None:
            assert number not in struck
            struck[number] = timers.now

        entry = deadlines.add(timers.now + delay, strike)
        if cancelled:
            entry.cancel()
        else:
            due[number] = timers.now + delay
    for step in steps:
        timers.advance(step)
    timers.advance(6)
    assert struck.keys() == due.keys()
    for number, at in struck.items():
        assert due[number] <= at + 1e-9
        assert at <= due[number] + SLOT_S + 1e-9


def test_a_callback_that_raises_leaves_the_others() -> None:
    timers = Timers()
    deadlines = Deadlines(timers.call_later, lambda: timers.now)  # type: ignore[arg-type]
    struck: list[str] = []
    deadlines.add(100.1, lambda: 1 / 0)
    deadlines.add(100.1, lambda: struck.append("of the same slot"))
    deadlines.add(100.2, lambda: struck.append("second"))
    with pytest.raises(ZeroDivisionError):
        timers.advance(0.15)
    timers.advance(0.85)
    assert struck == ["of the same slot", "second"]


def test_slots_are_few_however_far_ahead_deadlines_are() -> None:
    """They stay until their time has come: their number is memory that only time gives back."""
    timers = Timers()
    deadlines = Deadlines(timers.call_later, lambda: timers.now)  # type: ignore[arg-type]
    for _ in range(20_000):
        deadlines.add(timers.now + 600, lambda: None).cancel()
        deadlines.add(timers.now + 0.1, lambda: None).cancel()
        timers.advance(0.01)
    assert len(deadlines._slots) < 600 / (LONG_SLOTS * SLOT_S) + LONG_SLOTS


def test_the_timer_fires_no_more_than_there_is_to_do() -> None:
    """Also after a pause, when the first deadlines are put where those far ahead are."""
    timers = Timers()
    deadlines = Deadlines(timers.call_later, lambda: timers.now)  # type: ignore[arg-type]
    timers.advance(100)
    before = timers.made
    for _ in range(1000):
        deadlines.add(timers.now + 0.5, lambda: None).cancel()
        timers.advance(0.0001)
    assert timers.made - before < 60  # 0.1 s have 20 slots


async def test_one_set_of_deadlines_per_loop_which_dies_with_it() -> None:
    assert Deadlines.current() is Deadlines.current()
    struck = asyncio.Event()
    Deadlines.current().add(0.0, struck.set)
    async with asyncio.timeout(PATIENCE_S):
        await struck.wait()
    gc.collect()
