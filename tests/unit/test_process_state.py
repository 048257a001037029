"""What the guard in tests/conftest.py sees of what a test leaves behind."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pierhead.held import HELD
from pierhead.request import CURRENT, RequestContext
from pierhead.routing_stats import publish

from tests.harness import process_state
from tests.harness.process_state import left_behind, our_threads

NEW_LOGGER = logging.NullHandler()


@pytest.fixture
def seen() -> Callable[[], list[str]]:
    """Names of what has changed since the test began."""
    before, threads = process_state.process_state(), our_threads()
    return lambda: [words.partition(":")[0] for words in left_behind(before, threads)]


def test_what_is_had_once(seen: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(os.environ, "PYTEST_CURRENT_TEST", "another")
    assert seen() == [], "what pytest itself changes does not count"
    root, token = logging.getLogger(), CURRENT.set(RequestContext("r-1", 1.0))
    monkeypatch.setenv("PIERHEAD_SERVICE", "left")
    monkeypatch.delenv("PATH")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, "/left"])
    monkeypatch.setattr(root, "handlers", [*root.handlers, NEW_LOGGER])
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.disable()
    publish(left=1)
    HELD.add("left")
    try:
        assert seen() == [
            "current request",
            "garbage collection",
            "handler of SIGTERM",
            "handlers of the root logger",
            "models held",
            "module path",
            "stats published",
            "variable PATH",
            "variable PIERHEAD_SERVICE",
            "working directory",
        ]
    finally:
        CURRENT.reset(token)
        signal.signal(signal.SIGTERM, handler)
        gc.enable()


def test_a_thread_of_ours_has_time_to_end(seen: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="pierhead-left")
    thread.start()
    with monkeypatch.context() as patch:
        patch.setattr(process_state, "ENDED_WITHIN_S", 0.01)
        assert seen() == ["thread pierhead-left"]
    over.set()
    assert seen() == []
