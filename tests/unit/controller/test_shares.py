"""The arithmetic of a change of versions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.model.spec import RolloutSpec
from controller.plan.shares import Bounds, bounds, weights


@pytest.mark.parametrize(
    ("target", "pace", "on_trial", "room", "expected"),
    [
        (3, (1, 0), True, None, Bounds(floor=3, ceiling=4, goal=1, keep=3)),
        (3, (1, 0), False, None, Bounds(floor=3, ceiling=4, goal=3, keep=0)),
        (3, (0, 1), True, None, Bounds(floor=2, ceiling=3, goal=1, keep=2)),
        (4, (2, 1), True, None, Bounds(floor=3, ceiling=6, goal=2, keep=4)),
        (1, (1, 0), True, None, Bounds(floor=1, ceiling=2, goal=1, keep=1)),
        (2, (1000, 0), True, None, Bounds(floor=2, ceiling=1002, goal=2, keep=2)),
        (0, (1, 0), False, None, Bounds(floor=0, ceiling=1, goal=0, keep=0)),
        (0, (1, 0), True, None, Bounds(floor=0, ceiling=1, goal=0, keep=0)),
        # All GPUs hold the former version: one by one, and never a single one.
        (4, (1, 0), True, 4, Bounds(floor=3, ceiling=4, goal=1, keep=3, one_by_one=True)),
        (4, (1, 0), False, 4, Bounds(floor=3, ceiling=4, goal=4, keep=0, one_by_one=True)),
        (1, (1, 0), True, 1, Bounds(floor=1, ceiling=2, goal=1, keep=0)),
        (1, (0, 1), True, 1, Bounds(floor=0, ceiling=1, goal=1, keep=0)),
        # More wanted than fit: what fits counts.
        (6, (1, 0), False, 4, Bounds(floor=3, ceiling=6, goal=6, keep=0, one_by_one=True)),
        (4, (1, 0), True, 3, Bounds(floor=2, ceiling=4, goal=1, keep=2, one_by_one=True)),
        (4, (2, 0), True, 5, Bounds(floor=4, ceiling=5, goal=1, keep=4)),
    ],
)
def test_bounds(target: int, pace: tuple[int, int], on_trial: bool, room: int | None, expected: Bounds) -> None:
    assert bounds(target, RolloutSpec(*pace), on_trial=on_trial, room=room) == expected


@given(
    target=st.integers(0, 1000),
    surge=st.integers(0, 5),
    unavailable=st.integers(0, 5),
    on_trial=st.booleans(),
    room=st.none() | st.integers(0, 1000),
)
def test_a_change_needs_no_more(target: int, surge: int, unavailable: int, on_trial: bool, room: int | None) -> None:
    found = bounds(target, RolloutSpec(surge, unavailable or int(not surge)), on_trial=on_trial, room=room)
    assert 0 <= found.floor <= target
    assert found.floor >= min(target, 1) or unavailable or not surge or room == 0, "the last one is never given away"
    assert found.goal <= target <= found.ceiling <= target + max(1, surge)
    assert not target or found.goal >= 1, "there is always a next step"
    assert found.keep + found.goal <= found.ceiling or not on_trial


def test_weights_of_no_share_or_of_nothing_new_are_equal() -> None:
    assert weights(None, 1, 3) == weights(10, 0, 3) == (1, 1)
    assert weights(5, 1, 1) == (1, 19)


@given(st.integers(1, 99), st.integers(1, 20), st.integers(1, 20))
def test_weights_give_nearly_the_share_asked_for(percent: int, new: int, old: int) -> None:
    of_new, of_old = weights(percent, new, old)
    assert 1 <= of_new <= 256
    assert 1 <= of_old <= 256
    share = 100 * new * of_new / (new * of_new + old * of_old)
    least = 100 * new / (new + 256 * old)
    most = 100 * 256 * new / (256 * new + old)
    assert share == pytest.approx(min(max(percent, least), most), abs=1.0)
