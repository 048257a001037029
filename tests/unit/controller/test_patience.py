"""How long a reading can be expected to take still."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.observe.patience import remaining_s

SECONDS = st.floats(0.0, 1e6)


@pytest.mark.parametrize(
    ("last_s", "so_far_s", "left_s"),
    [(0.0, 0.0, 0.0), (1.0, 0.0, 1.0), (1.0, 0.75, 0.25), (1.0, 1.0, 1.0), (1.0, 3.0, 3.0), (0.0, 0.5, 0.5)],
)
def test_as_long_as_the_last_one_and_then_as_long_again(last_s: float, so_far_s: float, left_s: float) -> None:
    assert remaining_s(last_s, so_far_s) == left_s


@given(SECONDS, SECONDS)
def test_it_never_has_ended_before_now(last_s: float, so_far_s: float) -> None:
    left_s = remaining_s(last_s, so_far_s)
    assert left_s >= 0.0
    assert so_far_s + left_s >= last_s * (1 - 1e-9)
