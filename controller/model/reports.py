"""What the controller reports: events, each service's status, and the replicas that Discovery sends to callers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .desired import ServiceRollout
from .nodes import NodeState
from .spec import DEFAULT_POLICY
from .world import NO_STATS, PublishedStats

EventOutcome = Literal["ok", "failed", "info", "warning"]
"""How the reported action or change ended."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica in Discovery's answer to callers."""

    replica: str
    address: str
    draining: bool
    max_ongoing_requests: int
    version: str
    node: str = ""
    weight: int = 1
    stats: PublishedStats = NO_STATS


@dataclass(frozen=True, slots=True)
class ServiceEndpoints:
    """Discovery's answer to callers about one service."""

    replicas: tuple[Endpoint, ...] = ()
    max_queued_requests: int = -1
    """How many calls may wait at each caller; -1 = no bound."""
    policy: str = DEFAULT_POLICY
    policy_kwargs: str = ""
    """The arguments that callers make that policy with: a JSON object; "" = none."""
    scaled_to_zero_by: str = ""
    """What has set the service to 0 replicas, in words, so that no call wakes it; "" = it is not set to 0."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event, for `GET /api/v1/events` and `pierhead events`."""

    at: float
    kind: str
    """Action class name in snake case, or a state change: replica_ready, replica_failed, spec_error, scale, ..."""
    service: str
    target: str
    message: str
    outcome: EventOutcome = "info"


ReplicaState = Literal["PENDING", "STARTING", "RUNNING", "DRAINING", "STOPPING", "FAILED", "CRASH_LOOP"]
"""CRASH_LOOP is a PENDING replica whose predecessors failed repeatedly: its next start waits for the backoff."""

ServiceState = Literal["UPDATING", "HEALTHY", "UNHEALTHY", "DEPLOY_FAILED", "UPSCALING", "DOWNSCALING"]
"""Ray Serve's words for a deployment."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """One row of the status table."""

    name: str
    wanted: int
    ready: int
    message: str
    state: ServiceState = "HEALTHY"
    replicas: tuple[ReplicaStatus, ...] = ()
    converged: bool = False
    """As many as wanted, all of them ready and of the current version, nothing on its way out."""
    blocked: str = ""
    """Why it will not converge by waiting; "" when it may."""
    override: int | None = None
    """The number that `pierhead scale` has set; None = it has set none."""
    autoscale: AutoscaleStatus | None = None
    """None for a service whose number of replicas is fixed."""
    rollout: RolloutStatus | None = None
    """None for a service that the compose files do not have any more."""
    user_config: UserConfigStatus | None = None
    """None where nothing is set, and nothing is in force."""
    unknown_callees: Mapping[str, str] = field(default_factory=dict)
    """Names that its replicas ask Discovery for and that no service has, each with a sentence."""


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """Which version of a service is wanted, and how far its rollout has come."""

    version: str
    """The version of new replicas; "" = not known."""
    offered: str
    """The version that the files and the image define; "" = the image is not on this machine."""
    state: ServiceRollout = field(default_factory=ServiceRollout)
    ready: int = 0
    """Ready replicas of the version that is being rolled out, else of `version`."""
    message: str = ""
    changes: tuple[str, ...] = ()
    """The differences between `offered` and the stable version."""


@dataclass(frozen=True, slots=True)
class UserConfigStatus:
    """How far a service's user_config has come. Replicas are those that serve and have the wanted version."""

    wanted: str
    """Its digest."""
    applied: int
    """Replicas in which it is in force."""
    replicas: int
    refused: tuple[str, ...] = ()
    """One sentence for each replica that refuses it, starting replicas included."""
    changes: tuple[str, ...] = ()
    """The values that differ from those in force in a replica; empty when every replica has it."""
    refusing: tuple[str, ...] = ()
    """Names of the replicas that `refused` is about."""

    @property
    def everywhere(self) -> bool:
        """Whether every replica has it."""
        return self.applied == self.replicas and not self.refused


@dataclass(frozen=True, slots=True)
class AutoscaleStatus:
    """What the autoscaler sees of a service, and wants."""

    min: int
    max: int
    target: int
    load: float
    """Requests in flight and waiting, over the service's look_back_period_s."""
    wanted: int
    """Replicas that this load asks for; the target once the delay is over."""
    paused: bool = False
    """`pierhead scale` has set a number."""
    basis: str = ""
    """What a user's policy decides by, in words; "" = the load."""
    problem: str = ""
    """Why the policy gives no number, so that the target is held; "" when it gives one."""


ShownAvailability = Literal["active", "paused", "leaving", "drained"]
"""Paused: nothing new is placed there. Leaving: its replicas go elsewhere."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node as the status shows it."""

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
    message: str = ""
    """What is wrong with it, or what to know of it; "" = nothing."""
    blocked: str = ""
    """Why it will not be drained by waiting; "" when it may."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica as the status shows it."""

    name: str
    state: ReplicaState
    version: str
    address: str
    gpus: tuple[str, ...]
    ongoing: int | None
    message: str
    node: str = ""
    """Where it is; "" = on the only machine, or nowhere yet."""
