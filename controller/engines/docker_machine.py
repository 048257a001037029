"""Reads what the engine's machine has left, and what one replica takes of it. Blocking.

The machine's figures are the kernel's files in /proc, which tell of the whole machine in a container, too. Bounds of
control groups above the engine's containers cannot be seen from a container. What a replica takes is the engine's
statistics of a few that run, and is read only of services of which a replica was made lately.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker.errors

from ..model.machine import Footprint, Machine
from ..model.world import ReplicaContainer

if TYPE_CHECKING:
    from docker import APIClient

LATELY_S = 60.0
MOST_ASKED = 3
"""Replicas of a service: those that have run for the longest time."""
ASK_AGAIN_S = 5.0


class DockerMachine:
    """The machine that this process and the engine's containers run on."""

    def __init__(self, client: APIClient, proc: Path = Path("/proc"), clock: Callable[[], float] = time.time) -> None:
        """`clock`: of the engine's times."""
        self._client = client
        self._proc = proc
        self._clock = clock
        self._known: dict[str, tuple[float, Footprint]] = {}
        """By container id, and since when."""

    def read(self, replicas: Iterable[ReplicaContainer]) -> Machine | None:
        """One reading; None where the kernel's files are not there, or say something else."""
        try:
            memory = self._sizes("meminfo")
            load, _, _, counts, _ = (self._proc / "loadavg").read_text().split()
            limits = [int((self._proc / "sys/kernel" / name).read_text()) for name in ("pid_max", "threads-max")]
            return Machine(
                cores=os.cpu_count() or 1,
                memory_bytes=memory["MemTotal"],
                free_bytes=memory["MemAvailable"],
                most_processes=min(limits),
                processes=int(counts.partition("/")[2]),
                load=float(load),
                stalled_percent=self._stalled_percent(),
                footprints=self._footprints(replicas),
            )
        except (OSError, ValueError, KeyError):
            return None

    def _sizes(self, name: str) -> Mapping[str, int]:
        lines = (line.split() for line in (self._proc / name).read_text().splitlines())
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}

    def _stalled_percent(self) -> float:
        """Of /proc/pressure: "some avg10=0.00 avg60=0.00 avg300=0.00 total=0"; 0 where the kernel does not count."""
        try:
            text = (self._proc / "pressure/memory").read_text()
        except OSError:
            return 0.0
        return float(text.split()[1].removeprefix("avg10="))

    def _footprints(self, replicas: Iterable[ReplicaContainer]) -> Mapping[str, Footprint]:
        by_service: dict[str, list[ReplicaContainer]] = {}
        for one in replicas:
            by_service.setdefault(one.service, []).append(one)
        now = self._clock()
        self._known = {key: known for key, known in self._known.items() if 0 <= now - known[0] < ASK_AGAIN_S}
        found = {}
        for service, ours in by_service.items():
            if all(now - one.created_at > LATELY_S for one in ours):
                continue
            running = sorted((one for one in ours if one.state.is_up), key=lambda one: one.started_at or now)
            taken = [footprint for one in running[:MOST_ASKED] if (footprint := self._of(one.id, now)) is not None]
            if taken:
                found[service] = Footprint(max(one.memory_bytes for one in taken), max(one.processes for one in taken))
        return found

    def _of(self, container_id: str, now: float) -> Footprint | None:
        """What a container takes; None where the engine does not say it."""
        if container_id not in self._known:
            try:
                stats = self._client.stats(container_id, stream=False, one_shot=True)
            except docker.errors.APIError:
                return None
            self._known[container_id] = now, footprint(stats)
        return self._known[container_id][1]


def footprint(stats: Mapping[str, Any]) -> Footprint:
    """What the engine's statistics say that a container takes. Files that the kernel keeps in memory are left out: it
    drops them when programs need the memory."""
    memory = stats.get("memory_stats") or {}
    details = memory.get("stats") or {}
    files = sum(details.get(key) or 0 for key in ("active_file", "inactive_file"))
    processes = (stats.get("pids_stats") or {}).get("current") or 0
    return Footprint(max(0, (memory.get("usage") or 0) - files), processes)
