"""The keeper counts every process that a command starts, and ends it with the command."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from tests.bench.processes import Kept, cpu_seconds, members_of
from tests.harness.waiting import eventually

# Forks twice into a session of its own, as daemons do.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(1000)
    os._exit(0)
time.sleep(1000)
"""


def test_a_daemon_stays_in_the_tree_and_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "daemon"
    kept = Kept("test", [sys.executable, "-c", DAEMON, str(file)], {}, tmp_path / "log", grace_s=0)
    try:
        daemon = int(eventually(lambda: file.exists() and file.read_text(), f"{file} holds a process id"))
        eventually(lambda: daemon in {each.pid for each in kept.process.children(recursive=True)}, "it is counted")
    finally:
        kept.stop()
    assert not psutil.pid_exists(daemon)


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
