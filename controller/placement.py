"""Which GPUs a new replica gets. Pure; whole GPUs, each held by one replica at a time.

A GPU is taken while any container names it, running or not: a container that is being removed frees its GPUs only when
the removal has succeeded, so a new owner waits for the former one to be gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controller.model import CreateContainer, Gpu, GpuRequest, Observed


@dataclass(slots=True)
class GpuLedger:
    """Free and taken GPUs while one plan is being made."""

    inventory: tuple[Gpu, ...]
    holders: dict[str, str] = field(default_factory=dict)
    """GPU UUID -> who holds it: a service's name, or "container <name>" for a foreign one."""
    freed_by: dict[str, int] = field(default_factory=dict)
    """GPU UUID -> number of the plan step that frees it."""

    @classmethod
    def of(cls, observed: Observed) -> GpuLedger:
        """Read who holds what from a snapshot, creations in progress included."""
        holders = {uuid: f"container {name}" for uuid, name in sorted(observed.foreign_gpu_holders.items())}
        for container in observed.containers:
            holders.update(dict.fromkeys(container.gpus, container.service))
        for action in observed.in_progress:
            if isinstance(action, CreateContainer):
                holders.update({gpu.uuid: action.service for gpu in action.gpus})
        usable = tuple(gpu for gpu in observed.gpus if gpu.uuid not in observed.gpu_faults)
        return cls(inventory=usable, holders=holders)

    def free_after(self, uuids: tuple[str, ...], step: int) -> None:
        """Count these GPUs as free for whoever waits for that step."""
        for uuid in uuids:
            self.freed_by[uuid] = step

    def take(
        self, service: str, request: GpuRequest, preferred: tuple[str, ...]
    ) -> tuple[tuple[Gpu, ...], tuple[int, ...]] | str:
        """Return the GPUs for one replica and the steps to wait for, or one sentence on why there are not enough.

        `preferred` are those of the replica that the new one replaces; free ones come before ones about to be freed.
        """
        pool = [gpu for gpu in self.inventory if not request.device_ids or gpu.uuid in request.device_ids]
        free = [gpu for gpu in pool if gpu.uuid not in self.holders or gpu.uuid in self.freed_by]
        free.sort(key=lambda gpu: (gpu.uuid not in preferred, gpu.uuid in self.freed_by))
        if len(free) < request.count:
            return self._shortage(request, pool, len(free))
        chosen = tuple(free[: request.count])
        after = tuple(sorted({self.freed_by.pop(gpu.uuid) for gpu in chosen if gpu.uuid in self.freed_by}))
        self.holders.update({gpu.uuid: service for gpu in chosen})
        return chosen, after

    def _shortage(self, request: GpuRequest, pool: list[Gpu], free: int) -> str:
        wanted = "1 GPU" if request.count == 1 else f"{request.count} GPUs"
        if not self.inventory:
            return f"it asks for {wanted} and this machine offers none: check the driver and CDI (`docker info`)"
        if request.device_ids and len(pool) < request.count:
            known = ", ".join(gpu.uuid for gpu in self.inventory)
            missing = ", ".join(sorted(set(request.device_ids) - {gpu.uuid for gpu in pool}))
            return f"it asks for GPU {missing}, which this machine does not have; it has {known}"
        return f"it asks for {wanted} and {free} of {len(pool)} are free: {_held_by(self.holders, pool)}"


def _held_by(holders: Mapping[str, str], pool: list[Gpu]) -> str:
    counts: dict[str, int] = {}
    for gpu in pool:
        if gpu.uuid in holders:
            counts[holders[gpu.uuid]] = counts.get(holders[gpu.uuid], 0) + 1
    parts = [
        f"{count} held by {holder}" for holder, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    return ", ".join(parts)
