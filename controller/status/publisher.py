"""Publishes each tick's observations and decisions: the view behind the API, Discovery's lists, and events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace

from pierhead.discovery.served import DiscoveryState

from ..desired.deployer import Deployer
from ..desired.scaler import Scaler
from ..files.watch import SpecWatch
from ..model.desired import Desired
from ..model.observed import WorldSnapshot
from ..model.plan import Plan, Refusal
from ..observe.gpu_memory import GpuMemoryWatch
from ..plan.user_config import remembered
from ..storage.events import EventLog
from ..storage.store import StateStore
from .endpoints import endpoints, scrape_targets
from .metrics import ControllerMetrics
from .nodes import node_rows
from .services import service_rows
from .transitions import transitions
from .view import View, certificate_notices, gpu_uses, notices

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Publisher:
    """Owns the view. No decision reads it.

    `clock` never jumps. `wall` may jump; times for users and of the engine are in it.
    """

    _project: str
    _store: StateStore
    _events: EventLog
    _specs: SpecWatch
    _scaler: Scaler
    _deployer: Deployer
    _gpu_memory: GpuMemoryWatch
    _discovery_state: DiscoveryState
    _clock: Callable[[], float]
    _wall: Callable[[], float]
    _certificate_ends_at: float | None = None
    _client_certificates: Callable[[], Mapping[str, tuple[float, float]]] = dict
    """From when until when those of HAProxy are valid, by the names of their files."""
    _file_notices: Callable[[], tuple[str, ...]] = tuple

    def __post_init__(self) -> None:
        self._user_configs: Mapping[str, str] = {}
        self.metrics = ControllerMetrics(lambda: self.view)
        self.view = View(at=self._clock(), project=self._project, ahead_s=self._ahead_s())
        self.started_at = self._clock()
        self.last_tick_at: float | None = None
        self.store_trouble = ""
        """Why the state file cannot be written; "" when it can."""
        self.defect = ""
        """Why the last tick failed, in words; "" when it did not."""

    # ------------------------------------------------------------------------------------------------------ each tick

    def watch_store(self) -> None:
        """Retry failed writes of the state file, and record when its trouble begins and ends."""
        before = self.store_trouble
        if self._store.trouble:
            self._store.settle()
        self.store_trouble = self._store.trouble
        if self.store_trouble and not before:
            self._events.record("store_failing", self._store_notices()[0], target="store", outcome="warning")
        elif before and not self.store_trouble:
            self._events.record("store_works", "the state is written again", target="store", outcome="ok")

    def publish_without_spec(self, files: Hashable) -> None:
        """Publish a view without services, with the problems of the compose files."""
        self.view = View(
            self._clock(), self._project, spec_problems=self._specs.problems, files=files, ahead_s=self._ahead_s()
        )

    def publish(
        self,
        desired: Desired,
        snapshot: WorldSnapshot,
        plan: Plan,
        refusals: tuple[Refusal, ...],
        files: Hashable,
        now: float,
    ) -> None:
        """Publish what a tick observed and decided, and record events for the changes since the last tick."""
        specs = (*desired.services.values(), *(goal.keep_spec for goal in desired.goals.values()))
        self._user_configs = remembered(self._user_configs, specs)
        overrides = {service: override.replicas for service, override in self._store.overrides.items()}
        before, observed = self.view, snapshot.observed
        view = View(
            at=now,
            project=self._project,
            desired=desired,
            observed=observed,
            plan=plan,
            rollouts=self._deployer.directions.rows,
            gpu_memory_problem=self._gpu_memory.problem,
            spec_problems=self._specs.problems,
            files=files,
            notices=(
                *self._store_notices(),
                *notices(observed, refusals, snapshot.unseen, now),
                *certificate_notices(self._certificate_ends_at, self._wall()),
                *self._file_notices(),
            ),
            certificate_ends_at=self._certificate_ends_at,
            client_certificates=self._client_certificates(),
            refusals=refusals,
            engine_reachable=snapshot.complete,
            haproxy_reachable=observed.routing is not None,
            ahead_s=self._ahead_s(),
        )
        callers = self._discovery_state.callers()
        self.view = replace(
            view,
            services=service_rows(view, overrides, self._scaler.rows, self._user_configs, callers),
            gpus=gpu_uses(observed),
            nodes=node_rows(observed, plan),
            endpoints=endpoints(desired, observed, overrides),
            targets=scrape_targets(desired, observed),
        )
        if snapshot.complete or self._discovery_state.is_published:
            self._discovery_state.publish(self.view.endpoints)
        for change in transitions(before, self.view):
            self._events.record(
                change.kind, change.message, service=change.service, target=change.target, outcome=change.outcome
            )

    def tick_ended(self, took_s: float) -> None:
        """Count a tick that succeeded."""
        self.defect = ""
        self.last_tick_at = self._clock()
        self.metrics.tick(took_s)

    def tick_failed(self, error: Exception, took_s: float) -> None:
        """Add the error to the last view's notices. Its traceback is logged once, not at every tick."""
        message = f"internal: a tick raised {type(error).__name__}: {error}; nothing is done until this is over"
        others = tuple(notice for notice in self.view.notices if notice != self.defect)
        if message != self.defect:
            logger.error("internal: a tick raised", exc_info=error)
        self.defect = message
        self.view = replace(self.view, notices=(message, *others))
        self._events.record("tick_failed", message, outcome="failed")
        self.metrics.tick_failed()
        self.metrics.tick(took_s)

    def _ahead_s(self) -> float:
        """Seconds by which the wall clock is ahead of the controller's clock."""
        return self._wall() - self._clock()

    def _store_notices(self) -> tuple[str, ...]:
        if not self.store_trouble:
            return ()
        return (f"no state can be saved, a restarted controller would lose the latest changes: {self.store_trouble}",)
