"""What the ranker's own environment variables say."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from pierhead.errors import SettingsError

Device = Literal["auto", "cpu", "cuda"]


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
        environ = os.environ if environ is None else environ
        problems: list[str] = []
        settings = cls(
            weights=_weights(environ.get("PIERHEAD_RANKER_WEIGHTS", "").strip(), problems),
            device=_device(environ.get("PIERHEAD_RANKER_DEVICE", "").strip() or "auto", problems),
            threads=_threads(environ.get("PIERHEAD_TORCH_THREADS", "").strip(), problems),
        )
        if problems:
            raise SettingsError("\n".join(problems))
        return settings


def _weights(raw: str, problems: list[str]) -> Path | None:
    if raw and not Path(raw).is_file():
        problems.append(
            f"PIERHEAD_RANKER_WEIGHTS: expected a safetensors file inside the container, found none at {raw}; mount it "
            "with `volumes`, or leave the variable out for weights from a fixed seed"
        )
    return Path(raw) if raw else None


def _device(raw: str, problems: list[str]) -> torch.device:
    if raw not in ("auto", "cpu", "cuda"):
        problems.append(f'PIERHEAD_RANKER_DEVICE: expected auto, cpu or cuda, found "{raw}"')
        return torch.device("cpu")
    available = torch.cuda.is_available()
    if raw == "cuda" and not available:
        why = "this image holds a CPU build of PyTorch" if torch.version.cuda is None else "PyTorch finds no GPU"
        problems.append(
            f"PIERHEAD_RANKER_DEVICE: expected a GPU, found none: {why}. Give the service a GPU "
            "(deploy.resources.reservations.devices) and an image with a CUDA build, or set it to cpu or auto."
        )
    wanted = cast("Device", raw)
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def _threads(raw: str, problems: list[str]) -> int:
    if not raw:
        return default_threads()
    if not (raw.isascii() and raw.isdigit()) or int(raw) < 1:
        problems.append(f'PIERHEAD_TORCH_THREADS: expected an integer >= 1, found "{raw}"')
        return 1
    return int(raw)


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
