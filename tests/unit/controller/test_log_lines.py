"""A log with the engine's times becomes entries, whatever is in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.status.documents import timed_lines

TIME, LATER = "2026-01-31T18:00:00.000000001Z", "2026-01-31T18:00:00.000000002Z"


def test_each_line_has_its_time() -> None:
    assert list(timed_lines(f"{TIME} one\n{LATER} two\n")) == [(TIME, "one"), (LATER, "two")]
    assert list(timed_lines("")) == []


def test_lines_as_people_see_them() -> None:
    assert list(timed_lines(f"{TIME} 10 %\r20 %\n{LATER} \n")) == [(TIME, "10 %"), (TIME, "20 %"), (LATER, "")]
    assert list(timed_lines("no time\n")) == [("", "no time")]


def test_a_line_that_was_logged_in_pieces_is_one() -> None:
    assert list(timed_lines(f"{TIME} aaa{TIME} bbb\n")) == [(TIME, "aaabbb")]


@given(st.lists(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]))))
def test_nothing_is_lost(lines: list[str]) -> None:
    assert [line for _, line in timed_lines("".join(f"{TIME} {line}\n" for line in lines))] == lines
