"""The actions of a plan: one class for each API call, with the call's arguments and its description."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .keys import KeySet
from .nodes import Availability
from .spec import GpuSlot, ServiceSpec, digest, slot_words
from .world import Gpu, ServerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One API call. `target` is the replica, service or "routing" it is about; `cause` says why it is needed."""

    target: str
    service: str = ""
    cause: str = ""

    template: ClassVar[str]
    """The template of `words`; {0} stands for the action. A class without one overrides `words`."""

    @property
    def words(self) -> str:
        """What it does, without its cause: "create pierhead-ranker-1a2b3c4d-2 on GPU-0001"."""
        return self.template.format(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullImage(Action):
    """Pull an image that Compose does not build; target = service."""

    image: str
    spec: ServiceSpec = field(repr=False, compare=False)
    """The service: an image that Compose builds is never pulled."""

    template: ClassVar = "pull {0.image} for {0.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateContainer(Action):
    """Create (not start) a replica's container; target = replica name."""

    version: str
    number: int
    gpus: tuple[Gpu, ...] = ()
    spec: ServiceSpec = field(repr=False)
    """The definition of this version."""

    @property
    def gpu_slot(self) -> GpuSlot | None:
        """Its share of its GPU; None = its GPUs whole."""
        return self.spec.gpu.slot if self.spec.gpu else None

    @property
    def words(self) -> str:
        """See `Action.words`."""
        slot = f"{slot_words(self.gpu_slot)} of " if self.gpu_slot else ""
        gpus = f" on {slot}{', '.join(gpu.uuid for gpu in self.gpus)}" if self.gpus else ""
        return f"create {self.target}{gpus}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartContainer(Action):
    """Start a created container; target = replica name (known by name: its id may not exist when planned)."""

    template: ClassVar = "start {0.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginRetirement(Action):
    """Mark a replica as draining: Discovery stops offering it, the mark survives the controller."""

    container_id: str
    failed: bool = False

    template: ClassVar = "drain {0.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalContainer(Action):
    """Send SIGTERM (recorded as the start of STOPPING; the container's own stop signal in its place) or SIGKILL."""

    container_id: str
    signal: Literal["SIGTERM", "SIGKILL"]

    template: ClassVar = "send {0.signal} to {0.target}"


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
    """When the replica was started, or created if it never started; None = not known."""
    gpus: tuple[str, ...] = ()
    """Of the replica; what a failure is counted against, too."""

    template: ClassVar = "remove {0.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUserConfig(Action):
    """Send a running replica another user_config; no restart. Target = replica name."""

    container_id: str
    address: str
    """Of its admin pages."""
    text: str = field(repr=False)

    @property
    def words(self) -> str:
        """See `Action.words`."""
        return f"give user_config {digest(self.text)} to {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PutToSleep(Action):
    """Tell a drained replica to give its GPUs' memory back and to stay (recorded, as SIGTERM is)."""

    container_id: str
    address: str
    """Of its admin pages."""

    template: ClassVar = "put {0.target} to sleep"


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeReplica(Action):
    """Tell a replica that sleeps to wake up; its retirement mark goes first, so it holds its GPUs again."""

    container_id: str
    address: str
    """Of its admin pages."""

    template: ClassVar = "wake {0.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddServer(Action):
    """Register a ready replica with HAProxy: add server, enable health, enable server."""

    backend: str
    address: str
    weight: int = 1
    spec: ServiceSpec = field(repr=False, compare=False)
    """The source of the server's check and limits."""

    template: ClassVar = "add server {0.backend}/{0.target} at {0.address}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetServerState(Action):
    """Put a server into ready, drain or maint."""

    backend: str
    state: ServerState

    template: ClassVar = "set server {0.backend}/{0.target} to {0.state}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetServerWeight(Action):
    """Set a server's share of the backend's requests: its weight (1 to 256) of the sum of all."""

    backend: str
    weight: int

    template: ClassVar = "set server {0.backend}/{0.target} to weight {0.weight}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownSessions(Action):
    """End the sessions that a server has left after its drain deadline."""

    backend: str

    template: ClassVar = "end the sessions of {0.backend}/{0.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteServer(Action):
    """Wait until the server is removable and delete it."""

    backend: str

    template: ClassVar = "delete server {0.backend}/{0.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetWaitingRoom(Action):
    """Set whether requests of a backend without servers wait for a first one or are refused; target = service."""

    backend: str
    is_open: bool

    @property
    def words(self) -> str:
        """See `Action.words`."""
        return f"let requests wait for {self.target}" if self.is_open else f"let no request wait for {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRouting(Action):
    """Write the configuration for these services and reload; only for a new or changed route or service."""

    services: tuple[ServiceSpec, ...]
    routing_hash: str

    @property
    def words(self) -> str:
        """See `Action.words`."""
        names = ", ".join(service.name for service in self.services) or "no service"
        return f"write routes of {names} and reload"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteKeys(Action):
    """Have HAProxy know these keys of clients and no others; no reload."""

    keys: KeySet = field(repr=False)

    @property
    def words(self) -> str:
        """See `Action.words`."""
        return f"write {len(self.keys.keys)} keys of clients"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRouter(Action):
    """Kill a HAProxy that hangs, and start its container; target = its Compose service."""

    template: ClassVar = "kill and start {0.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateNode(Action):
    """Change a node's availability and labels; target = its name. What is not named stays."""

    node_id: str
    version: int | None = None
    """The version that it must still have; None = any."""
    availability: Availability | None = None
    labels: tuple[tuple[str, str | None], ...] = ()
    """Key and value; None takes the label away."""

    @property
    def words(self) -> str:
        """See `Action.words`."""
        changes: list[str] = [self.availability] if self.availability else []
        changes += [f"no label {key}" if value is None else f"label {key}={value}" for key, value in self.labels]
        return f"change node {self.target}: {', '.join(changes)}"


def replica_name(project: str, service: str, version: str, number: int) -> str:
    """`<project>-<service>-<version>-<n>`: deterministic, so creating the same replica twice is "already exists"."""
    return f"{project}-{service}-{version}-{number}"


# ----------------------------------------------------------------------------------------------------
# Kinds of events: one for each action, and one for everything else that the controller reports.


def action_name(action: Action | type[Action]) -> str:
    """Return an action's class in snake case: `create_container`. Event kinds and metrics use it."""
    kind = action if isinstance(action, type) else type(action)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


KINDS = frozenset(
    {
        *map(action_name, Action.__subclasses__()),
        *("adopted", "asked", "autoscale", "scale", "left_alone", "out_of_memory", "refused", "tick_failed"),
        *("certificates", "public_keys", "spec_error", "spec_read", "spec_warning"),
        *("edge_back", "edge_differs", "haproxy_answers", "haproxy_restarted", "haproxy_silent"),
        *("engine_answers", "engine_silent", "gpu_marked", "gpu_unmarked", "policy_failed", "policy_works"),
        *("node_back", "node_drained", "node_joined", "node_lost", "node_removed", "nodes_believed", "nodes_doubted"),
        *("quorum_at_risk", "quorum_safe", "store_failing", "store_replaced", "store_works"),
        *("replica_failed", "replica_moved", "replica_not_ready", "replica_pending", "replica_progress"),
        *("replica_ready", "rollback", "rolled_back", "rolled_out", "rollout"),
        *("user_config", "user_config_applied", "user_config_refused"),
    }
)
