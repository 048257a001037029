"""The interface of a container engine. `docker.py` here and `engine.py` of the annex implement it,
tests/fakes/fake_engine.py is the fake.

All pass tests/contract/test_engine_contract.py. An engine decides nothing: `perform` makes one API call for an action.
"Already exists" and "already removed" count as success; any other failure is an `EngineError` that names the call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from ..model.actions import (
    CreateContainer,
    PullImage,
    RemoveContainer,
    RestartRouter,
    SignalContainer,
    StartContainer,
    UpdateNode,
)
from ..model.observed import EngineState

EngineAction = (
    PullImage | CreateContainer | StartContainer | SignalContainer | RemoveContainer | RestartRouter | UpdateNode
)


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """A change in the engine. An event only wakes the loop, which then reads the engine again."""

    kind: str  # start, die, oom, destroy, "image tag", ...
    container_id: str
    name: str


CONNECTED = EngineEvent(kind="connected", container_id="", name="")
"""The stream was opened (again). It lacks earlier changes, so the engine must be read once."""


Places = Literal["ours", "the engine's"]
NO_MARKS = (
    "cannot be marked on a Swarm, which chooses the GPUs of replicas itself: `pierhead node drain {node}`, then repeat "
    "the machine's `pierhead node join` or `init` with --gpus and the UUIDs of its other GPUs, and `pierhead node "
    "activate {node}`"
)
"""Why a GPU is not marked where the engine places."""

OUT_OF_MEMORY = "oom"
"""The kind of event of a process that the kernel killed because memory ran out; its container may still run."""


MOST_FILE_BYTES = 4 * 1024 * 1024


class ClusterEngine(Protocol):
    """A container engine."""

    @property
    def places(self) -> Places:
        """Who chooses a replica's node and GPUs. Where the engine does, of the GPUs of `CreateContainer` only their
        number counts."""
        ...

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
        """The last `tail` lines of a container's output since the unix time `after`; "" for a container that is removed
        or being removed.

        `timed`: before each line, the engine's time stamp (2026-01-31T18:00:00.000000000Z) and a space. A hanging read
        of logs blocks no other call. Raises EngineUnreachable, EngineError.
        """
        ...

    async def has_image(self, image: str) -> bool:
        """Whether an image, by name or by id, is on this machine. Raises EngineUnreachable, EngineError."""
        ...

    async def file_of_image(self, image: str, path: str, project: str) -> bytes | None:
        """A file of an image, by the image's id or name, without starting anything of it.

        None where this machine does not have the image, where that has no regular file there, and where the file is
        larger than MOST_FILE_BYTES. Raises EngineUnreachable, EngineError.
        """
        ...

    async def exists(self, project: str, compose_service: str) -> bool:
        """Whether Compose's own container of that service exists, in any state: after `down` it does not."""
        ...

    def events(self, project: str) -> AsyncIterator[EngineEvent]:
        """Yield CONNECTED, then events until cancelled; ends with EngineUnreachable when the stream breaks.

        The caller reopens it; after EngineSocketGone that cannot succeed.
        """
        ...

    async def close(self) -> None:
        """Close connections and end threads."""
        ...
