"""What there shall be: the compose files, what operators asked for, what the autoscaler decided, and rollouts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from ..errors import StoreError
from ..model.desired import Desired
from ..model.observed import Observed, Sight
from ..model.plan import PendingReplica, Refusal
from ..model.spec import ServiceSpec, Spec
from ..model.world import FailureKey
from ..storage.events import EventLog
from ..storage.store import Override, Store
from .deployer import Deployer
from .edge import edge_spec
from .functions import FunctionCalls
from .measurements import Measurements
from .scaler import Scaler
from .targets import switched_off, targets_of

logger = logging.getLogger(__name__)

RoutingHash = Callable[[Collection[ServiceSpec]], str]
"""Hash of what HAProxy's configuration says of these services. Raises RoutingError."""
Forgiven = Callable[[Desired, Observed, float], Iterable[FailureKey]]
"""Failure records that are over, by what there shall be and what there is now."""


class Desirer:
    """Puts together what there shall be, once a tick. From a world that is not seen it concludes nothing new."""

    def __init__(
        self,
        store: Store,
        events: EventLog,
        scaler: Scaler,
        deployer: Deployer,
        measurements: Measurements,
        calls: FunctionCalls,
        routing_hash: RoutingHash,
        forgiven: Forgiven,
    ) -> None:
        self._store = store
        self._events = events
        self._scaler = scaler
        self._deployer = deployer
        self._measurements = measurements
        self._calls = calls
        self._routing_hash = routing_hash
        self._forgiven = forgiven

    def desire(
        self, sight: Sight, pending: Iterable[PendingReplica], refusals: tuple[Refusal, ...], now: float
    ) -> Desired:
        """Return what there shall be now.

        `pending`: what the previous plan could not start. `refusals`: actions that failed and wait for their next try.
        """
        spec = sight.spec
        self._drop_outdated_overrides(spec)
        self._measurements.sync(spec.services)
        self._calls.sync(spec.services)
        overrides = {service: override.replicas for service, override in self._store.overrides.items()}
        autoscaled = self._scaler.targets(spec.services, sight.observed, now) if sight.complete else self._scaler.kept()
        targets = targets_of(spec, overrides, autoscaled)
        directions = self._deployer.directions
        if sight.complete:
            directions = self._deployer.look(spec, sight.observed, targets, refusals, now, pending)
        services = {
            name: edge_spec(directions.services.get(name, service), sight.observed, directions.made.get(name, {}))
            for name, service in spec.services.items()
        }
        desired = Desired(
            project=spec.project,
            services=services,
            targets=targets,
            goals={name: goal for name, goal in directions.goals.items() if name in services},
            switched_off=switched_off(spec.services, targets, overrides),
            routing_hash=self._routing_hash(services.values()),
        )
        self._forgive(desired, sight.observed, now)
        return desired

    def due_in_s(self, sight: Sight, now: float) -> float | None:
        """Seconds until a decision is due that no event announces; None when there is none."""
        return self._scaler.due_in_s(sight.spec.services, now) if sight.complete else None

    def _drop_outdated_overrides(self, spec: Spec) -> None:
        """A number in the compose files that was edited after the scale call replaces it: the last word counts."""
        for name, override in dict(self._store.overrides).items():
            service = spec.services.get(name)
            if service is None:
                self._drop_override(name, override, f"the compose files no longer have {name}")
            elif service.replicas != override.spec_replicas:
                self._drop_override(name, override, f"the compose files now say {service.replicas} replicas")

    def _drop_override(self, service: str, override: Override, why: str) -> None:
        try:
            self._store.drop_override(service)
        except StoreError as error:
            logger.error("a scale target was kept: %s", error)  # noqa: TRY400 - the next tick tries again
            return
        message = f"{service}: {why}; the {override.replicas} set by scale end"
        self._events.record("scale", message, service=service)

    def _forgive(self, desired: Desired, observed: Observed, now: float) -> None:
        """Clear the failure records that are over."""
        for key in self._forgiven(desired, observed, now):
            self._store.clear_failure(key)
