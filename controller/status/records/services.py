"""The documents about services, GPUs and nodes: what `pierhead status`, `why`, `gpus` and `nodes` show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...model.nodes import NodeState
from ...model.reports import AutoscaleStatus, UserConfigStatus
from .document import Document

ReplicaState = Literal["PENDING", "STARTING", "RUNNING", "DRAINING", "ASLEEP", "STOPPING", "FAILED", "CRASH_LOOP"]
"""CRASH_LOOP is a PENDING replica whose predecessors failed repeatedly: its next start waits for the backoff."""

ServiceState = Literal["UPDATING", "HEALTHY", "UNHEALTHY", "DEPLOY_FAILED", "UPSCALING", "DOWNSCALING"]
"""Ray Serve's words for a deployment."""

ShownAvailability = Literal["active", "paused", "leaving", "drained"]
"""Paused: nothing new is placed there. Leaving: its replicas go elsewhere."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus(Document):
    """One replica."""

    name: str
    state: ReplicaState
    version: str
    address: str
    gpus: tuple[str, ...]
    ongoing: int | None
    message: str
    node: str
    """Where it is; "" = on the only machine, or nowhere yet."""


@dataclass(frozen=True, slots=True)
class Failure(Document):
    """Replicas that failed in a row."""

    count: int
    last_at: float
    detail: str


@dataclass(frozen=True, slots=True)
class RefusedAction(Document):
    """An action that failed and waits for its next try."""

    does: str
    failures: int
    retry_in_s: float
    error: str


@dataclass(frozen=True, slots=True)
class RolloutDocument(Document):
    """A rollout in progress."""

    from_: str | None
    to: str
    phase: str
    since: float
    begun_at: float
    cause: str
    ready: int
    wanted: int
    message: str
    progress: str
    """The phase and the numbers, in words."""


@dataclass(frozen=True, slots=True)
class RejectionDocument(Document):
    """A version of the files that does not run until a user asks for it, or the files give another one."""

    version: str
    reason: str
    at: float
    is_asked: bool
    """A user asked for it: nothing has failed."""
    is_refused: bool
    """Its contract is incompatible with that of the running version: it has not served."""
    id: str
    """Does not change when the clock is set."""


@dataclass(frozen=True, slots=True)
class Obstacle(Document):
    """One reason why a service has not converged."""

    words: str
    key: tuple[str, ...]
    """Identifies the reason: it does not change with the times and numbers in `words`."""


@dataclass(frozen=True, slots=True)
class DeadEnd(Document):
    """What waiting alone does not change, and what to do."""

    words: str
    next_step: str


@dataclass(frozen=True, slots=True)
class Service(Document):
    """One service."""

    name: str
    wanted: int
    ready: int
    message: str
    state: ServiceState
    replicas: tuple[ReplicaStatus, ...]
    converged: bool
    """As many replicas as wanted, all ready and of the current version, none retiring."""
    blocked: str
    """Why waiting will not make it converge; "" when it may."""
    override: int | None
    """The number that `scale` has set."""
    autoscale: AutoscaleStatus | None
    """None for a service whose number of replicas is fixed."""
    rollout: RolloutDocument | None
    user_config: UserConfigStatus | None
    """None where nothing is set, and nothing is in force."""
    calls: tuple[str, ...]
    """The services that it calls: those that its replicas look for, and those that the files say it needs."""
    unknown_callees: Mapping[str, str]
    """Names that its code calls although no service has that name, each with a sentence."""
    unreached: tuple[str, ...]
    """Ready replicas of it that callers do not reach, and those that its own replicas do not reach: a sentence each."""
    at: float
    engine_reachable: bool
    image: str | None
    protocol: str | None
    port: int | None
    route: str | None
    grpc_services: tuple[str, ...]
    models: tuple[str, ...]
    """Of a language model: its name, and `name:adapter` for each adapter that its replicas load at first."""
    version: str | None
    """The version of new replicas."""
    offered: str | None
    """The version that the files and the image define."""
    stable: str | None
    """The version that has proven itself."""
    changes: tuple[str, ...]
    """The differences between `offered` and `stable`."""
    untried: bool
    rejected: RejectionDocument | None
    in_flight: float | None
    """Requests in its replicas."""
    waiting: float | None
    """Requests that wait for a replica, in callers and in HAProxy."""
    spec_replicas: int | None
    """The number in the compose files; with an autoscaler, the initial one."""
    failure: Failure | None
    refusals: tuple[RefusedAction, ...]
    obstacles: tuple[Obstacle, ...]
    """The most important first."""
    who_decides: str
    """What sets the number of replicas, in one sentence."""
    summary: str
    """What is going on, in one sentence; "" = nothing."""
    stuck: DeadEnd | None
    """Why it will not get the replicas that it wants; null when it may."""
    not_as_asked: DeadEnd | None
    """Why what serves is not what the files ask for, however many replicas there are; null when it is, or may be."""

    @property
    def turned_down(self) -> RejectionDocument | None:
        """Why the version that the files ask for does not run; None where it may, or an operator asked for that."""
        rejected = self.rejected
        return rejected if rejected and not rejected.is_asked and rejected.version == self.offered else None


@dataclass(frozen=True, slots=True)
class GpuSlotUse(Document):
    """One replica's slot of a GPU."""

    replica: str
    amount: str
    """In words: "16 GiB", "0.5"."""


@dataclass(frozen=True, slots=True)
class GpuUse(Document):
    """One GPU (or MIG device) and its holder ("" = free). Sizes are None where they are not known."""

    uuid: str
    name: str
    holder: str
    """The container that holds the whole GPU, or all containers that hold slots of it."""
    slots: tuple[GpuSlotUse, ...]
    memory_bytes: int | None
    used_bytes: int | None
    """Memory in use by all processes, as last read."""
    free_bytes: int | None
    """Memory that is free for a new slot."""
    fault: str
    """Why no replica is placed on it; "" when one may be."""
    node: str
    """The machine that it is in; "" = there is only one."""


@dataclass(frozen=True, slots=True)
class NodeStatus(Document):
    """One node."""

    name: str
    role: Literal["leader", "manager", "worker"]
    state: NodeState
    availability: ShownAvailability
    address: str
    labels: Mapping[str, str]
    replicas: int
    """Those that are there, in any state."""
    gpus: int
    gpus_used: int
    message: str
    """What is wrong with it, or what to know of it; "" = nothing."""
    blocked: str
    """Why it will not be drained by waiting; "" when it may."""


@dataclass(frozen=True, slots=True)
class MachineDocument(Document):
    """What the machine has, and what it has left, as last read."""

    cores: int
    load: float
    """Processes that ran or waited, on average of the last minute."""
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Services(Document):
    """The whole stack, as `pierhead status` shows it."""

    project: str
    at: float
    services: tuple[Service, ...]
    gpus: tuple[GpuUse, ...]
    nodes: tuple[NodeStatus, ...]
    """None where the engine is one machine."""
    machine: MachineDocument | None
    """null: not known, or there are several."""
    gpu_memory_problem: str
    """Why the memory in use is not known, in words."""
    spec_problems: tuple[str, ...]
    """The problems of the compose files; while there are any, the last good files are in force."""
    notices: tuple[str, ...]
    """What is wrong beyond a single service, one sentence each."""
    settled: bool
    """Whether compose files have been read."""
    files_current: bool
    """Whether this answer is about the files as they are now."""
    engine_reachable: bool | None


@dataclass(frozen=True, slots=True)
class Nodes(Document):
    """The nodes, by name; none where the engine is one machine."""

    at: float
    nodes: tuple[NodeStatus, ...]
    engine_reachable: bool | None
