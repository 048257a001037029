"""Runs the rollouts of all services: feeds each state machine, keeps versions and states in the store, records events.

look()      once a tick: what is offered, what runs, what failed -> each service's state machine -> goals
deploy(), roll_back(), abort(), promote()      requests of operators, between ticks
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import InvalidRequest, StoreError
from ..model.actions import BeginRetirement, CreateContainer, RemoveContainer
from ..model.desired import Revision, RolloutPhase, ServiceRollout, VersionGoal
from ..model.observed import Observed
from ..model.phases import gets_traffic, is_ready, staying
from ..model.plan import PendingReplica, Refusal
from ..model.reports import RolloutStatus
from ..model.spec import ServiceSpec, Spec
from ..model.world import FailureKey, FailureRecord, ReplicaContainer, current_version
from ..storage.events import EventLog
from ..storage.store import StateStore
from . import rollout as machine
from .answers import Answers
from .contracts import ContractOf, Contracts
from .revisions import differences, made_as, recorded, state_of, state_text, written
from .rollout import Count, RolloutFacts, Rules, rollout_words

logger = logging.getLogger(__name__)

REVISIONS_KEPT = 10
"""Versions of a service that a rollback can restore."""

REFUSED_FOR_S = 30.0
"""How long the engine must have refused a version's container before the refusals count as failures of the version.
Three tries take two seconds. An engine that is busy or restarts needs longer to recover, and a rejection stays until
an operator asks for the version again."""

UNTRIED = "not tried yet, as no replica is wanted now: it will be when the service wakes"
"""The message for a version that is adopted while its service is scaled to zero."""

TOGETHER_S = 5.0
"""Replicas that exit by themselves within this time of each other may have a common cause: a restart of the engine, a
machine without free memory."""

Callers = Callable[[], Mapping[str, frozenset[str]]]
"""The services that each caller watches, by the caller's name: a replica, or another program."""


@contextlib.contextmanager
def or_later(what: str) -> Iterator[None]:
    """Change what is stored; where it cannot be, the next tick tries again."""
    try:
        yield
    except StoreError as error:
        logger.error("%s: %s", what, error)  # noqa: TRY400 - it has no other cause than the store


@dataclass(frozen=True, slots=True)
class Directions:
    """The results of the rollouts, for every service."""

    services: Mapping[str, ServiceSpec] = field(default_factory=dict)
    goals: Mapping[str, VersionGoal] = field(default_factory=dict)
    rows: Mapping[str, RolloutStatus] = field(default_factory=dict)
    made: Mapping[str, Mapping[str, ServiceSpec]] = field(default_factory=dict)
    """By service and version, for versions with replicas: the spec of the version, where that is known."""
    barred: Mapping[FailureKey, str] = field(default_factory=dict)
    """As in `Desired`."""


@dataclass(frozen=True, slots=True)
class _Look:
    """The input of one tick."""

    spec: Spec
    observed: Observed
    targets: Mapping[str, int]
    refusals: tuple[Refusal, ...]
    callees: Mapping[str, frozenset[str]]
    order: Mapping[str, frozenset[str]]
    """By service, those that change before it."""
    now: float
    pending: tuple[PendingReplica, ...]
    counts: Mapping[str, Mapping[str, Count]]
    """By service and version: its replicas that are not retiring."""

    def offered(self, name: str) -> str | None:
        return current_version(self.spec.services[name], self.observed.images)


@dataclass(eq=False)
class Deployer:
    """Owns the rollout states of all services. The loop's thread only."""

    _store: StateStore
    _events: EventLog
    _callers: Callers
    _contract_of: ContractOf
    _is_manual: bool = False
    """New versions wait for `deploy`."""

    def __post_init__(self) -> None:
        self._states = {service: state_of(text) for service, text in self._store.rollouts.items()}
        self._answers: dict[str, Answers] = {}
        self._offered: dict[str, str | None] = {}
        self._absent: frozenset[str] = frozenset()
        """Services without a replica that stays, as of the latest tick."""
        self._asleep: frozenset[str] = frozenset()
        """Services without any replica that also want none."""
        self._ended: dict[str, tuple[FailureKey, float]] = {}
        """By container id, replicas that have just exited by themselves: service and version, and when last seen. By
        node, edges that are away there, without a service."""
        self._user_configs: dict[tuple[str, str], str] = {}
        """By service and version: the user_config that is known to be recorded."""
        self.directions = Directions()

    # -------------------------------------------------------------------------------------------------------- a look

    def look(
        self,
        spec: Spec,
        observed: Observed,
        targets: Mapping[str, int],
        refusals: Iterable[Refusal],
        now: float,
        pending: Iterable[PendingReplica] = (),
    ) -> Directions:
        """Advance every service's rollout by the current observation, and return the versions that are wanted.

        `pending`: replicas that the latest plan could not start.
        """
        callees = self._callees(spec, observed)
        counts = {name: _counts(service, observed, now) for name, service in spec.services.items()}
        order = order_of(spec.services, callees, observed.containers)
        look = _Look(spec, observed, targets, tuple(refusals), callees, order, now, tuple(pending), counts)
        self._offered = {name: look.offered(name) for name in spec.services}
        self._absent = frozenset(name for name in spec.services if not look.counts[name])
        wanted = {name for name in spec.services if targets.get(name)}
        self._asleep = (
            self._absent
            - wanted
            - {container.service for container in observed.containers if container.id not in observed.asleep}
        )
        self._ended = {
            container_id: (key, at) for container_id, (key, at) in self._ended.items() if now - at < TOGETHER_S
        } | {container_id: (key, now) for container_id, key in _ended(observed).items()}
        self._forget_others(spec)
        services, goals, rows, made = {}, {}, {}, {}
        barred: dict[FailureKey, str] = {}
        for name, service in spec.services.items():
            self._record(service, look)
            facts, rules = self._facts(name, look), Rules(service.rollout, service.startup_deadline_s, self._is_manual)
            before = self.state(name)
            state, notes = machine.advance(before, facts, rules, now)
            if not self._settle(name, state):
                state, notes = before, ()
            for note in notes:
                self._events.record(note.kind, f"{name}: {note.message}", service=name, outcome=note.outcome)
            services[name], goals[name] = self._direction(service, state)
            rows[name] = self._row(name, state, facts, rules, now)
            made[name] = self._made(service, observed)
            barred |= {(name, version): why for version, why in machine.barred(state, facts, rules).items()}
        self.directions = Directions(services, goals, rows, made, barred)
        return self.directions

    def _facts(self, name: str, look: _Look) -> RolloutFacts:
        state = self.state(name)
        counts = look.counts[name]
        contracts, is_reading = self._contracts(look.spec.services[name], state, look)
        unread = "the contract of its image is being read" if is_reading else ""
        # Refusals from before the rollout, or the first try of a version that was taken without one, do not count.
        begun_at = state.rollout.begun_at if state.rollout else state.tried_since
        return RolloutFacts(
            target=look.targets.get(name, look.spec.services[name].replicas),
            offered=self._offered[name],
            counts=counts,
            failures=_failures(name, look.observed, look.refusals, begun_at or -math.inf, look.now),
            tallies=self._tallies(name, state, look.observed),
            waits_for=self._waits_for(name, state, look) or unread,
            no_place=_no_place(name, state, look),
            contracts=contracts,
            is_shared=self._is_shared(name, state, counts),
        )

    def _contracts(
        self, service: ServiceSpec, state: ServiceRollout, look: _Look
    ) -> tuple[dict[str, str | None], bool]:
        """(Facts.contracts, whether an image is being read for it)."""
        name, counts = service.name, look.counts[service.name]
        given = (self._offered[name], state.rollout.to if state.rollout else None)
        following = {version for version in given if version is not None} - {state.stable}
        others = {version for version, count in counts.items() if count.present}
        if not service.managed or service.rollout.incompatible == "allow" or not following or not others:
            return {}, False
        mine = look.observed.containers_of(name)
        told = {one.version: one.contract for one in mine if one.contract is not None}
        records = {version: self._store.revisions.get((name, version)) for version in following | others}
        contracts = Contracts(name, told, records, self._contract_of)
        found = {each: contracts.why_not(each, others - {each}) for each in sorted(following) if others - {each}}
        return found, contracts.is_reading

    def _is_shared(self, name: str, state: ServiceRollout, counts: Mapping[str, Count]) -> bool:
        """Whether other replicas exited together with those of the version that is rolled out (Facts.is_shared)."""
        if state.rollout is None:
            return False
        keys = [key for key, _ in self._ended.values()]
        if any(key != (name, state.rollout.to) for key in keys):
            return True
        return len(keys) > 1 and not counts.get(state.stable or "", Count()).present

    def _tallies(self, name: str, state: ServiceRollout, observed: Observed) -> Mapping[str, machine.AnswerTally]:
        rollout = state.rollout
        if rollout is None or rollout.phase not in machine.ROLLING_FORWARD:
            self._answers.pop(name, None)
            return {}
        book = self._answers.get(name)
        if book is None or (book.to, book.begun_at) != (rollout.to, rollout.begun_at):
            book = self._answers[name] = Answers(rollout.to, rollout.begun_at)
        book.look(observed.containers_of(name), observed)
        return {version: book.of(version) for version in book.versions()}

    def _waits_for(self, name: str, state: ServiceRollout, look: _Look) -> str:
        """Why a rollout of this service may not begin yet, in words; "" when it may."""
        begun_at = state.rollout.begun_at if state.rollout else None
        callees = all_callees(name, look.callees)
        for first in goes_before(name, look.order):
            is_callee = first in callees
            if is_callee and self._changes_with(name, first, look.spec):
                continue
            theirs, offered = self.state(first), self._offered.get(first)
            who = f"{first}, which it calls," if is_callee else first
            if not is_callee and name in look.callees[first]:
                who = f"{first}, which calls it at its port,"
            if theirs.rollout is not None:
                return f"{who} goes first: {theirs.rollout.phase.value} {theirs.rollout.to}"
            rejected = theirs.rejection_of(offered)
            if rejected is not None:
                is_asked = state.approved is not None and state.approved == self._offered.get(name)
                # A caller that has no sockets fails for sure; a callee that was rolled back before may do without.
                if (begun_at is not None and rejected.at > begun_at) or not (is_callee or is_asked):
                    return (
                        f"the new version of {who} was rolled back; it waits for the next version of {first}, or for "
                        f"`pierhead deploy {name}`"
                    )
            elif (
                theirs.stable is not None
                and offered not in (None, theirs.stable)
                and not self._is_manual
                and first not in self._absent  # without replicas it takes the new version at once
            ):
                return f"{who} goes first: {offered}"
        return ""

    def _changes_with(self, name: str, callee: str, spec: Spec) -> bool:
        """Whether both change at the same time: by `deploy --now`, to an image of both that has the contract of the one
        before.
        """
        pair, state = (name, callee), self.state(name)
        offered = [self._offered[one] for one in pair]
        are_asked = None not in offered and offered == [self.state(one).unwatched for one in pair]
        if not are_asked or spec.services[name].image != spec.services[callee].image:
            return False
        records = [self._store.revisions.get((name, version or "")) for version in (state.stable, offered[0])]
        before, after = (self._contract_of(record.image_id) if record else None for record in records)
        return bool(before) and before == after

    def _callees(self, spec: Spec, observed: Observed) -> Mapping[str, frozenset[str]]:
        """The callees of each service: those in the files, and those that its running replicas watch."""
        watched, known = calls_of(observed.containers, self._callers()), spec.services.keys()
        return {
            name: (watched.get(name, frozenset()).union(service.callees) & known) - {name}
            for name, service in spec.services.items()
        }

    # ------------------------------------------------------------------------------------------------- its consequences

    def _direction(self, service: ServiceSpec, state: ServiceRollout) -> tuple[ServiceSpec, VersionGoal]:
        """The spec that new replicas are made from, and the wanted versions."""
        offered = self._offered[service.name]
        version, keep = machine.goal_version(state, offered)
        made = self._made_as(service, version)
        keep_spec = self._made_as(service, keep) if keep else None
        goal = VersionGoal(
            version=version,
            spec=made,
            keep=keep,
            keep_spec=keep_spec,
            weight=service.rollout.canary_weight if keep else None,
            goes_back=state.rollout is not None and state.rollout.phase is RolloutPhase.ROLLING_BACK,
        )
        return made or service, goal

    def _made(self, service: ServiceSpec, observed: Observed) -> Mapping[str, ServiceSpec]:
        there = {container.version for container in observed.containers_of(service.name)}
        return {version: made for version in there if (made := self._made_as(service, version)) is not None}

    def _made_as(self, service: ServiceSpec, version: str | None) -> ServiceSpec | None:
        if version == self._offered[service.name]:
            return service
        revision = self._store.revisions.get((service.name, version or ""))
        return made_as(service, revision) if revision else None

    def _row(self, name: str, state: ServiceRollout, facts: RolloutFacts, rules: Rules, now: float) -> RolloutStatus:
        version, _ = machine.goal_version(state, facts.offered)
        return RolloutStatus(
            version=version,
            offered=facts.offered,
            state=state,
            ready=facts.ready(state.rollout.to) if state.rollout else facts.ready(version),
            message=rollout_words(name, state, facts, rules, now),
            changes=self._changes(name, state.stable, facts.offered),
        )

    def _changes(self, name: str, stable: str | None, offered: str | None) -> tuple[str, ...]:
        if stable is None or offered is None or stable == offered:
            return ()
        then, now = (self._store.revisions.get((name, version)) for version in (stable, offered))
        if then is None or now is None:
            return ()
        before, after = written(then), written(now)
        return differences(before, after, then.image_id, now.image_id) if before and after else ()

    def _settle(self, name: str, state: ServiceRollout) -> bool:
        """Adopt a state. False if it cannot be stored: the next controller would not have it."""
        before = self._states.get(name)
        if before == state:
            return True
        with or_later("a rollout is blocked"):
            if state.rollout is not None and state.rollout.phase is not RolloutPhase.ROLLING_BACK:
                former = before.rollout.to if before and before.rollout else None
                if former != state.rollout.to:  # failures of an earlier rollout do not count
                    self._store.failures.drop((name, state.rollout.to))
            if before is not None and state.stable and state.stable != before.stable and state.is_unproven:
                self._store.failures.drop((name, state.stable))
            self._store.rollouts.put(name, state_text(state))
            self._states[name] = state
        return self._states.get(name) is state

    def _record(self, service: ServiceSpec, look: _Look) -> None:
        """Record the offered version, and drop the records of versions that are no longer needed."""
        version, image_id = self._offered[service.name], look.observed.images.get(service.image)
        if version is None or not image_id:
            return
        if (service.name, version) in self._store.revisions:
            self._record_user_config(service, version)
            return
        state = self.state(service.name)
        needed = {version, state.stable, *state.previous[:REVISIONS_KEPT]}
        needed |= {state.rollout.to, state.rollout.source} if state.rollout else set()
        needed |= {container.version for container in look.observed.containers_of(service.name)}
        with or_later("a version was not kept"):  # only a rollback needs it
            self._store.revisions.put((service.name, version), recorded(service, version, image_id, look.now))
            mine = [key for key in self._store.revisions if key[0] == service.name]
            for key in [key for key in mine if key[1] not in needed][: max(0, len(mine) - REVISIONS_KEPT)]:
                self._store.revisions.drop(key)

    def _record_user_config(self, service: ServiceSpec, version: str) -> None:
        """Record the last user_config that the files had for a version: a rollback to the version restores it."""
        key = (service.name, version)
        if self._user_configs.get(key) == service.user_config:
            return
        revision = self._store.revisions[key]
        then = written(revision)
        with or_later("a user_config was not kept"):  # only a rollback needs it
            if then is None or then.user_config != service.user_config:
                self._store.revisions.put(key, recorded(service, version, revision.image_id, revision.first_at))
            self._user_configs[key] = service.user_config

    def _forget_others(self, spec: Spec) -> None:
        offered = set(self._offered.items())
        self._user_configs = {key: text for key, text in self._user_configs.items() if key in offered}
        for name in [name for name in self._states if name not in spec.services]:
            with or_later("the rollouts of a removed service were kept"):
                self._store.rollouts.drop(name)
                for key in [key for key in self._store.revisions if key[0] == name]:
                    self._store.revisions.drop(key)
                del self._states[name]

    # ------------------------------------------------------------------------------------------------ what is asked for

    def deploy(self, names: Iterable[str], now: float, *, is_watched: bool = True) -> Mapping[str, str]:
        """Roll out what the files and images give, even if it was rolled back; return one sentence for each service.

        Without `is_watched` no version bakes.
        """
        sentences = {}
        for name in names:
            before = self.state(name)
            offered = self._offered.get(name)
            self._ask(name, machine.retried(before, offered, now, is_watched=is_watched))
            if offered is None:
                sentences[name] = "its image is not on this machine"
            elif before.rollout is not None:
                going_on = f"{before.rollout.phase.value} {before.rollout.to} already"
                sentences[name] = going_on if before.rollout.to == offered else f"{offered} follows"
            elif (
                name in self._asleep and before.stable is not None and (before.stable != offered or before.is_unproven)
            ):
                sentences[name] = f"{offered} is taken, and {UNTRIED}"
            elif before.stable is None or before.stable == offered:
                sentences[name] = f"{offered} is what the files and its image give; nothing changes"
            else:
                sentences[name] = f"{before.stable} -> {offered} begins"
                self._events.record("rollout", f"{name}: an operator asked for {offered}", service=name)
        return sentences

    def roll_back(self, name: str, to: str | None, now: float) -> str:
        """Go back to an earlier version; during a rollout, to the version before it. Raises InvalidRequest."""
        version = self.way_back(name, to)
        if version is None:
            return self.abort(name, now)
        state = self.state(name)
        after = machine.returned(state, version, self._offered.get(name), now)
        message = f"{state.stable} -> {version}, an earlier version; the files' own waits for `pierhead deploy {name}`"
        return self._asked(name, after, "rollback", message)

    def way_back(self, name: str, to: str | None) -> str | None:
        """The version that a rollback restores; None where it only ends a rollout. Raises InvalidRequest."""
        state = self.state(name)
        if to is None and state.rollout is not None:
            return None
        version = next(iter(state.previous), None) if to is None else to
        known = [revision.version for revision in self.revisions(name)]
        if version is None:
            raise InvalidRequest(f"{name}: there was no earlier version; known are {', '.join(known) or 'none'}")
        if version not in known:
            raise InvalidRequest(
                f"{name}: no record says how version {version} is made; known are {', '.join(known) or 'none'}"
            )
        if version == state.stable and state.rollout is None:
            raise InvalidRequest(f"{name}: version {version} is what runs")
        if version != self._offered.get(name) and written(self._store.revisions[(name, version)]) is None:
            readable = [revision.version for revision in self.revisions(name) if written(revision) is not None]
            raise InvalidRequest(
                f"{name}: an earlier controller recorded version {version} in a format that this one cannot read; "
                f"readable are {', '.join(readable) or 'none'}; to restore {version}, restore its compose files"
            )
        if state.stable is None:
            raise InvalidRequest(f"{name}: no version has ever been ready, so there is nothing to go back from")
        return None if version == state.stable else version

    def abort(self, name: str, now: float) -> str:
        """End a rollout and go back. Raises InvalidRequest."""
        state = self.state(name)
        after = machine.aborted(state, now)
        if after is None or after.rollout is None:
            raise InvalidRequest(f"{name}: no rollout is in progress, so there is nothing to abort")
        message = f"{after.rollout.source} goes, {after.rollout.to} stays: an operator asked for it"
        return self._asked(name, after, "rollback", message)

    def promote(self, name: str, now: float) -> str:
        """End the bake time of a first batch: the rest is replaced now. Raises InvalidRequest."""
        after = machine.promoted(self.state(name), now)
        if after is None or after.rollout is None:
            raise InvalidRequest(f"{name}: no version is being watched (BAKING), so there is nothing to promote")
        message = f"{after.rollout.to}: the rest follows, an operator asked for it"
        return self._asked(name, after, "rollout", message)

    def revisions(self, name: str) -> list[Revision]:
        """Versions of a service that a rollback can restore, the newest first."""
        mine = [revision for revision in self._store.revisions.values() if revision.service == name]
        return sorted(mine, key=lambda revision: revision.first_at, reverse=True)

    def state(self, name: str) -> ServiceRollout:
        """A service's rollout state."""
        return self._states.get(name, ServiceRollout())

    def wanted(self, name: str) -> str | None:
        """The version of a service's new replicas; None before the first tick, or where it is not known."""
        goal = self.directions.goals.get(name)
        return goal.version if goal else None

    def proven(self) -> Mapping[str, str]:
        """The version of each service that is known to work, where there is one."""
        return {name: state.stable for name, state in self._states.items() if state.stable and not state.is_unproven}

    def _ask(self, name: str, state: ServiceRollout) -> None:
        """Adopt the state that an operator asked for; raises StoreError when it cannot be stored."""
        self._store.rollouts.put(name, state_text(state))
        self._states[name] = state

    def _asked(self, name: str, state: ServiceRollout, kind: str, message: str) -> str:
        """Adopt the state, record it, and return the message."""
        self._ask(name, state)
        self._events.record(kind, f"{name}: {message}", service=name)
        return message


def _counts(spec: ServiceSpec, observed: Observed, now: float) -> Mapping[str, Count]:
    """By version."""
    counts: dict[str, list[int]] = {}
    for container, phase in staying(spec, observed, now):
        count = counts.setdefault(container.version, [0, 0, 0])
        count[0] += 1
        if is_ready(container, phase):
            count[1 if gets_traffic(container, spec, observed.routing) else 2] += 1
    return {version: Count(present, ready, unreached) for version, (present, ready, unreached) in counts.items()}


def _ended(observed: Observed) -> Mapping[str, FailureKey]:
    """Service and version, by container id, of replicas that exited by themselves, including those being removed.

    With them, by its node, an edge that does not answer where one exited: an engine that restarts ends both.
    """
    found = {
        container.id: (container.service, container.version)
        for container in observed.containers
        if container.state.has_ended and container.id not in observed.retirements
    }
    for action in observed.in_progress:
        if isinstance(action, RemoveContainer) and action.failed:
            found[action.container_id] = action.service, action.version
    away = observed.routing.away if observed.routing else frozenset()
    nodes = {container.node for container in observed.containers if container.id in found and container.node in away}
    return found | {node: ("", node) for node in nodes}


def _no_place(name: str, state: ServiceRollout, look: _Look) -> str:
    """Why the next replica of a rollout cannot be placed; "" where it can, or where the answer may still change."""
    reason = next((one.reason for one in look.pending if one.service == name and one.has_no_place), "")
    if state.rollout is None or not reason:
        return ""
    to = look.counts[name].get(state.rollout.to, Count())
    marks = look.observed.retirements
    marked = [one.id for one in look.observed.containers_of(name) if one.id in marks]
    going = any(not marks[one].failed and one not in look.observed.asleep for one in marked)
    planned = any(
        action.service == name
        and (
            (isinstance(action, CreateContainer) and action.version == state.rollout.to)
            or (isinstance(action, BeginRetirement) and not action.failed)
        )
        for action in look.observed.in_progress
    )
    return "" if going or planned or to.present > to.ready else reason


def _failures(
    name: str, observed: Observed, refusals: Iterable[Refusal], begun_at: float, now: float
) -> Mapping[str, FailureRecord]:
    """Failures by version. A container that the engine has refused to create for REFUSED_FOR_S counts as failed.

    Refusals from before `begun_at` do not count: an operator may ask for a refused version again.
    """
    found = {version: record for (service, version), record in observed.failures.items() if service == name}
    for refusal in refusals:
        action = refusal.action
        if not isinstance(action, CreateContainer) or action.service != name:
            continue
        if refusal.failures >= machine.MOST_FAILURES and now - max(refusal.since, begun_at) >= REFUSED_FOR_S:
            found[action.version] = FailureRecord(
                refusal.failures, refusal.last_at, f"it cannot be made: {refusal.error}"
            )
    return found


# ----------------------------------------------------------------------------------------------------
# Order of rollouts: a callee changes before its callers, if they can reach what it becomes.


def order_of(
    services: Mapping[str, ServiceSpec],
    callees: Mapping[str, frozenset[str]],
    containers: Collection[ReplicaContainer],
) -> Mapping[str, frozenset[str]]:
    """By service, those that change before it: its callees, and the callers of one that moves from ports to sockets.

    A replica that was made without sockets reaches the others at their ports alone.
    """
    with_ports = {one.service for one in containers if not one.has_socket}
    order: dict[str, set[str]] = {name: set() for name in callees}
    for caller, called in callees.items():
        for callee in called:
            closes_ports = callee in with_ports and callee in services and services[callee].has_socket
            first, then = (caller, callee) if closes_ports and caller in with_ports else (callee, caller)
            order.setdefault(then, set()).add(first)
    return {name: frozenset(firsts) for name, firsts in order.items()}


def calls_of(
    containers: Iterable[ReplicaContainer], callers: Mapping[str, frozenset[str]]
) -> Mapping[str, frozenset[str]]:
    """The services that the replicas of each service watch. `callers`: see `Callers`."""
    found: dict[str, frozenset[str]] = {}
    for one in containers:
        found[one.service] = found.get(one.service, frozenset()) | callers.get(one.name, frozenset())
    return found


def all_callees(service: str, direct: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The direct and indirect callees of `service`; itself only where a callee calls it back."""
    found: set[str] = set()
    open_ends = [service]
    while open_ends:
        for callee in direct.get(open_ends.pop(), frozenset()):
            if callee not in found:
                found.add(callee)
                open_ends.append(callee)
    return frozenset(found)


def goes_before(service: str, direct: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    """The services that change before `service`, by name.

    Services that call each other change in the order of their names.
    """
    return tuple(
        callee
        for callee in sorted(all_callees(service, direct) - {service})
        if callee < service or service not in all_callees(callee, direct)
    )
