"""Rolls a service from one version to the next, and back: one pure state machine per service.

                 files or images give another version
    (at rest) ------------------------------------------> WAITING    its callees change first
        ^                                                    |
        |                                                 STARTING   a first batch starts next to the old ones
        |                                                    |       that batch is ready
        |                                                 BAKING     both serve, for bake_s; error rates are compared
        |                                                    |       bake_s is over
        |                                                 ROLLING    the rest, within max_surge and max_unavailable
        |                                                    |       every replica is new and ready
        |   bake_s is over                                SETTLING   nothing old is left; errors are still compared
        +----------------------------------------------------+
        |
        |   every replica is of the former version         ROLLING_BACK <--- from any of them: it does not become ready,
        +------------------------------------------------------+             fails, has more errors, or is aborted

At rest `stable` is the version that runs. Where no replica of it runs, as after `make down` or in a service at zero
replicas, a new version is adopted at once, because no old replica could serve until then; its first replicas then show
whether it works (`is_unproven`). A version that was rolled back is `rejected` until the files give another one or an
operator asks for it again. A version whose contract is incompatible with that of the running one is refused in
WAITING, or rolled back from STARTING before it serves; it is tried again once the obstacle is gone.
`advance` takes the facts of one moment and returns the next state and the events. It is called every tick, also after a
restart with the stored state, so it must continue from any state.

Error rates are compared by Fisher's exact test, one-sided: how likely are that many errors in the new version's answers
if both versions fail equally often? (R. A. Fisher, Statistical Methods for Research Workers, 1925, section 21.02.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..model.desired import Rejection, Rollout, RolloutPhase, ServiceRollout
from ..model.reports import Note
from ..model.spec import RolloutSpec
from ..model.world import FailureRecord

MOST_FAILURES = 3
"""After this many failed starts in a row a new version counts as unable to become ready."""
PREVIOUS_KEPT = 10
UNLIKELY = 0.001
"""A new version is worse when the probability of so many errors by chance is below this. The test runs every second, so
the usual 0.05 would reject a good version every few rollouts."""
WORSE_BY = 0.01
"""And only when its share of errors is greater by this: a difference of 0.1 % may be real, but it does not matter."""
ROLLING_FORWARD = frozenset({RolloutPhase.STARTING, RolloutPhase.BAKING, RolloutPhase.ROLLING, RolloutPhase.SETTLING})
STARTS_NEW = frozenset({RolloutPhase.STARTING, RolloutPhase.ROLLING})
ON_TRIAL = frozenset({RolloutPhase.STARTING, RolloutPhase.BAKING})
BEFORE_IT_SERVES = frozenset({RolloutPhase.WAITING, RolloutPhase.STARTING})
SERVES_NEW = frozenset({RolloutPhase.BAKING, RolloutPhase.ROLLING, RolloutPhase.SETTLING})


@dataclass(frozen=True, slots=True)
class AnswerTally:
    """Answers of the replicas of one version since a rollout began."""

    answered: int = 0
    errors: int = 0

    @property
    def share(self) -> float:
        """Errors among the answers, 0 to 1."""
        return self.errors / self.answered if self.answered else 0.0

    def __add__(self, other: AnswerTally) -> AnswerTally:
        return AnswerTally(self.answered + other.answered, self.errors + other.errors)

    def __sub__(self, other: AnswerTally) -> AnswerTally:
        return AnswerTally(self.answered - other.answered, self.errors - other.errors)

    def __str__(self) -> str:
        return f"{self.errors} of {self.answered} requests ({100 * self.share:.1f} %)"


@dataclass(frozen=True, slots=True)
class Count:
    """The replicas of one version that are not retiring: all (`present`), and the serving ones (`ready`)."""

    present: int = 0
    ready: int = 0
    unreached: int = 0
    """Ready by their own probe, but without traffic from HAProxy: it refuses the server, or its own check fails."""


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """The observed state of one service at one moment."""

    target: int
    offered: str | None
    """The version that the compose files and images give now; None while the image is not on this machine."""
    counts: Mapping[str, Count] = field(default_factory=dict)
    """By version."""
    failures: Mapping[str, FailureRecord] = field(default_factory=dict)
    """By version: failures in a row, since that version's rollout began."""
    tallies: Mapping[str, AnswerTally] = field(default_factory=dict)
    waits_for: str = ""
    """Why a rollout may not begin yet, in words: a callee of the service changes first."""
    no_place: str = ""
    """Why the next replica cannot be placed on this machine, in words; "" while a replica that starts or stops may
    still change that."""
    contracts: Mapping[str, str | None] = field(default_factory=dict)
    """By version, for versions that may follow: why their replicas must not serve with those of the others; "" = they
    may; None = that is not known yet, as their contract is not. Left out: there is nothing to compare with."""
    is_shared: bool = False
    """Replicas of other versions or services have just exited by themselves as well, or several replicas exited
    together and none of the former version is left to compare with. The engine or the machine may be the cause."""

    def ready(self, version: str | None) -> int:
        """Ready replicas of a version."""
        return self.counts[version].ready if version is not None and version in self.counts else 0

    def has_only(self, version: str | None) -> bool:
        """Whether no replica of another version is left, and all replicas of this one are ready.

        Their number does not matter: more may be wanted than fit on the machine.
        """
        if self.others(version):
            return False
        count = self.counts.get(version or "", Count())
        return not self.target or 0 < count.present == count.ready

    def others(self, version: str | None) -> int:
        """Replicas of all other versions."""
        return sum(count.present for name, count in self.counts.items() if name != version)


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of a service's rollouts, from the compose files and the controller."""

    spec: RolloutSpec
    startup_deadline_s: float = 1800.0
    is_manual: bool = False
    """New versions wait for `pierhead deploy`."""


def advance(
    state: ServiceRollout, facts: RolloutFacts, rules: Rules, now: float
) -> tuple[ServiceRollout, tuple[Note, ...]]:
    """The next state, and the events on the way there."""
    notes: list[Note] = []
    # Each step enters another phase, and a second rollout may follow the first; more steps would be a cycle.
    for _ in range(2 * len(RolloutPhase)):
        after, note = _step(state, facts, rules, now)
        if note:
            notes.append(note)
        if after == state:
            break
        state = after
    return state, tuple(notes)


def goal_version(state: ServiceRollout, offered: str | None) -> tuple[str | None, str | None]:
    """The version of new replicas, and the version that stays until the new one has proven itself."""
    rollout = state.rollout
    if rollout is None:
        return state.stable or offered, None
    if rollout.phase in (RolloutPhase.WAITING, RolloutPhase.ROLLING_BACK):
        return state.stable, None
    return rollout.to, state.stable if rollout.phase in ON_TRIAL else None


# ---------------------------------------------------------------------------------------------------------- asked for


def retried(state: ServiceRollout, offered: str | None, now: float, *, is_watched: bool = True) -> ServiceRollout:
    """The state after an operator asked for the files' version: it may have been rolled back, or wait for a callee.

    A waiting rollout begins at `now`: only a callee that is rolled back after that blocks it. Without `is_watched` the
    version does not bake.
    """
    state = replace(state, approved=offered, unwatched=state.unwatched if is_watched else offered)
    if state.rollout and state.rollout.phase is RolloutPhase.WAITING:
        state = replace(state, rollout=replace(state.rollout, begun_at=now))
    rejection = state.rejection_of(offered)
    if rejection and not (rejection.is_refused and state.rollout):  # its replicas, which must not serve, still leave
        state = replace(state, rejected=None)
    return state


def aborted(state: ServiceRollout, now: float) -> ServiceRollout | None:
    """The state after an operator aborted the rollout: it goes back to the former version. None without a rollout."""
    rollout = state.rollout
    if rollout is None or rollout.phase is RolloutPhase.ROLLING_BACK:
        return None
    return _back(state, "an operator asked for it", now, is_asked=True)


def returned(state: ServiceRollout, version: str, offered: str | None, now: float) -> ServiceRollout:
    """The state after an operator asked for an earlier version: it skips the bake time, and the files' version waits.

    If the files' version was rolled back before, its rejection keeps the former reason, which says more.
    """
    asked = Rejection(offered, f"{version} was asked for in its place", now, is_asked=True) if offered else None
    rejected = state.rejection_of(offered) or asked
    rollout = Rollout(
        state.stable, version, RolloutPhase.STARTING, now, now, "an operator asked for it", is_return=True
    )
    return replace(state, rollout=rollout, rejected=rejected, approved=None)


def promoted(state: ServiceRollout, now: float) -> ServiceRollout | None:
    """The state after an operator promoted the first batch; None when no version is baking."""
    rollout = state.rollout
    if rollout is None or rollout.phase is not RolloutPhase.BAKING:
        return None
    return replace(state, rollout=replace(rollout, phase=RolloutPhase.ROLLING, since=now))


# ---------------------------------------------------------------------------------------------------------- contracts


def barred(state: ServiceRollout, facts: RolloutFacts, rules: Rules) -> Mapping[str, str]:
    """The versions whose replicas must not get a request, and why."""
    found: dict[str, str] = {}
    if rules.spec.incompatible == "allow":
        return found
    if state.rejected is not None and state.rejected.is_refused:
        found[state.rejected.version] = state.rejected.reason
    rollout = state.rollout
    if rollout is not None and rollout.is_refused and rollout.source is not None:
        found[rollout.source] = rollout.cause
    if rollout is not None and rollout.phase in BEFORE_IT_SERVES:
        why = facts.contracts.get(rollout.to, "")
        if why != "":
            found[rollout.to] = UNCOMPARED if why is None else why
    return found


UNCOMPARED = "its contract was not compared yet with that of the version that serves"


def _refused(
    state: ServiceRollout, facts: RolloutFacts, rules: Rules, now: float
) -> tuple[ServiceRollout, Note] | None:
    """The state after a version that does not serve yet turned out not to be able to meet those that do."""
    rollout = state.rollout
    if rollout is None or rollout.phase not in BEFORE_IT_SERVES or rules.spec.incompatible == "allow":
        return None
    why = facts.contracts.get(rollout.to)
    if not why or not facts.others(rollout.to):
        return None
    if rollout.phase is RolloutPhase.WAITING:
        rejected = Rejection(rollout.to, why, now, is_refused=True)
        note = Note("refused", f"{state.stable} -> {rollout.to} is refused: {why}", outcome="warning")
        return replace(state, rollout=None, rejected=rejected, approved=None), note
    note = Note("rollback", f"{rollout.to} is rolled back to {state.stable}: {why}", outcome="warning")
    return _back(state, why, now, is_refused=True), note


def _may_follow(rejection: Rejection, facts: RolloutFacts, rules: Rules) -> bool:
    """Whether nothing is left of what a version was refused for."""
    if not rejection.is_refused:
        return False
    is_alone = not facts.others(rejection.version)
    return rules.spec.incompatible == "allow" or is_alone or facts.contracts.get(rejection.version, "") == ""


# -------------------------------------------------------------------------------------------------------------- steps


def _step(state: ServiceRollout, facts: RolloutFacts, rules: Rules, now: float) -> tuple[ServiceRollout, Note | None]:
    if state.is_unproven and facts.ready(state.stable):
        state = replace(state, is_unproven=False, tried_since=None)
    if state.rollout is None:
        return _at_rest(state, facts, rules, now)
    if state.stable is None:
        return replace(state, rollout=None), None  # a first version is no rollout: there is none to go back to
    superseded = _superseded(state, state.rollout, facts, rules, now)
    if superseded:
        return superseded
    if state.rollout.phase is RolloutPhase.ROLLING_BACK:
        return _rolling_back(state, state.rollout, facts, rules, now)
    refused = _refused(state, facts, rules, now)
    if refused:
        return refused
    rollout = _excused(_timed(state.rollout, facts, now), state.stable, facts)
    state = replace(state, rollout=rollout)
    trouble = trouble_of(state, facts, rules, now)
    if trouble and rules.spec.auto_rollback:
        message = f"{rollout.to} is rolled back to {state.stable}: {trouble}"
        return _back(state, trouble, now), Note("rollback", message, outcome="warning")
    return _forward(state, rollout, facts, rules, now)


def _timed(rollout: Rollout, facts: RolloutFacts, now: float) -> Rollout:
    """Record since when the rollout is stuck: a replica has no place, or HAProxy does not send to a ready one."""
    unreached = rollout.phase is RolloutPhase.ROLLING and facts.counts.get(rollout.to, Count()).unreached
    if rollout.phase not in STARTS_NEW or not (facts.no_place or unreached):
        return replace(rollout, stuck_since=None)
    return rollout if rollout.stuck_since is not None else replace(rollout, stuck_since=now)


def _excused(rollout: Rollout, stable: str | None, facts: RolloutFacts) -> Rollout:
    """Record how many failures of the new version do not count because other replicas failed with it."""
    count = _failed(rollout, facts)
    # If the former version has failed as well since the rollout began, the cause is elsewhere.
    shared = facts.is_shared or _failure(stable, rollout, facts) is not None
    return replace(rollout, excused=count if shared else min(rollout.excused, count))


def _at_rest(
    state: ServiceRollout, facts: RolloutFacts, rules: Rules, now: float
) -> tuple[ServiceRollout, Note | None]:
    offered = facts.offered
    if state.is_unproven:
        state = _tried(state, facts, now)
        proved = _proved(state, facts, rules, now)
        if proved:
            return proved
    if offered is None:
        return state, None
    if state.stable is None:
        return _first(state, facts, offered)
    if offered == state.stable:
        return replace(state, rejected=None, approved=None, unwatched=None), None
    rejection = state.rejection_of(offered)
    if rejection is not None:
        if not _may_follow(rejection, facts, rules):
            return state, None
        state = replace(state, rejected=None)
    if rules.is_manual and state.approved != offered:
        return state, None
    if not facts.others(offered) and not (facts.target and facts.waits_for):
        note = (
            Note("rollout", f"{state.stable} -> {offered}: at once, as nothing of {state.stable} runs")
            if facts.target
            else None
        )
        return _done(state, offered, facts), note
    rollout = Rollout(state.stable, offered, RolloutPhase.WAITING, now, now, "the files or its image changed")
    return replace(state, rollout=rollout, rejected=None), None


def _first(state: ServiceRollout, facts: RolloutFacts, offered: str) -> tuple[ServiceRollout, Note | None]:
    """No version has proven itself yet, or its record was lost: a version with ready replicas counts as proven."""
    if facts.ready(offered):
        return replace(state, stable=offered), None
    ready = [(-count.ready, version) for version, count in facts.counts.items() if count.ready]
    return (replace(state, stable=min(ready)[1]) if ready else state), None


def _superseded(
    state: ServiceRollout, rollout: Rollout, facts: RolloutFacts, rules: Rules, now: float
) -> tuple[ServiceRollout, Note | None] | None:
    """The state after the files changed again during a rollout; None where they did not."""
    offered = facts.offered
    if offered in (None, rollout.to) or state.rejection_of(offered):
        return None
    if offered == state.stable:
        if rollout.phase is RolloutPhase.WAITING:
            return replace(state, rollout=None), None
        message = f"the files give {offered} again, which ran before: {rollout.to} goes"
        return replace(_back(state, "the files give the former version again", now), rejected=None), Note(
            "rollback", message
        )
    if rules.is_manual and state.approved != offered:
        return None
    fresh = Rollout(state.stable, offered, RolloutPhase.WAITING, now, now, "the files or its image changed again")
    return replace(state, rollout=fresh, rejected=None), Note("rollout", f"{offered} replaces {rollout.to}")


def _rolling_back(
    state: ServiceRollout, rollout: Rollout, facts: RolloutFacts, rules: Rules, now: float
) -> tuple[ServiceRollout, Note | None]:
    if state.is_unproven:
        state = _tried(state, facts, now)
        proved = _proved(state, facts, rules, now)
        if proved:
            return proved
    if not facts.has_only(state.stable):
        return state, None
    ready = facts.ready(state.stable)
    some, serve = ("1 replica", "serves") if ready == 1 else (f"{ready} replicas", "serve")
    message = f"{some} of {state.stable} {serve} again, {rollout.source} is gone: {rollout.cause}"
    return replace(state, rollout=None), Note("rolled_back", message, outcome="warning")


def _forward(
    state: ServiceRollout, rollout: Rollout, facts: RolloutFacts, rules: Rules, now: float
) -> tuple[ServiceRollout, Note | None]:
    target, to = facts.target, rollout.to
    bake_s = _bake_s(state, rollout, rules)
    watched = now - rollout.since >= bake_s
    watch = f"; watched for {bake_s:g} s" if bake_s else ""

    def enter(phase: RolloutPhase, excused: int = rollout.excused) -> ServiceRollout:
        return replace(state, rollout=replace(rollout, phase=phase, since=now, stuck_since=None, excused=excused))

    match rollout.phase:
        case RolloutPhase.WAITING if not facts.waits_for:
            message = f"{state.stable} -> {to}: {rollout.cause}"
            return enter(RolloutPhase.STARTING), Note("rollout", message, outcome="ok")
        case RolloutPhase.STARTING if facts.ready(to) >= min(1, target) and to not in barred(state, facts, rules):
            first = f"{facts.ready(to)} of {target} replicas"
            message = f"{first} of {to} serve next to {state.stable}{watch}"
            # Failures so far were part of becoming ready: only later ones count against the version.
            return enter(RolloutPhase.BAKING, excused=_failed(rollout, facts)), Note("rollout", message)
        case RolloutPhase.BAKING if watched or not target:
            return enter(RolloutPhase.ROLLING), Note("rollout", f"{to} {_held_out(facts, to)}: the rest follows")
        case RolloutPhase.ROLLING if facts.has_only(to):
            message = f"all {facts.ready(to)} replicas are of {to}{watch and f'{watch} more'}"
            return enter(RolloutPhase.SETTLING), Note("rollout", message)
        case RolloutPhase.SETTLING if watched or not target:
            message = f"{state.stable} -> {to} is done, {now - rollout.begun_at:.0f} s after its start"
            return _done(state, to, facts), Note("rolled_out", message, outcome="ok")
        case _:
            return state, None


def _bake_s(state: ServiceRollout, rollout: Rollout, rules: Rules) -> float:
    return 0.0 if rollout.is_return or rollout.to == state.unwatched else rules.spec.bake_s


def _held_out(facts: RolloutFacts, version: str) -> str:
    tally = facts.tallies.get(version, AnswerTally())
    return f"answered {tally.answered} requests with {tally.errors} errors" if tally.answered else "is ready"


def _done(state: ServiceRollout, version: str, facts: RolloutFacts) -> ServiceRollout:
    is_proven = state.stable and not state.is_unproven  # a rollback goes only to a version that has worked
    former = [state.stable] if state.stable and is_proven and state.stable != version else []
    kept = [name for name in state.previous if name not in (version, *former)]
    return ServiceRollout(
        stable=version,
        rejected=state.rejected,
        previous=tuple([*former, *kept][:PREVIOUS_KEPT]),
        is_unproven=not facts.ready(version),
    )


def _tried(state: ServiceRollout, facts: RolloutFacts, now: float) -> ServiceRollout:
    """Record since when an unproven version has been tried."""
    if not facts.target:
        return replace(state, tried_since=None)
    return state if state.tried_since is not None else replace(state, tried_since=now)


def _proved(
    state: ServiceRollout, facts: RolloutFacts, rules: Rules, now: float
) -> tuple[ServiceRollout, Note | None] | None:
    """Judge the first replicas of a version that was taken while no replica ran: on failure the previous version comes
    back. A rejection of the files' version stays.
    """
    version = state.stable or ""
    failure, since = facts.failures.get(version), state.tried_since
    if failure is None or since is None or failure.last_at < since:
        return None
    if failure.count < MOST_FAILURES and now - since < rules.startup_deadline_s:
        return None
    if not state.previous or not rules.spec.auto_rollback:
        return None
    former, *others = state.previous
    why = f"it does not become ready ({_times(failure.count)}); last: {failure.detail}"
    rollout = Rollout(version, former, RolloutPhase.ROLLING_BACK, now, now, why)
    rejected = state.rejection_of(facts.offered) or Rejection(version, why, now)
    # The former version has worked. If it fails as well, the cause is elsewhere and an older version would not help.
    back = ServiceRollout(stable=former, rollout=rollout, rejected=rejected, previous=tuple(others))
    return back, Note("rollback", f"{version} is rolled back to {former}: {why}", outcome="warning")


def _back(
    state: ServiceRollout, why: str, now: float, *, is_asked: bool = False, is_refused: bool = False
) -> ServiceRollout:
    rollout = state.rollout
    if rollout is None or state.stable is None:
        raise AssertionError("internal: a rollback without a rollout, or without a version to go back to")
    back = Rollout(
        rollout.to, state.stable, RolloutPhase.ROLLING_BACK, now, rollout.begun_at, why, is_refused=is_refused
    )
    rejected = Rejection(rollout.to, why, now, is_asked, is_refused)
    if rollout.is_return and state.rejected and state.rejected.version != rollout.to:
        rejected = state.rejected  # the files' version waits as before: no operator has asked for it
    return replace(state, rollout=back, rejected=rejected, approved=None, unwatched=None)


# ------------------------------------------------------------------------------------------------------------ verdicts


def trouble_of(state: ServiceRollout, facts: RolloutFacts, rules: Rules, now: float) -> str:
    """Why the new version must be rolled back; "" when there is no reason, or no rollout."""
    rollout = state.rollout
    if rollout is None or rollout.phase not in ROLLING_FORWARD:
        return ""
    failure = _failure(rollout.to, rollout, facts)
    late = now - rollout.since >= rules.startup_deadline_s
    if rollout.phase is RolloutPhase.STARTING and late and facts.counts.get(rollout.to, Count()).unreached:
        return f"it is ready, and {rules.startup_deadline_s:g} s after its start HAProxy does not send to it"
    if failure is not None:
        if rollout.phase is RolloutPhase.STARTING:
            if failure.count >= MOST_FAILURES or late:
                return f"it does not become ready ({_times(failure.count)}); last: {failure.detail}"
        elif failure.count >= MOST_FAILURES or failure.count > rollout.excused:
            return f"a replica of it failed in its first minutes: {failure.detail}"
    if rollout.stuck_since is not None and now - rollout.stuck_since >= rules.startup_deadline_s:
        for_s = f"for {rules.startup_deadline_s:g} s (startup.deadline_s)"
        if facts.no_place:
            return f"it does not fit {for_s}: {facts.no_place}"
        return f"it is ready, and {for_s} HAProxy has not sent to all of it"
    if rollout.phase not in SERVES_NEW:
        return ""
    return worse(facts.tallies.get(rollout.to, AnswerTally()), facts.tallies.get(state.stable or "", AnswerTally()))


def _failure(version: str | None, rollout: Rollout, facts: RolloutFacts) -> FailureRecord | None:
    """A version's failures since the rollout began; those of an earlier rollout do not count."""
    failure = facts.failures.get(version or "")
    return failure if failure and failure.last_at >= rollout.begun_at else None


def _failed(rollout: Rollout, facts: RolloutFacts) -> int:
    """The new version's failures in a row."""
    failure = _failure(rollout.to, rollout, facts)
    return failure.count if failure else 0


def _times(count: int) -> str:
    return "1 try" if count == 1 else f"{count} tries"


def worse(new: AnswerTally, old: AnswerTally) -> str:
    """Why the new version's errors are not chance; "" when they may be, or are about as many as the old version's."""
    if new.share - old.share < WORSE_BY:
        return ""
    chance = chance_of(new, old)
    if chance >= UNLIKELY:
        return ""
    odds = f"{1 / max(chance, 1e-9):,.0f}"
    return f"it fails {new}, the former version {old}; by chance that is so once in {odds} rollouts"


def chance_of(new: AnswerTally, old: AnswerTally) -> float:
    """Probability of at least `new.errors` errors in the new version's answers if both versions fail equally often."""
    errors, total = new.errors + old.errors, new.answered + old.answered
    whole = _log_choose(total, errors)
    most = min(errors, new.answered)
    terms = (
        math.exp(_log_choose(new.answered, count) + _log_choose(old.answered, errors - count) - whole)
        for count in range(new.errors, most + 1)
        if errors - count <= old.answered
    )
    return min(1.0, math.fsum(terms))


def _log_choose(whole: int, part: int) -> float:
    return math.lgamma(whole + 1) - math.lgamma(part + 1) - math.lgamma(whole - part + 1)


# ----------------------------------------------------------------------------------------------------
# The state of a rollout in one sentence.


def rollout_words(name: str, state: ServiceRollout, facts: RolloutFacts, rules: Rules, now: float) -> str:
    """A service's rollout in one sentence; "" when there is nothing to say."""
    rollout = state.rollout
    if rollout is None:
        return _rest_words(name, state, facts, rules)
    change = f"{state.stable} -> {rollout.to}"
    trouble = trouble_of(state, facts, rules, now)
    if trouble:
        return f"{change}: {trouble}; auto_rollback is off: `pierhead abort {name}` reverts it"
    left_s = max(0.0, rollout.since + _bake_s(state, rollout, rules) - now)
    match rollout.phase:
        case RolloutPhase.WAITING:
            return f"{change} waits: {facts.waits_for or 'it begins now'}"
        case RolloutPhase.STARTING:
            return f"{change}: the first of {rollout.to} is being started, {facts.ready(state.stable)} serve as before"
        case RolloutPhase.BAKING:
            return f"{change}: {facts.ready(rollout.to)} watched for {left_s:.0f} s more; {_errors(state, facts)}"
        case RolloutPhase.ROLLING:
            return f"{change}: {facts.ready(rollout.to)} of {facts.target} replaced"
        case RolloutPhase.SETTLING:
            return f"{change}: all replaced, watched for {left_s:.0f} s more; {_errors(state, facts)}"
        case RolloutPhase.ROLLING_BACK:
            return f"{rollout.source} is rolled back to {state.stable}: {rollout.cause}"


def _errors(state: ServiceRollout, facts: RolloutFacts) -> str:
    new = facts.tallies.get(state.rollout.to if state.rollout else "", AnswerTally())
    old = facts.tallies.get(state.stable or "", AnswerTally())
    return f"it fails {new}, the former version {old}"


def _rest_words(name: str, state: ServiceRollout, facts: RolloutFacts, rules: Rules) -> str:
    rejected = state.rejection_of(facts.offered)
    if rejected is not None and rejected.is_refused:
        return f"version {rejected.version} is refused, {state.stable} runs: {rejected.reason}"
    if rejected is not None:
        return (
            f"version {rejected.version} was rolled back ({rejected.reason}); {state.stable} runs; change "
            f"it, or try it again with `pierhead deploy {name}`"
        )
    if rules.is_manual and state.stable and facts.offered not in (None, state.stable):
        why = rules.spec.incompatible == "refuse" and facts.contracts.get(facts.offered)
        refusal = f", which will refuse it: {why}" if why else ""
        return f"{state.stable} -> {facts.offered} waits for `pierhead deploy {name}`{refusal}"
    return ""
