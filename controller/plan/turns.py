"""Decides which services give way to others where services take turns on GPUs (x-serve.gpu.yields).

A taker is what lacks GPUs and nothing else: a replica that a service without `yields` is to have, or a service with
`yields` (or its whole group) that has no replica and for which requests wait. Takers have their turn in this order: the
former first, then by how long requests have waited. Each gets GPUs that are free or about to be; else those of replicas
of other services with `yields`, first those on a GPU where the taker sleeps (sleep.py), then the least recently used,
as few as it needs. Such a replica gives way when

- it has been ready for its `min_stay_s`, and its service has had no request for `idle_s`; or
- its service is in use, and it has stayed for `min_stay_s` since it was ready and since the taker's requests wait.

It drains as any other that is not wanted, and then sleeps or is stopped (sleep.py). Its own next requests then wait in
the same order. What a taker is to get is kept from those after it, so nobody is overtaken. Without a taker nothing
gives way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..model.spec import GpuRequest, YieldSpec
from .draft import Draft
from .outlook import ReplicaOutlook, ServiceOutlook, places_left
from .placement import GpuBudget
from .retire import begin_retirement
from .sleep import let_one_go, sleepers
from .start import obstacle


@dataclass(frozen=True, slots=True)
class _Taker:
    """Replicas that are to start together."""

    outlooks: tuple[ServiceOutlook, ...]
    requests: tuple[tuple[str, GpuRequest], ...]
    """What each of them asks for, with its service."""
    since: float
    """When its requests began to wait; -inf = it takes no turns."""
    cause: str
    """Why it is to have them."""
    asleep_on: frozenset[str]
    """GPUs on which replicas of theirs sleep."""

    @property
    def names(self) -> str:
        return " and ".join(outlook.name for outlook in self.outlooks)


@dataclass(frozen=True, slots=True)
class _Stay:
    """Replicas that give way together: one of a service, or all of a group."""

    replicas: tuple[tuple[ServiceOutlook, ReplicaOutlook], ...]
    used_at: float
    rules: tuple[YieldSpec, ...]

    @property
    def names(self) -> str:
        return " and ".join(dict.fromkeys(outlook.name for outlook, _ in self.replicas))

    @property
    def ready_at(self) -> float:
        """When the last of them became ready; inf = one of them is not, or nothing can be done to it now."""
        times = [replica.container.ready_since for _, replica in self.replicas if _may_leave(replica)]
        known = [at for at in times if at is not None]
        return max(known) if len(known) == len(self.replicas) else math.inf

    def due(self, since: float) -> float:
        """When it gives way to what waits since then, if it gets no further request. inf = that is not known yet."""
        stay_s, idle_s = max(rule.min_stay_s for rule in self.rules), max(rule.idle_s for rule in self.rules)
        if_idle = max(self.ready_at + stay_s, self.used_at + idle_s)
        return min(if_idle, max(self.ready_at, since) + stay_s)


def _may_leave(replica: ReplicaOutlook) -> bool:
    return replica.is_ready and replica.may_change


def take_turns(draft: Draft, outlooks: Sequence[ServiceOutlook]) -> None:
    """Begin the retirement of replicas that give way, and bound what services with `yields` start."""
    if not draft.desired.demands:
        return
    trial = draft.gpus.trial()
    for outlook in outlooks:
        for replica in outlook.going():
            trial.free_after(replica.container)
    stays = list(_stays(draft, outlooks))
    takers = sorted(_takers(draft, outlooks), key=lambda taker: taker.since)
    for number, taker in enumerate(takers):
        stays = _seat(draft, trial, taker, stays, takers[:number])
    seated = {outlook.name for taker in takers for outlook in taker.outlooks}
    for outlook in outlooks:
        if outlook.name in draft.desired.demands and outlook.name not in seated:
            _fill(draft, trial, outlook)


# --------------------------------------------------------------------------------------------- who takes, who gives way


def _takers(draft: Draft, outlooks: Iterable[ServiceOutlook]) -> Iterator[_Taker]:
    groups: dict[str, list[ServiceOutlook]] = {}
    for outlook in outlooks:
        if outlook.name in draft.desired.demands:
            groups.setdefault(_group(outlook), []).append(outlook)
        elif outlook.lacking() and (request := _lacks_gpus_alone(draft, outlook)):
            why, gpus = "it has too few replicas", _asleep_on(draft, [outlook])
            one = _Taker((outlook,), ((outlook.name, request),), -math.inf, why, gpus)
            yield from [one] * outlook.lacking()
    for members in groups.values():
        lacking = tuple(outlook for outlook in members if outlook.target and not outlook.total())
        asked = tuple((one.name, request) for one in lacking if (request := _lacks_gpus_alone(draft, one)))
        demands = [draft.desired.demands[outlook.name] for outlook in members]
        since = [use.waiting_since for use in demands if use.waiting_since is not None]
        if since and lacking and len(asked) == len(lacking):
            count = sum(use.waiting for use in demands)
            why = "1 request waits" if count == 1 else f"{count} requests wait"
            yield _Taker(lacking, asked, min(since), why, _asleep_on(draft, lacking))


def _asleep_on(draft: Draft, outlooks: Iterable[ServiceOutlook]) -> frozenset[str]:
    found = (replica for outlook in outlooks for replica in sleepers(draft, outlook, outlook.version))
    return frozenset(uuid for replica in found for uuid in replica.container.gpus)


def _group(outlook: ServiceOutlook) -> str:
    """The word that its group has in common; without one a word of its own, which no group can have."""
    rule = outlook.spec.yields if outlook.spec else None
    return rule.group if rule and rule.group else f" {outlook.name}"


def _lacks_gpus_alone(draft: Draft, outlook: ServiceOutlook) -> GpuRequest | None:
    """What a new replica asks for, if nothing but GPUs can be in its way."""
    spec = outlook.spec
    if spec is None or obstacle(draft, outlook, spec) is not None:
        return None
    request = (outlook.goal.spec or spec).gpu
    left = places_left(draft, outlook, spec, outlook.here())
    if left is None or left > 0 or sleepers(draft, outlook, outlook.version):
        return request
    if (room := draft.machine.left(spec)) is not None and room <= 0:
        let_one_go(draft, outlook.name)
    return None


def _stays(draft: Draft, outlooks: Iterable[ServiceOutlook]) -> Iterator[_Stay]:
    groups: dict[str, list[ServiceOutlook]] = {}
    for outlook in outlooks:
        if outlook.name in draft.desired.demands and outlook.alive():
            groups.setdefault(_group(outlook), []).append(outlook)
    for group, members in groups.items():
        replicas = [(outlook, replica) for outlook in members for replica in outlook.alive()]
        used_at = max(draft.desired.demands[outlook.name].used_at for outlook in members)
        rules = tuple(outlook.spec.yields for outlook in members if outlook.spec and outlook.spec.yields)
        together = [[one] for one in replicas] if group.startswith(" ") else [replicas]
        for parts in together:
            yield _Stay(tuple(parts), used_at, rules)


# ----------------------------------------------------------------------------------------------------- who gets a place


def _seat(draft: Draft, trial: GpuBudget, taker: _Taker, stays: list[_Stay], before: Sequence[_Taker]) -> list[_Stay]:
    """Find a taker's place; return the stays that are left for those after it."""
    names = {outlook.name for outlook in taker.outlooks}
    others = [stay for stay in stays if not names & {outlook.name for outlook, _ in stay.replicas}]
    gone = _fewest(trial, taker, sorted(others, key=lambda stay: _order(stay, taker, draft.now)))
    if gone is None:
        for outlook in taker.outlooks:
            outlook.turn = "no service that holds one gives way"
        if before:
            _hold_back(draft, taker, f"its turn is after {' and '.join(dict.fromkeys(one.names for one in before))}")
        return stays
    for stay in gone:
        _free(trial, stay)
    for name, request in taker.requests:
        trial.place(name, request)
    due = max((stay.due(taker.since) for stay in gone), default=draft.now)
    if due > draft.now:
        _hold_back(draft, taker, "; ".join(_when(stay, taker, draft.now) for stay in gone))
        draft.look_again_in(min(due - draft.now, 1.0))
    else:
        for stay in gone:
            _give_way(draft, stay, taker)
        for outlook in taker.outlooks if gone else ():
            outlook.turn, outlook.room_comes = f"{', '.join(stay.names for stay in gone)} makes room", True
    return [stay for stay in stays if stay not in gone]


def _order(stay: _Stay, taker: _Taker, now: float) -> tuple[bool, bool, float]:
    """Those that may leave now: first where the taker sleeps, then the least recently used; then those that may leave
    first.
    """
    due = stay.due(taker.since)
    if due > now:
        return True, False, due
    is_elsewhere = taker.asleep_on.isdisjoint(uuid for _, replica in stay.replicas for uuid in replica.container.gpus)
    return False, is_elsewhere, stay.used_at


def _fewest(trial: GpuBudget, taker: _Taker, stays: list[_Stay]) -> list[_Stay] | None:
    """The first stays without which the taker finds a place, as few as it takes; None = all are not enough."""
    gone: list[_Stay] = []
    while not _fits(trial, taker, gone):
        if len(gone) == len(stays):
            return None
        gone = stays[: len(gone) + 1]
    for stay in reversed(gone[:-1]):
        fewer = [one for one in gone if one is not stay]
        gone = fewer if _fits(trial, taker, fewer) else gone
    return gone


def _fits(trial: GpuBudget, taker: _Taker, gone: Iterable[_Stay]) -> bool:
    budget = trial.trial()
    for stay in gone:
        _free(budget, stay)
    return all(budget.place(name, request) for name, request in taker.requests)


def _free(budget: GpuBudget, stay: _Stay) -> None:
    for _, replica in stay.replicas:
        budget.free_after(replica.container)


def _give_way(draft: Draft, stay: _Stay, taker: _Taker) -> None:
    to = f"to {taker.names}: {taker.cause}"
    for outlook, replica in stay.replicas:
        begin_retirement(draft, outlook, replica, f"gives way {to}", failed=False)
        outlook.target -= 1
        if not outlook.alive():
            draft.gives_way[outlook.name] = f"gave way {to}"


def _hold_back(draft: Draft, taker: _Taker, why: str) -> None:
    """Start nothing of it now, whatever is free. A service that takes no turns is not held back."""
    for outlook, (_, request) in zip(taker.outlooks, taker.requests, strict=True):
        outlook.turn, outlook.room_comes = why, True
        if taker.since > -math.inf:
            outlook.most = 0
            outlook.turn = f"{draft.gpus.why_not(request)}; {why}"


def _when(stay: _Stay, taker: _Taker, now: float) -> str:
    due = stay.due(taker.since)
    gives = "gives way" if len(stay.replicas) == 1 else "give way"
    if due == math.inf:
        return f"{stay.names} {gives} some time after being ready"
    return f"{stay.names} {gives} in {math.ceil(max(due - now, 0.0))} s at the latest"


def _fill(draft: Draft, trial: GpuBudget, outlook: ServiceOutlook) -> None:
    """Let a service that no request waits for, or that has replicas already, start what no taker needs."""
    spec, lacking = outlook.spec, outlook.lacking()
    request = (outlook.goal.spec or spec).gpu if spec else None
    if request is None or not lacking:
        return
    fitting = next((count for count in range(lacking) if not trial.place(outlook.name, request)), lacking)
    if fitting == lacking:
        return
    outlook.most, outlook.turn = fitting, f"{draft.gpus.why_not(request)}; nothing gives way for one more"
    is_asked = draft.desired.demands[outlook.name].waiting_since is not None
    if draft.observed.gpus and not (outlook.total() or fitting or is_asked):
        outlook.target = 0
        draft.gives_way[outlook.name] = "found no free GPU, and no request waits"
