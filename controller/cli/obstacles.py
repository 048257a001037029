"""The reasons why a service has not converged, from its row of the API. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .rows import age

if TYPE_CHECKING:
    from ..status.records.services import Failure, RefusedAction, Service


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One reason, in a sentence."""

    words: str
    key: tuple[str, ...]
    """Identifies the reason: it does not change with the times and numbers in the sentence."""


def obstacles(row: Service) -> Iterator[Obstacle]:
    """Yield a service's obstacles, the most important first."""
    pending: dict[str, int] = {}
    for replica in row.replicas:
        if replica.state == "PENDING" and not replica.name:
            pending[replica.message] = pending.get(replica.message, 0) + 1
    yield from (Obstacle(f"{count} pending: {reason}", ("pending", reason)) for reason, count in pending.items())
    yield from (_refusal(refusal) for refusal in row.refusals)
    if row.failure and not row.converged:
        yield _failure(row.failure, row.at)
    if row.user_config:
        yield from (Obstacle(sentence, ("user_config", sentence)) for sentence in row.user_config.refused)
    yield from (Obstacle(sentence, ("callee", name)) for name, sentence in row.unknown_callees.items())
    yield from _unready(row)
    if not row.converged and not pending and row.blocked:
        yield Obstacle(row.blocked, ("blocked", row.blocked))


def _refusal(refusal: RefusedAction) -> Obstacle:
    wait = f"next try in {refusal.retry_in_s:.0f} s" if refusal.retry_in_s >= 1 else "trying again"
    times = f" {refusal.failures} times" if refusal.failures > 1 else ""
    words = f"could not {refusal.does}{times}, {wait}: {refusal.error}"
    return Obstacle(words, ("refusal", refusal.does, refusal.error))


def _failure(failure: Failure, now: float) -> Obstacle:
    again = f"{failure.count} times in a row" if failure.count > 1 else "once"
    words = f"a replica failed {again}, last {age(failure.last_at, now)} ago: {failure.detail}"
    return Obstacle(words, ("failure", failure.detail))


def _unready(row: Service) -> Iterator[Obstacle]:
    """Yield the replicas that do not serve, grouped by reason; those of a Swarm also while they have no node."""
    refusing = row.user_config.refusing if row.user_config else ()
    names: dict[str, list[str]] = {}
    for replica in row.replicas:
        is_in_the_way = replica.state in ("PENDING", "STARTING", "FAILED") and replica.name not in refusing
        if replica.name and is_in_the_way:
            names.setdefault(replica.message, []).append(replica.name)
    for message, (first, *others) in names.items():
        more = f" and {len(others)} more" if others else ""
        yield Obstacle(f"{first}{more}: {message}", ("replica", message))
