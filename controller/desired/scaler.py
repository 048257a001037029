"""Autoscales all services once a tick. Keeps the histories of loads and the targets, and records events."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ..errors import PolicyError
from ..model.observed import Observed
from ..model.phases import Phase, is_ready, staying
from ..model.reports import AutoscaleStatus
from ..model.spec import AutoscaleSpec, ServiceSpec
from ..model.world import ReplicaContainer
from ..storage.events import EventLog
from ..storage.store import StateStore
from .autoscale import Decided, LoadHistory, PolicyAnswer, Situation, decide, due_in_s, longest_window_s, situation_of
from .loads import Uses, loads
from .policies import Ask

logger = logging.getLogger(__name__)

CALM_S = 60.0
"""A policy that has failed counts as working again after this time without a failure: one event, not one a tick."""


class Scaler:
    """Decides for every service with an `autoscale` block, unless an operator has set its number."""

    def __init__(self, store: StateStore, events: EventLog, ask: Ask) -> None:
        self._store = store
        self._events = events
        self._ask = ask
        self._failed_at: dict[str, float] = {}
        """By service: when its policy failed last. Policies that work are not in it."""
        self._histories: dict[str, LoadHistory] = {}
        self._uses = Uses()
        self._decided: dict[str, Decided] = {}
        self._asleep: dict[str, str] = {}
        """By service without a replica: why it was set to 0, if its load was not the reason."""
        self.rows: Mapping[str, AutoscaleStatus] = {}
        """The rows for the status, by service."""

    def targets(self, services: Mapping[str, ServiceSpec], observed: Observed, now: float) -> Mapping[str, int]:
        """Look at the loads and return the targets of the autoscaled services, paused ones included."""
        specs = {name: service.autoscale for name, service in services.items() if service.autoscale is not None}
        self._forget_others(specs)
        found, used = loads(specs, observed), self._uses.look(specs, observed)
        window_s = longest_window_s(list(specs.values()))
        rows = {}
        for name, spec in specs.items():
            history = self._histories.setdefault(name, LoadHistory())
            try:
                history.add(now, found[name], window_s)
                present = staying(services[name], observed, now)
                rows[name] = self._look(name, spec, present, history, now, used=name in used)
            except Exception as error:
                # A defect that one service's numbers trigger must not stop the scaling and healing of the others.
                rows[name] = self._hold(name, spec, error, now)
        self.rows = rows
        return {name: self._decided[name].target for name in specs}

    def _look(
        self,
        name: str,
        spec: AutoscaleSpec,
        present: Sequence[tuple[ReplicaContainer, Phase]],
        history: LoadHistory,
        now: float,
        *,
        used: bool,
    ) -> AutoscaleStatus:
        """Decide for one service."""
        paused = self._store.overrides.get(name)
        if paused is not None:
            self._settle(name, Decided(spec.clamp(paused.replicas)))
        before = self._begin(name, spec, present=len(present))
        ready = sum(is_ready(container, phase) for container, phase in present)
        situation = situation_of(spec, history, ready, before.target, now, before.measured_from, used=used)
        answer, problem = self._answer(name, situation)
        if paused is None:
            self._decide(name, before, situation, answer)
        return self._row(name, situation, answer, problem, paused=paused is not None)

    def _hold(self, name: str, spec: AutoscaleSpec, error: Exception, now: float) -> AutoscaleStatus:
        """After a defect: the target stays, reported like that of a policy without a number."""
        target = self._begin(name, spec, present=0).target
        words = f"internal: autoscaling raised {type(error).__name__}: {error}"
        if name not in self._failed_at:
            logger.error("internal: autoscaling of %s raised", name, exc_info=error)
            message = f"{name}: {target} replicas are held: {words}"
            self._events.record("policy_failed", message, service=name, outcome="warning")
        self._failed_at[name] = now
        before = self.rows.get(name)
        return AutoscaleStatus(
            spec.min,
            spec.max,
            target,
            before.load if before else 0.0,
            target,
            paused=name in self._store.overrides,
            problem=words,
        )

    def kept(self) -> Mapping[str, int]:
        """The targets decided so far, for ticks without a complete observation."""
        return {**self._store.autoscaled, **{name: decided.target for name, decided in self._decided.items()}}

    def sleep(self, name: str, why: str) -> None:
        """Want no replica of a service until its next request."""
        before = self._decided.get(name)
        if before is None or not before.target:
            return
        message = f"{name}: {before.target} -> 0 replicas: {why}"
        self._events.record("autoscale", message, service=name, outcome="ok")
        self._asleep[name] = why
        self._histories.pop(name, None)  # requests that it has finished are no reason to start it again
        self._settle(name, Decided(0))

    def due_in_s(self, services: Mapping[str, ServiceSpec], now: float) -> float | None:
        """Seconds until the next decision that only time triggers; None when there is none."""
        dues = [
            due_in_s(decided, spec, now)
            for name, decided in self._decided.items()
            if name in services and (spec := services[name].autoscale) is not None
        ]
        return min((due for due in dues if due is not None), default=None)

    def _begin(self, name: str, spec: AutoscaleSpec, *, present: int) -> Decided:
        if name not in self._decided:
            kept = self._store.autoscaled.get(name)
            # A service whose number was fixed until now keeps its replicas until their load is known.
            first = kept if kept is not None else present or spec.first
            self._settle(name, Decided(spec.clamp(first)))
        return self._decided[name]

    def _answer(self, name: str, situation: Situation) -> tuple[PolicyAnswer, str]:
        """The policy's answer; or the present target, and why the policy has none."""
        failed_at = self._failed_at.get(name)
        try:
            answer = self._ask(name, situation)
        except PolicyError as error:
            if failed_at is None:
                message = (
                    f"{name}: the autoscaling policy gives no number, so {situation.target} replicas are held: {error}"
                )
                self._events.record("policy_failed", message, service=name, outcome="warning")
            self._failed_at[name] = situation.now
            return PolicyAnswer(situation.target, "held"), str(error)
        if failed_at is not None and not 0 <= situation.now - failed_at < CALM_S:
            del self._failed_at[name]
            self._events.record(
                "policy_works", f"{name}: the autoscaling policy gives a number again", service=name, outcome="ok"
            )
        return answer, ""

    def _decide(self, name: str, before: Decided, situation: Situation, answer: PolicyAnswer) -> None:
        decided, why = decide(before, situation, answer)
        if why:
            message = f"{name}: {before.target} -> {decided.target} replicas: {why}"
            self._events.record("autoscale", message, service=name, outcome="ok")
        self._settle(name, decided)

    def _settle(self, name: str, decided: Decided) -> None:
        self._decided[name] = decided
        if decided.target:
            self._asleep.pop(name, None)
        self._store.autoscaled.put(name, decided.target)

    def _row(
        self, name: str, situation: Situation, answer: PolicyAnswer, problem: str, *, paused: bool
    ) -> AutoscaleStatus:
        spec = situation.spec
        return AutoscaleStatus(
            spec.min,
            spec.max,
            self._decided[name].target,
            situation.load.total,
            spec.clamp(answer.wanted),
            paused=paused,
            basis="" if spec.policy is None else answer.because,
            asleep=self._asleep.get(name, ""),
            problem=problem,
        )

    def _forget_others(self, specs: Mapping[str, AutoscaleSpec]) -> None:
        for name in [name for name in self._decided if name not in specs]:
            del self._decided[name]
            self._histories.pop(name, None)
            self._failed_at.pop(name, None)
            self._asleep.pop(name, None)
        for name in [name for name in self._store.autoscaled if name not in specs]:
            self._store.autoscaled.drop(name)
