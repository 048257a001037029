"""Progress of a start: what counts as some, and that it is reported before `serve()` listens."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from typing import Any

import pytest
from aiohttp.test_utils import unused_port
from hypothesis import given
from hypothesis import strategies as st
from pierhead.replica.starting import MOST_STAGES, Start

from tests.harness.waiting import PATIENCE_S, eventually

QUIET: dict[str, str] = {}
"""The environment of a process that no controller has started."""


def test_more_of_the_same_is_progress_and_less_is_not() -> None:
    start = Start(QUIET)
    steps = []
    for done in (0, 1, 1, 0, 2):
        start.report("loading weights", done, 4)
        steps.append(start.steps)
    assert steps == [1, 2, 2, 2, 3]
    assert start.words == "loading weights, 50 %"
    for doing in ("compiling", "loading weights", "compiling"):
        start.report(doing, None, 1.0)
    assert (start.steps, start.words) == (4, "compiling"), "another stage is progress once"


def test_stages_that_never_end_are_no_progress_for_ever() -> None:
    start = Start(QUIET)
    for number in range(2 * MOST_STAGES):
        start.report(f"try {number}", None, 1.0)
    assert start.steps == MOST_STAGES
    assert start.words == f"try {2 * MOST_STAGES - 1}"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.floats(0, 10)), max_size=50))
def test_steps_never_go_back_and_saying_the_same_again_adds_none(reports: list[tuple[str, float | None]]) -> None:
    start = Start(QUIET)
    for doing, done in reports:
        before = start.steps
        start.report(doing, done, 10.0)
        after = start.steps
        assert after in (before, before + 1)
        start.report(doing, done, 10.0)
        assert start.steps == after


def readyz(port: int) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=PATIENCE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_settings_that_are_wrong_keep_no_start_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIERHEAD_ADMIN_PORT", "nonsense")
    start = Start({"PIERHEAD_REPLICA": "shop-ranker-1"})
    start.report("loading weights", 1, 2)
    start.hand_over()
    assert start.steps == 1


def test_the_controller_sees_it_before_the_program_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    port = unused_port()
    monkeypatch.setenv("PIERHEAD_ADMIN_PORT", str(port))
    monkeypatch.setenv("PIERHEAD_HOST", "127.0.0.1")
    start = Start({"PIERHEAD_REPLICA": "shop-ranker-1"})
    start.report("loading weights", 37, 100)
    eventually(lambda: is_open(port), "the admin port is open")
    status, body = readyz(port)
    assert (status, body["state"], body["detail"], body["progress"]) == (503, "starting", "loading weights, 37 %", 1)
    start.report("loading weights", 38, 100)
    assert readyz(port)[1]["progress"] == 2
    start.hand_over()
    with pytest.raises(urllib.error.URLError):
        readyz(port)
    start.report("compiling", None, 1.0)
    with pytest.raises(urllib.error.URLError):
        readyz(port)
