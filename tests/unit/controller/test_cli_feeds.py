"""Events and log lines as the command shows them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.tool.errors import BadInput
from controller.tool.feeds import chosen, event_line, last_failure, leaves_a_gap, new_lines, readable, since_time
from tests.unit.controller.cli_documents import AT, event


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(0, 30), st.integers(1, 10))
def test_followed_logs_lose_no_line(log: list[str], seen: int, tail: int) -> None:
    before, now = log[:seen][-tail:], log[-tail:]
    fresh = new_lines(before, now)
    assert now[len(now) - len(fresh) :] == fresh
    assert len(fresh) <= max(len(log) - seen, 0) or not before


def test_new_lines_are_those_after_the_last_one_shown() -> None:
    log = [(f"2026-01-31T18:00:0{number}.000000000Z", "tick") for number in range(9)]
    assert new_lines(log[:5], log[3:7]) == log[5:7], "times distinguish equal lines"
    assert new_lines([], log) == log
    assert new_lines(log, log) == []
    assert new_lines(log[:3], log[5:]) == log[5:], "more was logged than is sent at once"


def test_lines_that_were_not_sent_are_reported() -> None:
    log = [(f"1970-01-01T00:00:0{number}.000000000Z", "tick") for number in range(9)]
    assert leaves_a_gap(log[:5], log[6:], log[6:], after=4.0), "the last one shown was asked for, and is not there"
    assert not leaves_a_gap(log[:5], log[6:], log[6:], after=5.0)
    assert not leaves_a_gap(log[:5], log[5:], log[4:], after=4.0)
    assert not leaves_a_gap([], log, log, after=0.0)


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        (
            {
                "level": "error",
                "logger": "pierhead",
                "message": "Rank raised",
                "service": "ranker",
                "replica": "p-ranker-1",
                "request_id": "r-1",
                "error": 'Traceback (most recent call last):\n  File "a.py"\nValueError: no',
            },
            [
                "ERROR   pierhead [r-1] Rank raised",
                "  Traceback (most recent call last):",
                '    File "a.py"',
                "  ValueError: no",
            ],
        ),
        (
            {"level": "info", "logger": "pierhead.access", "method": "/echo", "status": "200", "ms": 1.5},
            ["INFO    pierhead.access method=/echo status=200 ms=1.5"],
        ),
        ({"level": "info", "logger": "a", "message": "red \x1b[31m\nand more"}, ["INFO    a red ?[31m", "  and more"]),
    ],
)
def test_a_json_line_as_people_read_it(line: dict[str, Any], lines: list[str]) -> None:
    at = datetime(2026, 1, 31, 18, 0, 1, 250_000, UTC)
    first, *more = readable(json.dumps({"time": at.isoformat(), **line}))
    assert [first, *more] == [f"{at.astimezone():%Y-%m-%d %H:%M:%S}.250 {lines[0]}", *lines[1:]]


@pytest.mark.parametrize("line", ["plain words", '{"half": ', "[1, 2]", "{}", '{"level": 7}', '"text"', "7"])
def test_other_lines_stay_as_they_are(line: str) -> None:
    assert readable(line) == [line]


def test_events_are_shown_chosen_and_searched() -> None:
    failed = event("web-1: exited\nlast line", "replica_failed", outcome="failed", times=3, at=AT - 900, last_at=AT - 5)
    first, second = event_line(failed).splitlines()
    assert first.endswith(" FAILED  web-1: exited (3 times)")
    assert second.strip() == "last line"
    other = event("create", "create_container", outcome="failed", last_at=AT - 900)
    assert chosen([other, failed], None) == [other, failed]
    assert chosen([other, failed], AT - 60) == [failed], "it happened again since then"
    assert (last_failure([failed, other]), last_failure([])) == (failed, None)


@pytest.mark.parametrize(
    ("text", "since"),
    [
        *[("90", AT - 90), ("10m", AT - 600), ("2h30m", AT - 9000), ("1d2h3m4s", AT - 93_784), ("0", AT)],
        *[("30000d", 0), ("99999999999999999d", 0), ("1960-01-01", 0)],  # the API takes no time before 1970
        ("2026-01-31T18:00", datetime(2026, 1, 31, 18).timestamp()),  # noqa: DTZ001 - local is meant
    ],
)
def test_since_when(text: str, since: float) -> None:
    assert since_time(text, AT) == since


@pytest.mark.parametrize("text", ["", "soon", "10 m", "-5m", "m", "1m1h", "²m", "2026-13-01", "9" * 40])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"^--since: expected a time ago such as 10m"):
        since_time(text, AT)
