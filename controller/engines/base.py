"""What the controller needs of a container engine. `docker.py` is the real one, tests/fakes/fake_engine.py the fake.

Both pass tests/contract/test_engine_contract.py. An engine decides nothing: `perform` is one API call per action,
"already exists" and "already gone" are success, everything else is an `EngineError` that names the call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..model.actions import CreateContainer, PullImage, RemoveContainer, SignalContainer, StartContainer
from ..model.world import Gpu, ReplicaContainer, StrayContainer

EngineAction = PullImage | CreateContainer | StartContainer | SignalContainer | RemoveContainer


@dataclass(frozen=True, slots=True)
class EngineState:
    """The engine's part of a snapshot; health and in-flight fields of the containers are left at their defaults."""

    containers: tuple[ReplicaContainer, ...]
    strays: tuple[StrayContainer, ...]
    images: Mapping[str, str | None]
    gpus: tuple[Gpu, ...]
    foreign_gpu_holders: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """Something changed. An event only wakes the loop, which reads the world again."""

    kind: str  # start, die, oom, destroy, "image tag", ...
    container_id: str
    name: str


CONNECTED = EngineEvent(kind="connected", container_id="", name="")
"""The stream is (again) open: what changed before it was is not in it, so look once."""
OVERFLOW = EngineEvent(kind="overflow", container_id="", name="")
"""More happened than the queue holds: "something changed" stands for all of it."""


OUT_OF_MEMORY = "oom"
"""The kind of event that tells of a process that the kernel killed for want of memory; its container may live on."""


class ClusterEngine(Protocol):
    """The container engine as the loop sees it."""

    async def observe(self, project: str, service_names: Collection[str], images: Collection[str]) -> EngineState:
        """Read containers of `project`, ids of `images` and GPUs. Raises EngineUnreachable, EngineError."""
        ...

    async def perform(self, action: EngineAction, project: str) -> None:
        """Make one API call. Raises EngineError and its kinds."""
        ...

    async def used_gpu_memory(self) -> Mapping[str, int]:
        """Bytes in use by any process, by UUID, of the GPUs that report them. Raises EngineError if none can be read.

        It may take seconds and a container: call it only when the figure is needed.
        """
        ...

    async def logs(self, container_id: str, tail: int, after: float | None = None, *, timed: bool = False) -> str:
        """Last `tail` lines of a container's output, those from a unix time on; empty when it is gone, or going.

        `timed`: before each line, the engine's time of it (2026-01-31T18:00:00.000000000Z) and a space. Logs that do
        not come keep no other call from the engine. Raises EngineUnreachable, EngineError.
        """
        ...

    async def has_image(self, image: str) -> bool:
        """Whether an image, by name or by id, is on this machine. Raises EngineUnreachable, EngineError."""
        ...

    async def exists(self, project: str, compose_service: str) -> bool:
        """Whether Compose's own container of that service is there, in any state (tells `down` from a restart)."""
        ...

    def events(self, project: str) -> AsyncIterator[EngineEvent]:
        """Yield CONNECTED, then events until cancelled; ends with EngineUnreachable when the stream breaks.

        The caller reopens it; in vain after EngineSocketGone.
        """
        ...

    async def close(self) -> None:
        """Close connections and end threads."""
        ...
