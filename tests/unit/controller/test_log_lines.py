"""A log with the engine's times becomes entries, whatever is in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.status.documents import timed_lines

TIME, LATER = "2026-01-31T18:00:00.000000001Z", "2026-01-31T18:00:00.000000002Z"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        (f"{TIME} one\n{LATER} two\n", [(TIME, "one"), (LATER, "two")]),
        (f"{TIME} 10 %\r20 %\n{LATER} \n", [(TIME, "10 %"), (TIME, "20 %"), (LATER, "")]),
        ("no time\n", [("", "no time")]),
        (f"{TIME} aaa{TIME} bbb\n", [(TIME, "aaabbb")]),  # the engine logs a long line in pieces
    ],
)
def test_lines_and_their_times(text: str, lines: list[tuple[str, str]]) -> None:
    assert list(timed_lines(text)) == lines


@given(st.lists(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]))))
def test_nothing_is_lost(lines: list[str]) -> None:
    assert [line for _, line in timed_lines("".join(f"{TIME} {line}\n" for line in lines))] == lines
