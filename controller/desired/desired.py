"""The desired state: from the compose files, the operators' requests, the autoscaler's decisions and the rollouts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from ..model.desired import Desired
from ..model.observed import Observed, WorldSnapshot
from ..model.plan import Plan, Refusal
from ..model.spec import ServiceSpec, Spec
from ..model.world import FailureKey
from ..storage.events import EventLog
from ..storage.store import Override, StateStore
from .demands import Demands
from .deployer import Deployer, or_later
from .edge import edge_spec
from .keys import KeysInForce
from .remaining import RemainingServices
from .scaler import Scaler
from .targets import switched_off, targets_of, together

RoutingHash = Callable[[Collection[ServiceSpec]], str]
"""Hash of HAProxy's configuration for these services. Raises RoutingError."""
ObsoleteFailures = Callable[[Desired, Observed, float], Iterable[FailureKey]]
"""The failure records that no longer apply, from the desired and the observed state."""


@dataclass(eq=False)
class Desirer:
    """Computes the desired state once a tick. Without a complete observation, earlier decisions are kept."""

    _store: StateStore
    _events: EventLog
    _scaler: Scaler
    _deployer: Deployer
    _remaining: RemainingServices
    _keys: KeysInForce
    _routing_hash: RoutingHash
    _obsolete_failures: ObsoleteFailures
    _router_silence_s: float
    _demands: Demands = field(default_factory=Demands)

    def desire(self, snapshot: WorldSnapshot, previous: Plan, refusals: tuple[Refusal, ...], now: float) -> Desired:
        """Return the desired state. `previous`: the last plan. `refusals`: failed actions in their backoff."""
        remaining = self._remaining.look(snapshot.spec, snapshot.observed, now)
        spec, observed = remaining.with_files(snapshot.spec), remaining.with_images(snapshot.observed)
        self._drop_outdated_overrides(spec)
        overrides = {service: override.replicas for service, override in self._store.overrides.items()}
        for name, why in previous.gives_way.items():
            self._scaler.sleep(name, why)
        autoscaled = self._scaler.targets(spec.services, observed, now) if snapshot.complete else self._scaler.kept()
        demands = (
            self._demands.look(spec.services, overrides, observed, now) if snapshot.complete else self._demands.now
        )
        targets = together(spec.services, targets_of(spec, overrides, autoscaled), demands)
        directions = self._deployer.directions
        if snapshot.complete:
            directions = self._deployer.look(spec, observed, targets, refusals, now, previous.pending)
        services = {
            name: edge_spec(directions.services.get(name, service), observed, directions.made.get(name, {}))
            for name, service in spec.services.items()
        }
        desired = Desired(
            project=spec.project,
            services=services,
            targets=targets,
            goals={name: goal for name, goal in directions.goals.items() if name in services},
            switched_off=switched_off(spec.services, targets, overrides),
            keys=self._keys.now(services.values()),
            barred=directions.barred,
            remaining=remaining.callers,
            routing_hash=self._routing_hash(services.values()),
            demands=demands,
            router_silence_s=self._router_silence_s,
        )
        for key in self._obsolete_failures(desired, observed, now):
            self._store.failures.drop(key)
        return desired

    def due_in_s(self, snapshot: WorldSnapshot, now: float) -> float | None:
        """Seconds until the next decision that only time triggers; None when there is none."""
        return self._scaler.due_in_s(snapshot.spec.services, now) if snapshot.complete else None

    def _drop_outdated_overrides(self, spec: Spec) -> None:
        """Drop each number set by scale whose service, or whose number in the compose files, was edited afterwards."""
        for name, override in dict(self._store.overrides).items():
            service = spec.services.get(name)
            if service is None:
                self._drop_override(name, override, f"the compose files no longer have {name}")
            elif service.replicas != override.spec_replicas:
                self._drop_override(name, override, f"the compose files now say {service.replicas} replicas")

    def _drop_override(self, service: str, override: Override, why: str) -> None:
        with or_later("a scale target was kept"):
            self._store.overrides.drop(service)
            message = f"{service}: {why}; the number set by scale, {override.replicas}, no longer applies"
            self._events.record("scale", message, service=service)
