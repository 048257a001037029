"""Shares of calls."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.calls.weights import differ, group


class One(NamedTuple):
    name: str
    weight: int


OLD = [One("a", 3), One("b", 3), One("c", 3)]
NEW = [One("d", 1)]


def test_when_shares_matter() -> None:
    assert not differ(OLD)
    assert not differ([])
    assert differ(OLD + NEW)


@pytest.mark.parametrize(("draw", "expected"), [(0.0, NEW), (0.09, NEW), (0.11, OLD), (0.999, OLD)])
def test_a_tenth_for_the_new_one(draw: float, expected: list[One]) -> None:
    assert group(OLD + NEW, draw) == expected


@given(st.lists(st.integers(1, 256), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_there_is_always_somebody(shares: list[int], draw: float) -> None:
    candidates = [One(str(index), weight) for index, weight in enumerate(shares)]
    chosen = group(candidates, draw)
    assert chosen
    assert len({one.weight for one in chosen}) == 1
    assert set(chosen) <= set(candidates)
