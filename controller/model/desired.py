from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from .keys import NO_KEYS, KeySet
from .observed import Observed
from .spec import ServiceSpec
from .world import FailureKey, current_version


@dataclass(frozen=True, slots=True)
class VersionGoal:
    """The version that a service should have now; with `keep`, it is on trial while the former version serves."""

    version: str | None
    """The version of new replicas; None: the image is not on this machine."""
    spec: ServiceSpec | None = None
    """The definition of that version; None = not known: its replicas stay, none can be added."""
    keep: str | None = None
    """The version that serves until `version` has proved itself."""
    keep_spec: ServiceSpec | None = None
    """The definition of `keep`; None = not known, so none of its replicas can be replaced."""
    weight: int | None = None
    """Per cent of the requests for `version` while `keep` serves, too; None = by number of replicas."""
    goes_back: bool = False
    """Replicas of other versions are removed as far as `version` needs their GPUs, even beyond max_unavailable; the
    last one only where max_unavailable is not 0."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The requests of a service that takes turns on GPUs."""

    used_at: float
    """When it last had one."""
    waiting: int = 0
    """How many wait while it has no replica."""
    waiting_since: float | None = None
    """Since when there have been such requests without a break."""


@dataclass(frozen=True, slots=True)
class Desired:
    """Spec plus scale overrides plus rollouts: how many replicas of which version each service should have now."""

    project: str
    services: Mapping[str, ServiceSpec] = field(default_factory=dict)
    """By the compose files, or by the record of an earlier version that is to stay. Its probe, max_ongoing_requests and
    request_timeout_s are those that HAProxy shall use now (controller/desired/edge.py).
    """
    targets: Mapping[str, int] = field(default_factory=dict)
    goals: Mapping[str, VersionGoal] = field(default_factory=dict)
    """By service; a service without a goal takes the version of its spec and image."""
    switched_off: frozenset[str] = frozenset()
    """Services that stay at 0 replicas until an operator or the files change that: no request wakes them."""
    routing_hash: str = ""
    """Hash of the HAProxy configuration that these services need; "" = do not compare."""
    keys: KeySet = NO_KEYS
    """The clients' keys in force; without a digest, as no service asks for one: do not compare."""
    barred: Mapping[FailureKey, str] = field(default_factory=dict)
    """Versions whose replicas get no request, by service and version, and why: their contract is incompatible with
    that of the version that serves, or was not compared yet."""
    remaining: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Services that the compose files no longer have and that stay: by name, the services whose replicas call each."""
    demands: Mapping[str, Demand] = field(default_factory=dict)
    """By service, for those that give way on GPUs (x-serve.gpu.yields); not while an operator has set a number."""
    router_silence_s: float = 10.0
    """How long HAProxy may hang before it is restarted; twice as long after each restart that did not help."""


@dataclass(frozen=True, slots=True)
class Revision:
    """The record of a service's version; `spec` is JSON that controller/desired/revisions.py writes and reads."""

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
    """A change of version in progress."""

    source: str | None
    to: str
    phase: RolloutPhase
    since: float
    """When the phase began."""
    begun_at: float
    cause: str
    stuck_since: float | None = None
    """Since when the rollout is stuck: the next replica has no place and no draining replica will free one, or HAProxy
    does not send requests to every ready replica."""
    is_return: bool = False
    """An operator asked for this earlier version. It has worked before, so it does not bake."""
    excused: int = 0
    """Failures in a row of `to` that do not count against it: replicas of other versions failed at the same time, or no
    replica of `to` had been ready yet."""
    is_refused: bool = False
    """It goes back because the contracts of `source` and `to` are incompatible."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A version of the files that runs only if an operator asks for it, until the files give another version."""

    version: str
    reason: str
    at: float
    is_asked: bool = False
    """An operator rejected it: it has not failed."""
    is_refused: bool = False
    """Its contract is incompatible with that of the running version: it has not served."""


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
    unwatched: str | None = None
    """The version that `pierhead deploy --now` asked for: it does not bake."""
    is_unproven: bool = False
    """`stable` was adopted while the service had no replica, so no replica of it has been ready yet."""
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
