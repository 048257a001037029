"""What the ranker's own environment variables say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pierhead.environment import Environment

from services.recsys.ranker.threads import default_threads


@dataclass(frozen=True, slots=True)
class RankerSettings:
    """| variable | meaning |
    |---|---|
    | PIERHEAD_RANKER_WEIGHTS | safetensors file with the parameters; unset: weights from a fixed seed |
    | PIERHEAD_RANKER_DEVICE | cpu, cuda, or auto (the default): cuda where PyTorch finds it |
    | PIERHEAD_TORCH_THREADS | threads of one forward pass on a CPU; default: see `threads.default_threads` |
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
