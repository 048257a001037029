"""What the machine that the replicas run on has, and what it has left. Several nodes tell nothing of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one replica takes."""

    memory_bytes: int = 0
    processes: int = 0
    """Threads are counted, as the kernel does."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One reading of a machine."""

    cores: int
    memory_bytes: int
    free_bytes: int
    """Memory that programs can have without swapping."""
    most_processes: int
    processes: int
    load: float
    """How many processes ran, or waited for a core or a disk, on average of the last minute."""
    stalled_percent: float = 0.0
    """Share of the last ten seconds in which a process waited for memory; 0 also where the kernel does not count it."""
    footprints: Mapping[str, Footprint] = field(default_factory=dict)
    """By service with running replicas of which another one was made lately: the greatest of them."""
