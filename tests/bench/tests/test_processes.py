"""The keeper counts every process that a command starts, and ends it with the command."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from tests.bench.processes import Kept, cpu_seconds, members_of
from tests.harness.waiting import eventually

# Computes for 0.2 s in a child that ends, and then forks twice into a session of its own, as daemons do.
PROGRAM = """
import os, sys, time
if os.fork() == 0:
    while time.process_time() < 0.2: pass
    os._exit(0)
os.wait()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(f"{os.getpid()}.")
        time.sleep(1000)
    os._exit(0)
time.sleep(1000)
"""


def test_a_daemon_stays_in_the_tree_and_the_time_of_a_child_that_has_ended_counts(tmp_path: Path) -> None:
    file = tmp_path / "daemon"
    kept = Kept("test", [sys.executable, "-c", PROGRAM, str(file)], {}, tmp_path / "log", grace_s=0)
    try:
        eventually(lambda: file.exists() and file.read_text().endswith("."), f"{file} holds a process id")
        daemon = int(file.read_text()[:-1])
        eventually(lambda: daemon in {each.pid for each in kept.process.children(recursive=True)}, "it is counted")
        used = cpu_seconds(members_of([("test", kept.process)], lambda role, process: role))
    finally:
        kept.stop()
    assert not psutil.pid_exists(daemon)
    assert used["test"] >= 0.15  # counted in ticks of 10 ms
