"""The state of a test's process that all tests in it share, so that no test finds what another one left in it.

Which tests share a process, and in which order, differs between runs with several processes.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

from pierhead.edge import logs
from pierhead.held import HELD
from pierhead.replica.starting import START
from pierhead.request import CURRENT
from pierhead.routing_stats import STATS

PYTEST_S_OWN = frozenset({"PYTEST_CURRENT_TEST", "PYTEST_VERSION", "PYTEST_XDIST_WORKER"})
# pytest-timeout rings by the alarm, and changes it between a test and its fixtures.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGPIPE)
ENDED_WITHIN_S = 60.0

ProcessState = Mapping[str, object]


def process_state() -> ProcessState:
    """By name, each thing as it is now: values that compare as equal where it is the same."""
    root = logging.getLogger()
    return {
        **{f"variable {name}": value for name, value in os.environ.items() if name not in PYTEST_S_OWN},
        **{f"handler of {each.name}": signal.getsignal(each) for each in SIGNALS},
        "working directory": os.getcwd(),
        "module path": tuple(sys.path),
        "level of the root logger": root.level,
        "handlers of the root logger": [one for one in root.handlers if not type(one).__module__.startswith("_pytest")],
        "factory of log records": logging.getLogRecordFactory(),
        "pierhead.edge.logs": (logs._handler, logs._requests),
        "garbage collection": gc.isenabled(),
        "current request": CURRENT.get(),
        "models held": HELD.models(),
        "stats published": STATS.version,
        "start told": START.steps,
    }


def our_threads() -> set[threading.Thread]:
    """Those of the runtime and the controller."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("pierhead")}


def left_behind(state: ProcessState, threads: set[threading.Thread]) -> list[str]:
    """What has changed, as "name: before -> now"; threads have time to end."""
    now = process_state()
    changed = [
        f"{name}: {state.get(name)!r} -> {now.get(name)!r}"
        for name in sorted(state.keys() | now.keys())
        if state.get(name) != now.get(name)
    ]
    limit = time.monotonic() + ENDED_WITHIN_S
    for thread in our_threads() - threads:
        thread.join(max(0.0, limit - time.monotonic()))
        if thread.is_alive():
            changed.append(f"thread {thread.name}: none -> it runs")
    return changed
