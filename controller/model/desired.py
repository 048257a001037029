from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from .observed import Observed
from .spec import ServiceSpec
from .world import current_version


@dataclass(frozen=True, slots=True)
class VersionGoal:
    """Which version of a service there shall be now; with `keep`, on trial beside the version that works."""

    version: str | None
    """What new replicas are made as; None: the image is not on this machine."""
    spec: ServiceSpec | None = None
    """How that version is made; None = not known: its replicas stay, none can be added."""
    keep: str | None = None
    """The version that serves until `version` has proved itself."""
    keep_spec: ServiceSpec | None = None
    """How `keep` is made; None = not known, so none of its replicas can be replaced."""
    weight: int | None = None
    """Per cent of the requests for `version` while `keep` serves, too; None = by number of replicas."""
    goes_back: bool = False
    """Replicas of other versions are removed as far as `version` needs their place, whatever max_unavailable says; the
    last one only where that is not 0."""


@dataclass(frozen=True, slots=True)
class Desired:
    """Spec plus scale overrides plus rollouts: how many replicas of which version each service shall have now."""

    project: str
    services: Mapping[str, ServiceSpec] = field(default_factory=dict)
    """As the compose files say, or as an earlier version was made where that one is to stay; its probe, its
    max_ongoing_requests and its request_timeout_s are what HAProxy is to use now (controller/desired/edge.py).
    """
    targets: Mapping[str, int] = field(default_factory=dict)
    goals: Mapping[str, VersionGoal] = field(default_factory=dict)
    """By service; a service without a goal takes the version of its spec and image."""
    switched_off: frozenset[str] = frozenset()
    """Services that stay at 0 replicas until an operator or the files change that: no request wakes them."""
    routing_hash: str = ""
    """Of the HAProxy configuration these services need; "" = not to be compared."""
    router_silence_s: float = 10.0
    """How long HAProxy may hang before it is restarted; twice as long after each restart that did not help."""


@dataclass(frozen=True, slots=True)
class Revision:
    """How a version of a service is made: `spec` is JSON that controller/desired/revisions.py writes and reads."""

    service: str
    version: str
    first_at: float
    image: str
    image_id: str
    spec: str


class RolloutPhase(enum.StrEnum):
    """See the drawing in controller/desired/rollout.py."""

    WAITING = "WAITING"
    STARTING = "STARTING"
    BAKING = "BAKING"
    ROLLING = "ROLLING"
    SETTLING = "SETTLING"
    ROLLING_BACK = "ROLLING_BACK"


@dataclass(frozen=True, slots=True)
class Rollout:
    """A change of version that is going on."""

    source: str | None
    to: str
    phase: RolloutPhase
    since: float
    """When the phase began."""
    begun_at: float
    cause: str
    stuck_since: float | None = None
    """Since when the next replica has had no place and no draining replica will leave one, or since when HAProxy has
    not sent requests to every ready replica."""
    is_return: bool = False
    """To an earlier version that an operator asked for: it has proved itself, so it does not bake."""
    excused: int = 0
    """Failures in a row of `to` that do not count against it: replicas of other versions failed at the same time, or no
    replica of `to` had been ready yet."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A version of the files that runs only if an operator asks for it; another version of the files ends this."""

    version: str
    reason: str
    at: float
    is_asked: bool = False
    """An operator decided it: nothing has failed."""


@dataclass(frozen=True, slots=True)
class ServiceRollout:
    """Where a service stands between its versions. Kept in the store: it cannot be read back from the world."""

    stable: str | None = None
    """The version that has proved itself; None before the first one has."""
    rollout: Rollout | None = None
    rejected: Rejection | None = None
    previous: tuple[str, ...] = ()
    """Versions that were stable before, the newest first."""
    approved: str | None = None
    """The version that `pierhead deploy` asked for, where new versions wait for it."""
    is_unproven: bool = False
    """`stable` was taken while no replica was there, so none of it has ever been ready."""
    tried_since: float | None = None
    """Since when replicas of an unproven `stable` are wanted; None while none are."""

    def rejection_of(self, version: str | None) -> Rejection | None:
        """Why a version is not tried again by itself; None when it may be."""
        return self.rejected if self.rejected is not None and self.rejected.version == version else None


def goal_of(desired: Desired, observed: Observed, service: str) -> VersionGoal:
    """Which version of a service there shall be now."""
    goal = desired.goals.get(service)
    if goal is not None:
        return goal
    spec = desired.services.get(service)
    return VersionGoal(current_version(spec, observed.images) if spec else None, spec)
