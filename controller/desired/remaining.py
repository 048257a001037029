"""Services that the compose files no longer have, and that stay because running replicas still call them.

A service that is renamed, or that its callers do without from now on, leaves the files in the moment in which its
callers get a new version there. Until the last replica of their former version is gone, requests need it. What each
replica calls is known by what it watches in Discovery. Such a service has no route any more, and gets no new version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..model.desired import Revision, ServiceRollout
from ..model.observed import Observed
from ..model.spec import ServiceSpec, Spec
from .deployer import Callers, calls_of, goes_before
from .revisions import made_as, written

AWAY_S = 15.0
"""The longest time in which a running caller has no watch: after a start of the controller, or between two watches."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """The services of one look that stay, and the services that call each of them."""

    services: Mapping[str, ServiceSpec] = field(default_factory=dict)
    callers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def with_files(self, spec: Spec) -> Spec:
        """The spec of the files, and these services."""
        return replace(spec, services={**spec.services, **self.services}) if self.services else spec

    def with_images(self, observed: Observed) -> Observed:
        """The snapshot, in which the images of these services are there: their replicas run."""
        if not self.services:
            return observed
        return replace(observed, images={**observed.images, **{one.image: one.image for one in self.services.values()}})


@dataclass(eq=False)
class RemainingServices:
    """Finds them in each look."""

    _revisions: Mapping[tuple[str, str], Revision]
    _state: Callable[[str], ServiceRollout]
    _callers: Callers

    def __post_init__(self) -> None:
        self._known: dict[str, ServiceSpec] | None = None
        """As the files had them last; None before the first look."""
        self._called_at: dict[str, float] = {}

    def look(self, spec: Spec, observed: Observed, now: float) -> Remaining:
        """Return what stays at time `now`."""
        gone = observed.services - spec.services.keys()
        if self._known is None:  # their callers may not have reached this controller yet
            self._known, self._called_at = {}, dict.fromkeys(gone, now)
        self._known = {name: known for name, known in self._known.items() if name in gone} | dict(spec.services)
        if not gone:
            return Remaining()
        direct = calls_of((one for one in observed.containers if one.state.is_up), self._callers())
        callers = {name: _callers_of(name, spec, direct) for name in gone}
        self._called_at = {
            name: now if callers[name] else self._called_at[name]
            for name in gone
            if callers[name] or now - self._called_at.get(name, now - AWAY_S) < AWAY_S
        }
        made = {name: self._made(name) for name in sorted(self._called_at)}
        kept = {name: service for name, service in made.items() if service is not None}
        return Remaining(kept, {name: callers[name] for name in kept})

    def _made(self, name: str) -> ServiceSpec | None:
        """The service in its proven version; None where no record says how that is made."""
        revision = self._revisions.get((name, self._state(name).stable or ""))
        former = (self._known or {}).get(name) or (written(revision) if revision else None)
        made = made_as(former, revision) if revision and former else None
        if revision is None or made is None:
            return None
        return replace(made, image=revision.image_id, has_build=False, route=None, grpc_services=())


def _callers_of(name: str, spec: Spec, direct: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    """The services whose replicas keep a service there. Of two that have left the files and call each other, one does
    not keep the other.
    """
    return tuple(
        caller
        for caller in sorted(direct)
        if name in direct[caller] - {caller} and (caller in spec.services or name in goes_before(caller, direct))
    )
