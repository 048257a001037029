"""The keeper: whatever a command starts, however it hides, ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.bench.processes import ROOT, BenchError, Kept, cpu_seconds, members_of, wait_for
from tests.harness.waiting import eventually

# Forks twice into a session of its own, as daemons do, and then lives on or ends.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(1000)
    os._exit(0)
time.sleep(1000 if sys.argv[2] == "stay" else 0)
"""


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    command = [sys.executable, "-c", DAEMON, str(tmp_path / "daemon"), "stay"]
    kept = Kept("test", command, {}, tmp_path / "log", grace_s=0)
    yield kept
    if not kept.ended():
        kept.stop()


def pid_in(file: Path) -> int:
    return int(eventually(lambda: file.exists() and file.read_text(), f"{file} holds a process id"))


def test_a_daemon_stays_in_the_tree_and_ends_with_it(kept: Kept, tmp_path: Path) -> None:
    daemon = pid_in(tmp_path / "daemon")
    eventually(
        lambda: daemon in {process.pid for process in kept.process.children(recursive=True)}, "the daemon is counted"
    )
    kept.stop()
    assert not psutil.pid_exists(daemon)


def test_when_the_command_ends_its_daemon_does_too(tmp_path: Path) -> None:
    kept = Kept("test", [sys.executable, "-c", DAEMON, str(tmp_path / "daemon"), "leave"], {}, tmp_path / "log", 0)
    eventually(kept.ended, "the keeper ends after its command")
    # The daemon may have been killed before it wrote its id.
    file = tmp_path / "daemon"
    assert not file.exists() or not file.read_text() or not psutil.pid_exists(int(file.read_text()))


def test_a_killed_bench_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DAEMON, str(tmp_path / "daemon"), "stay"]
    bench = f"""
import time
from pathlib import Path
from tests.bench.processes import Kept
kept = Kept("test", {command!r}, {{}}, Path({str(tmp_path / "log")!r}), 0)
time.sleep(1000)
"""
    process = subprocess.Popen([sys.executable, "-c", bench], cwd=ROOT)
    try:
        daemon = pid_in(tmp_path / "daemon")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    eventually(lambda: not psutil.pid_exists(daemon), "the keeper has ended the tree of a bench that was killed")


def test_cpu_time_of_children_that_have_ended_is_not_lost(tmp_path: Path) -> None:
    # The shell ends its busy child and goes on: the child's time is in the shell's account.
    busy = f"{sys.executable} -c 'import time\nwhile time.process_time() < 0.2: pass'; echo over; sleep 1000"
    kept = Kept("busy", ["sh", "-c", busy], {}, tmp_path / "log", 0)
    try:
        eventually(lambda: "over" in kept.log.read_text(), "the busy child has ended")
        used = cpu_seconds(members_of([("busy", kept.process)], lambda role, process: role))
    finally:
        kept.stop()
    assert used["busy"] >= 0.15  # counted in ticks of 10 ms


def test_what_ends_instead_of_starting_is_told_with_its_last_words(tmp_path: Path) -> None:
    kept = Kept("ranker", ["sh", "-c", "echo no such model >&2; exit 3"], {}, tmp_path / "log", 0)
    with pytest.raises(BenchError, match=r"ranker ended before it answers\. Its last words:\n  \| no such model"):
        wait_for(lambda: False, "it answers", within_s=30, of=[kept])


def test_programs_keep_their_compiled_code_also_where_the_shell_does_not_want_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("STAYS", "1")
    kept = Kept("env", ["env"], {"ADDED": "1"}, tmp_path / "log", 0)
    eventually(kept.ended, "it is over")
    seen = set(kept.log.read_text().splitlines())
    assert {"STAYS=1", "ADDED=1"} <= seen
    assert "PYTHONDONTWRITEBYTECODE=1" not in seen
