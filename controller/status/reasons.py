"""Explains a service's document in sentences, which every client shows unchanged: what is in the way, what sets the
number of replicas, what is going on. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ..model.plan import Refusal
from ..model.reports import AutoscaleStatus
from ..model.text import age
from .records.services import DeadEnd, Failure, Obstacle, RefusedAction, RejectionDocument, Service

GIVE_UP_FAILURES = 6
"""Half a minute of tries. The controller keeps trying, but a replica that fails so often needs a change by a user."""


def explained(row: Service) -> Service:
    """Return the document with its explanations."""
    return replace(
        row,
        obstacles=tuple(_obstacles(row)),
        who_decides=_who_decides(row),
        summary=_summary(row),
        stuck=_stuck(row),
        not_as_asked=_not_as_asked(row),
    )


def refused_action(refusal: Refusal, now: float) -> RefusedAction:
    """Return an action that waits for its next try."""
    error = str(refusal.error) or type(refusal.error).__name__
    return RefusedAction(refusal.action.words, refusal.failures, round(max(refusal.until - now, 0.0), 1), error)


def refusal_words(refusal: RefusedAction) -> str:
    """Return what could not be done, how often, and when it is tried again."""
    wait = f"next try in {refusal.retry_in_s:.0f} s" if refusal.retry_in_s >= 1 else "trying again"
    times = f" {refusal.failures} times" if refusal.failures > 1 else ""
    return f"could not {refusal.does}{times}, {wait}: {refusal.error}"


def pending_words(reasons: Iterable[str]) -> Mapping[str, str]:
    """Return a sentence for each reason for which replicas are pending."""
    return {reason: f"{count} pending: {reason}" for reason, count in Counter(reasons).items()}


def autoscale_words(name: str, autoscale: AutoscaleStatus) -> str:
    """Return what an autoscaler finds, in short."""
    bounds = f"{autoscale.min} to {autoscale.max}"
    if autoscale.paused:
        return _paused(name, autoscale)
    if autoscale.problem:
        return f"autoscaled, {bounds}: {_no_number(autoscale, f', so {autoscale.target} are held')}"
    if autoscale.asleep:
        return f"autoscaled, {bounds}: asleep until its next request, as it {autoscale.asleep}"
    found = f"autoscaled, {bounds}: {autoscale.basis or f'{autoscale.load:.1f} requests'}"
    if autoscale.wanted == autoscale.target:
        return found
    if autoscale.basis:
        return f"{found}{_if_that_lasts(autoscale)}"
    return f"{found}, which need {autoscale.wanted} replicas if they last"


def _obstacles(row: Service) -> Iterator[Obstacle]:
    """Yield what is in the way, the most important first."""
    pending = pending_words(one.message for one in row.replicas if one.state == "PENDING" and not one.name)
    yield from (Obstacle(words, ("pending", reason)) for reason, words in pending.items())
    yield from (Obstacle(refusal_words(one), ("refusal", one.does, one.error)) for one in row.refusals)
    if row.failure and not row.converged:
        yield _failure(row.failure, row.at)
    if row.user_config:
        yield from (Obstacle(sentence, ("user_config", sentence)) for sentence in row.user_config.refused)
    yield from (Obstacle(sentence, ("callee", name)) for name, sentence in row.unknown_callees.items())
    yield from (Obstacle(sentence, ("unreached", sentence)) for sentence in row.unreached)
    yield from _unready(row)
    if not row.converged and not pending and row.blocked:
        yield Obstacle(row.blocked, ("blocked", row.blocked))


def _failure(failure: Failure, now: float) -> Obstacle:
    again = f"{failure.count} times in a row" if failure.count > 1 else "once"
    words = f"a replica failed {again}, last {age(failure.last_at, now)} ago: {failure.detail}"
    return Obstacle(words, ("failure", failure.detail))


def _unready(row: Service) -> Iterator[Obstacle]:
    """Yield the replicas that do not serve, grouped by reason; also while the engine has no node for them."""
    refusing = row.user_config.refusing if row.user_config else ()
    names: dict[str, list[str]] = {}
    for replica in row.replicas:
        is_in_the_way = replica.state in ("PENDING", "STARTING", "FAILED") and replica.name not in refusing
        if replica.name and is_in_the_way:
            names.setdefault(replica.message, []).append(replica.name)
    for message, (first, *others) in names.items():
        more = f" and {len(others)} more" if others else ""
        yield Obstacle(f"{first}{more}: {message}", ("replica", message))


def _who_decides(row: Service) -> str:
    autoscale = row.autoscale
    if autoscale and autoscale.paused:
        return f"{_paused(row.name, autoscale)}; {_what_it_finds(autoscale)}"
    if autoscale:
        bounds = f"{autoscale.min} to {autoscale.max}"
        return f"the autoscaler decides, {bounds}; {_what_it_finds(autoscale)}{_unless_settled(autoscale)}"
    if row.override is not None:
        files = "" if row.spec_replicas is None else f"; the compose files say {row.spec_replicas}"
        return f"set by scale{files} (`pierhead scale {row.name} auto` goes back to them)"
    return "the compose files say so"


def _paused(name: str, autoscale: AutoscaleStatus) -> str:
    bounds = f"{autoscale.min} to {autoscale.max}"
    return f"set by scale; the autoscaler ({bounds}) pauses until `pierhead scale {name} auto`"


def _no_number(autoscale: AutoscaleStatus, so: str = "") -> str:
    return f"its policy gives no number{so}: {autoscale.problem}"


def _if_that_lasts(autoscale: AutoscaleStatus) -> str:
    return f"; {autoscale.wanted} replicas if that lasts"


def _what_it_finds(autoscale: AutoscaleStatus) -> str:
    """The basis of an autoscaler's number: the user's policy where there is one, else the load."""
    if autoscale.problem:
        return _no_number(autoscale)
    if autoscale.asleep:
        return f"asleep until its next request, as it {autoscale.asleep}"
    return autoscale.basis or (f"the load is {autoscale.load:.1f} requests, which need {autoscale.wanted} replicas")


def _unless_settled(autoscale: AutoscaleStatus) -> str:
    if autoscale.problem:
        return f"; {autoscale.target} are held until then"
    if autoscale.wanted == autoscale.target:
        return ""
    return _if_that_lasts(autoscale) if autoscale.basis else " if they last"


def _summary(row: Service) -> str:
    rejected = row.rejected
    if row.rollout:
        return f"{row.rollout.progress}; {row.message}"
    if rejected and rejected.version not in row.message:
        how = "refused" if rejected.is_refused else "rejected"
        rejection = f"version {rejected.version} was {how}: {rejected.reason}"
        return f"{row.message}; {rejection}" if row.message else rejection
    return row.message


def _stuck(row: Service) -> DeadEnd | None:
    fails = row.failure is not None and row.failure.count >= GIVE_UP_FAILURES and row.ready < row.wanted
    if not (row.blocked or fails):
        return None
    words = f"{row.ready} of {row.wanted} ready; {row.message or row.blocked}"
    return DeadEnd(words, f"`pierhead why {row.name}` says what is in the way.")


def _not_as_asked(row: Service) -> DeadEnd | None:
    if row.turned_down:
        words, way = _turned_down(row, row.turned_down)
    elif row.state == "DEPLOY_FAILED" and row.ready >= row.wanted:
        # Nothing was rolled back, and all replicas serve: the change that failed needs no new replicas.
        why = row.message or "no replica says why"
        words, way = f"its user_config is refused, the former one stays in force: {why}", "correct it in the files"
    else:
        return None
    return DeadEnd(words, f"See `pierhead why {row.name}`; {way}.")


def _turned_down(row: Service, rejected: RejectionDocument) -> tuple[str, str]:
    goes_back = row.rollout is not None and row.rollout.phase == "ROLLING_BACK"
    how = "refused" if rejected.is_refused else "rolled back"
    words = (
        f"the files ask for version {rejected.version}, which {'is being' if goes_back else 'was'} {how}: "
        f"{rejected.reason}; version {row.version or '-'} stays"
    )
    return words, (f"correct the files or the image, or try the same version again with `pierhead deploy {row.name}`")
