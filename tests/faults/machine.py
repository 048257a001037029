"""How much of this machine's processors others have while a test measures."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Self

_TICKS = os.sysconf("SC_CLK_TCK")


WINDOW_S = 1.0


class Watch(ABC):
    """Looks at something for as long as the block runs."""

    _looking: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._looking.cancel()
        await asyncio.wait([self._looking])

    @abstractmethod
    async def _look(self) -> None:
        """Look again and again; ends by being cancelled."""


class Others(Watch):
    """What processes other than this one and `ours` take, in cores: the most in any second while the block runs.

    Times are only worth a verdict where it is little. It is not the same as a slow test: code of ours that burns
    processor time counts as ours.
    """

    def __init__(self, ours: Iterable[int]) -> None:
        self._pids = [os.getpid(), *ours]
        self.most = 0.0

    async def _look(self) -> None:
        since, before = time.monotonic(), self._total() - self._ours()
        while True:
            await asyncio.sleep(WINDOW_S)
            now, taken = time.monotonic(), self._total() - self._ours()
            self.most = max(self.most, (taken - before) / (now - since))
            since, before = now, taken

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
