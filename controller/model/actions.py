from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from .spec import GpuSlot, ServiceSpec
from .world import Gpu, ServerState

# ---------------------------------------------------------------------------------------------------- plan and actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One API call. `target` is the replica, service or "routing" it is about; `cause` says why it is needed."""

    target: str
    service: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullImage(Action):
    """Bring a foreign image to this machine; target = service."""

    image: str
    spec: ServiceSpec | None = field(default=None, repr=False, compare=False)
    """The service, for the words of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateContainer(Action):
    """Create (not start) a replica's container; target = replica name."""

    version: str
    number: int
    gpus: tuple[Gpu, ...] = ()
    spec: ServiceSpec | None = field(default=None, repr=False)
    """How this version is made; None = as the compose files say."""
    gpu_slot: GpuSlot | None = None
    """What it gets of its GPU; None = all of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartContainer(Action):
    """Start a created container; target = replica name (known by name: its id may not exist when planned)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginRetirement(Action):
    """Mark a replica as draining: Discovery stops offering it, the mark survives the controller."""

    container_id: str
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalContainer(Action):
    """Send SIGTERM (recorded as the start of STOPPING; the container's own stop signal in its place) or SIGKILL."""

    container_id: str
    signal: Literal["SIGTERM", "SIGKILL"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveContainer(Action):
    """Remove a container (force: one that still runs); the retirement mark goes with it.

    `failed` is true when the replica ended by itself: its last log lines are then kept in the event and the service's
    failure record grows.
    """

    container_id: str
    force: bool = False
    failed: bool = False
    version: str = ""
    """Of the replica; what a failure is counted for."""
    began_at: float | None = None
    """When the replica was started, or made where it never was; None = not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUserConfig(Action):
    """Tell a replica which user_config it shall have; it goes on meanwhile. Target = replica name."""

    container_id: str
    address: str
    """Of its admin port."""
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddServer(Action):
    """Give HAProxy a ready replica: add server, enable health, enable server."""

    backend: str
    address: str
    weight: int = 1
    spec: ServiceSpec | None = field(default=None, repr=False, compare=False)
    """The service as HAProxy is to know it: its check and its limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetServerState(Action):
    """Put a server into ready, drain or maint."""

    backend: str
    state: ServerState


@dataclass(frozen=True, slots=True, kw_only=True)
class SetServerWeight(Action):
    """Give a server its share of the backend's requests: its weight (1 to 256) of the sum of all."""

    backend: str
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownSessions(Action):
    """End what a server still has past its deadline."""

    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteServer(Action):
    """Wait until the server is removable and delete it."""

    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetWaitingRoom(Action):
    """Say whether requests of a backend without servers are held for a first one, or refused; target = service."""

    backend: str
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRouting(Action):
    """Write the configuration for these services and reload; only for a new or changed route or service."""

    services: tuple[ServiceSpec, ...]
    routing_hash: str


def replica_name(project: str, service: str, version: str, number: int) -> str:
    """`<project>-<service>-<version>-<n>`: deterministic, so creating the same replica twice is "already exists"."""
    return f"{project}-{service}-{version}-{number}"


# ----------------------------------------------------------------------------------------------------
# Kinds of events: each action is a kind, and so is each thing that the controller reports besides.


def action_name(action: Action | type[Action]) -> str:
    """Return an action's class in snake case: `create_container`. Event kinds and metrics use it."""
    kind = action if isinstance(action, type) else type(action)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


KINDS = frozenset(
    {
        *map(action_name, Action.__subclasses__()),
        "adopted",
        "autoscale",
        "engine_answers",
        "engine_silent",
        "gpu_marked",
        "gpu_unmarked",
        "haproxy_answers",
        "haproxy_restarted",
        "haproxy_silent",
        "out_of_memory",
        "policy_failed",
        "policy_works",
        "replica_failed",
        "replica_not_ready",
        "replica_pending",
        "replica_progress",
        "replica_ready",
        "rollback",
        "rolled_back",
        "rolled_out",
        "rollout",
        "scale",
        "spec_error",
        "spec_read",
        "spec_warning",
        "store_failing",
        "store_replaced",
        "store_works",
        "tick_failed",
        "user_config",
        "user_config_applied",
        "user_config_refused",
    }
)
