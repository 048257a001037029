"""How many threads a forward pass on a CPU should have."""

from __future__ import annotations

import math
from pathlib import Path

import torch


def default_threads(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The whole CPUs that the cgroup's quota pays for; without a quota, half of the machine's physical cores.

    Threads of a pass wait for each other. One that is stopped, because the quota is used up or because something else
    runs on its core (this stack's ingress, say), stops them all: fewer threads are then faster than more.
    """
    quota = _cpu_quota(cgroup)
    cores = torch.get_num_threads()
    return max(1, cores // 2 if quota is None else min(cores, math.floor(quota)))


def _cpu_quota(cgroup: Path) -> float | None:
    """CPUs that the cgroup's quota allows; None = no quota. Version 2 (`cpu.max`) and version 1 (`cpu.cfs_*_us`)."""
    files = ((cgroup / "cpu.max",), (cgroup / "cpu" / "cpu.cfs_quota_us", cgroup / "cpu" / "cpu.cfs_period_us"))
    for paths in files:
        try:
            quota, period = " ".join(path.read_text() for path in paths).split()
        except OSError:
            continue  # not this version of cgroups
        return None if quota in ("max", "-1") else int(quota) / int(period)
    return None
