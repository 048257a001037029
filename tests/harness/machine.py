"""Whether this machine had processors for what a test measures: without them a time that is too long is no verdict.

What is in time on a busy machine is in time, so the machine's figures count only after something was late. Processes
of the test do not make it a busy one. But where one of them needs nearly all of its core (BUSY_S) a time is as much
about the core's speed as about the code, and is no verdict either: tests/bench measures what the code costs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")

QUIET_CORES = 0.7
"""What other processes of this machine may take, in any second, for times to be worth a verdict."""

WAITED_S = 0.1
"""What a process of ours may wait for a core, in any second."""

BUSY_S = 0.8
"""What a process of ours may compute in any second: with more it is about the machine's speed, and its line grows."""

STALL_S = 0.2
"""How late a thread may wake that does nothing else."""

START_S = 0.15
"""What the start of a Python that does nothing may take: a tenth of it on an idle machine of today."""


class Watch(ABC):
    """Calls `look` again and again for as long as the block runs, in a thread of its own."""

    every_s = 1.0

    def __enter__(self) -> Self:
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._run, name=f"a test's {type(self).__name__}")
        self._looking.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._looking.join()

    @abstractmethod
    def look(self) -> None:
        """Look once."""

    def _run(self) -> None:
        while not self._over.wait(self.every_s):
            self.look()


class Machine(Watch):
    """What keeps times from being a verdict; `excuses` has it in words and figures, and is empty on a quiet machine."""

    @abstractmethod
    def excuses(self) -> list[str]:
        """Why something may be late, e.g. ["others took up to 1.3 cores"]."""


_Look = tuple[float, float, Mapping[int, float], Mapping[int, float]]
"""When it was, seconds that all cores were used, and for each process of ours those on a core and in line for one."""


class Cores(Machine):
    """Who had the processors while processes of ours worked, this one among them: the most in any second."""

    def __init__(self, ours: Iterable[int]) -> None:
        self._pids = [os.getpid(), *ours]
        self._before = self._now({}, {})
        self.others = 0.0
        """Cores that all other processes took, and what the machine's own host took from it."""
        self.waited = dict.fromkeys(self._pids, 0.0)
        """Seconds that the event loop of each process of ours was ready and had no core."""
        self.ran = dict.fromkeys(self._pids, 0.0)
        """Seconds that each of them had one."""

    def look(self) -> None:
        since, total, ran, waited = self._before
        self._before = now, total_now, ran_now, waited_now = self._now(ran, waited)
        took_s = now - since
        self.others = max(self.others, (total_now - total - sum(ran_now.values()) + sum(ran.values())) / took_s)
        for pid in self._pids:
            self.ran[pid] = max(self.ran[pid], (ran_now[pid] - ran[pid]) / took_s)
            self.waited[pid] = max(self.waited[pid], (waited_now[pid] - waited[pid]) / took_s)

    def excuses(self) -> list[str]:
        found = []
        if self.others > QUIET_CORES:
            found.append(f"others took up to {self.others:.1f} cores")
        if (waited := max(self.waited.values())) > WAITED_S:
            found.append(f"a process of ours waited up to {waited:.2f} s of a second for a core")
        if (ran := max(self.ran.values())) > BUSY_S:
            found.append(f"a process of ours needed up to {ran:.2f} s of a second of its core")
        return found

    def _now(self, ran: Mapping[int, float], waited: Mapping[int, float]) -> _Look:
        """`ran`, `waited`: at the last look, which holds for a process that has ended since."""
        found = {pid: _ran_and_waited(pid) or (ran[pid], waited[pid]) for pid in self._pids}
        ran, waited = ({pid: each[place] for pid, each in found.items()} for place in (0, 1))
        return time.monotonic(), _all_cores(), ran, waited


class Pace(Machine):
    """How soon a thread wakes that only sleeps, and how long a Python takes that does nothing: for what is done by more
    processes than a test knows of. Both are slow on a machine that is slow, or has others to serve."""

    every_s = 0.02
    _STARTS_EVERY_S = 0.5

    def __init__(self) -> None:
        self.late_s = self.start_s = 0.0
        self._woke = self._started = time.monotonic()

    def look(self) -> None:
        woke = time.monotonic()
        self.late_s = max(self.late_s, woke - self._woke - self.every_s)
        if woke - self._started > self._STARTS_EVERY_S:
            subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True, timeout=60)
            self._started = time.monotonic()
            self.start_s = max(self.start_s, self._started - woke)
        self._woke = time.monotonic()

    def excuses(self) -> list[str]:
        found = []
        if self.late_s > STALL_S:
            found.append(f"a thread that only sleeps woke {self.late_s:.2f} s late")
        if self.start_s > START_S:
            found.append(f"a Python that does nothing took {self.start_s:.2f} s")
        return found


def judge(in_time: bool, promise: str, machine: Machine, more_excuses: Sequence[str] = ()) -> None:
    """Fail where a promise of time was not kept; skip where the machine explains it. For the end of a test: whatever
    does not depend on times has been asserted by then.
    """
    if in_time:
        return
    if excuses := [*machine.excuses(), *more_excuses]:
        pytest.skip(f"no verdict on a time ({promise}): {'; '.join(excuses)}")
    pytest.fail(f"not in time, on a machine that had nothing else to do: {promise}")


def _all_cores() -> float:
    """Seconds that all cores were used, or kept by the host of a virtual machine."""
    user, nice, system, _, _, hard, soft, stolen = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + hard + soft + stolen) / _TICKS


def _ran_and_waited(pid: int) -> tuple[float, float] | None:
    """Seconds that a process's threads have had a core, and its first one, which has the event loop, stood in line for
    one; None when it has ended.
    """
    try:
        threads = [each.read_text().split() for each in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        waited = Path(f"/proc/{pid}/schedstat").read_text().split()[1]
    except OSError:
        return None
    return sum(int(thread[0]) for thread in threads) / 1e9, int(waited) / 1e9
