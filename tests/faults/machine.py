"""How much of this machine's processors others have while a test measures."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


class Others:
    """What processes other than this one and `ours` take, in cores, from the making of this object on.

    Times are only worth a verdict where it is little. It is not the same as a slow test: code of ours that burns
    processor time counts as ours.
    """

    def __init__(self, ours: Iterable[int]) -> None:
        self._pids = [os.getpid(), *ours]
        self._since = time.monotonic()
        self._before = self._total() - self._ours()

    def cores(self) -> float:
        """On average until now."""
        return max(0.0, self._total() - self._ours() - self._before) / (time.monotonic() - self._since)

    def _ours(self) -> float:
        seconds = 0.0
        for pid in self._pids:
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds += (int(after_name[11]) + int(after_name[12])) / _TICKS
        return seconds

    @staticmethod
    def _total() -> float:
        user, nice, system, _, _, hard, soft, stolen = map(int, Path("/proc/stat").read_text().split()[1:9])
        return (user + nice + system + hard + soft + stolen) / _TICKS
