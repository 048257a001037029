"""What the ranker's own environment variables say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pierhead.environment import Environment


@dataclass(frozen=True, slots=True)
class RankerSettings:
    """| variable | meaning |
    |---|---|
    | PIERHEAD_RANKER_WEIGHTS | safetensors file with the parameters; unset: weights from a fixed seed |
    | PIERHEAD_RANKER_DEVICE | cpu, cuda, or auto (the default): cuda where PyTorch finds it |
    | PIERHEAD_TORCH_THREADS | threads of one forward pass on a CPU; default: see `default_threads` |
    """

    weights: Path | None
    device: torch.device
    threads: int

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> RankerSettings:
        """Read the environment. Raises SettingsError naming every variable that cannot be used."""
        env = Environment(environ)
        settings = cls(
            weights=_weights(env),
            device=_device(env),
            threads=env.integer("PIERHEAD_TORCH_THREADS", default_threads(), 1),
        )
        env.check()
        return settings


def _weights(env: Environment) -> Path | None:
    path = env.text("PIERHEAD_RANKER_WEIGHTS")
    if path and not Path(path).is_file():
        env.problems.append(
            "PIERHEAD_RANKER_WEIGHTS: expected a safetensors file inside the container, "
            f"found none at {path}; mount it with `volumes`, or leave the variable out for weights from a fixed seed"
        )
    return Path(path) if path else None


def _device(env: Environment) -> torch.device:
    wanted = env.choice("PIERHEAD_RANKER_DEVICE", "auto", ("auto", "cpu", "cuda"))
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        why = "this image holds a CPU build of PyTorch" if torch.version.cuda is None else "PyTorch finds no GPU"
        env.problems.append(
            f"PIERHEAD_RANKER_DEVICE: expected a GPU, found none: {why}. Give the service a GPU "
            "(deploy.resources.reservations.devices) and an image with a CUDA build, or set it to cpu or auto."
        )
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


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
