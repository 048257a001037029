"""What the controller reports: events, and how far changes are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .desired import ServiceRollout

EventOutcome = Literal["ok", "failed", "info", "warning"]
"""How the reported action or change ended."""


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


@dataclass(frozen=True, slots=True)
class Note:
    """What an event tells, without its time."""

    kind: str
    message: str
    service: str = ""
    target: str = ""
    outcome: EventOutcome = "info"


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """Which version of a service is wanted, and how far its rollout has come."""

    version: str | None
    """The version of new replicas; None = not known."""
    offered: str | None
    """The version that the files and the image define; None = the image is not on this machine."""
    state: ServiceRollout = field(default_factory=ServiceRollout)
    ready: int = 0
    """Ready replicas of the version that is being rolled out, else of `version`."""
    message: str = ""
    changes: tuple[str, ...] = ()
    """The differences between `offered` and the stable version."""


@dataclass(frozen=True, slots=True)
class UserConfigStatus:
    """How far a service's user_config has come. Replicas are those that serve and have the wanted version."""

    value: Any
    """As in the compose files."""
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
    asleep: str = ""
    """Why it has no replica until its next request, if the load was not the reason; "" = it has, or the load was."""
    problem: str = ""
    """Why the policy gives no number, so that the target is held; "" when it gives one."""
