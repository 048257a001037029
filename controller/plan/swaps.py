"""Chooses the replicas that leave to make room for a new version: none if that would not be enough. Pure.

Each choice is tried on a copy of the GPU budget.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ..model.spec import GpuRequest, ServiceSpec
from ..model.world import ReplicaContainer
from .draft import Draft
from .failures import backing_off
from .outlook import ReplicaOutlook, ServiceOutlook
from .placement import GpuBudget


@dataclass(slots=True)
class Places:
    """The places for replicas of one service on this machine, during a trial."""

    service: str
    budget: GpuBudget
    """A trial's copy: it is written to."""
    left: int | None = None
    """How many more replicas max_replicas_per_node allows; None = any number."""
    closed: Collection[str] = ()
    """The nodes where no replica is started, so that one which leaves them makes no room in that bound."""

    @classmethod
    def after(
        cls,
        budget: GpuBudget,
        service: str,
        leaving: Iterable[ReplicaContainer],
        left: int | None = None,
        closed: Collection[str] = (),
    ) -> Places:
        """The places once the leaving replicas are gone; `left`: before that."""
        places = cls(service, budget.trial(), left, closed)
        for container in leaving:
            places.free(container)
        return places

    def free(self, container: ReplicaContainer) -> None:
        """Count a replica as gone."""
        self.budget.free_after(container)
        self._add(container, 1)

    def keep(self, container: ReplicaContainer) -> None:
        """Take `free` back."""
        self.budget.hold(container.service, container.gpus, container.gpu_slot)
        self._add(container, -1)

    def _add(self, container: ReplicaContainer, places: int) -> None:
        if self.left is not None and container.node not in self.closed:
            self.left += places

    def take(self, request: GpuRequest | None) -> bool:
        """Take a place for one replica; False when there is none."""
        if not self.fits(request):
            return False
        if request is not None:
            self.budget.place(self.service, request)
        self.left = None if self.left is None else self.left - 1
        return True

    def fits(self, request: GpuRequest | None) -> bool:
        """Whether there is a place for one replica."""
        if self.left is not None and self.left <= 0:
            return False
        return request is None or self.budget.fits(self.service, request)

    def take_after(
        self, candidates: Sequence[ReplicaContainer], request: GpuRequest | None, most: int
    ) -> list[ReplicaContainer]:
        """Take a place by freeing as few candidates as it needs, at most `most`; return them, none if that is too few.

        Candidates are tried in their order; of several, those on the same GPU go together, as slots need it.
        """
        fewest: list[ReplicaContainer] = []
        tried = set()
        for first in candidates:
            kind = (first.gpus, first.gpu_slot, first.node in self.closed)
            if kind in tried:
                continue  # it would free the same as a candidate that was tried
            tried.add(kind)
            similar_first = sorted(candidates, key=lambda one: (one is not first, one.gpus != first.gpus))
            group = self._enough(similar_first[: most if not fewest else len(fewest) - 1], request)
            if group:
                fewest = group
            if len(fewest) == 1 or not most:
                break
        for container in fewest:
            self.free(container)
        if fewest:
            self.take(request)
        return fewest

    def _enough(self, candidates: Sequence[ReplicaContainer], request: GpuRequest | None) -> list[ReplicaContainer]:
        """The first candidates without which there is a place; none if even all of them are too few."""
        group: list[ReplicaContainer] = []
        fits = False
        for container in candidates:
            self.free(container)
            group.append(container)
            fits = self.fits(request)
            if fits:
                break
        for container in group:
            self.keep(container)
        return group if fits else []


@dataclass(frozen=True, slots=True)
class Swap:
    """Which replicas may leave, and whether that helps."""

    victims: tuple[ReplicaContainer, ...]
    """The replicas that make room for a successor."""
    has_place: bool
    """Whether a replica of the new version finds a place, once leaving replicas and victims are gone."""


def swap(
    places: Places,
    candidates: Sequence[ReplicaContainer],
    wanted: tuple[int, GpuRequest | None],
    kept: tuple[int, GpuRequest | None],
    most: int,
) -> Swap:
    """Choose at most `most` of the serving candidates to leave for replicas of the new version, and of the kept one.

    `wanted` and `kept`: how many replicas of each are to start, and what one asks for. If all find places anyway, any
    candidates may leave; otherwise only as many as it takes. Writes to `places`.
    """
    count, request = wanted
    victims: list[ReplicaContainer] = []
    placed = 0
    lacking = False
    for asked, is_new in [(request, True)] * count + [(kept[1], False)] * kept[0]:
        found = places.take(asked)
        if not found:
            others = [one for one in candidates if one not in victims]
            freed = places.take_after(others, asked, most - len(victims))
            victims += freed
            found = bool(freed)
        lacking |= not found
        placed += found and is_new
        if lacking:
            break
    if not lacking and not victims:
        victims += candidates[:most]
    return Swap(tuple(victims), has_place=placed > 0 or not count)


# ----------------------------------------------------------------------------------------------------
# GPUs that are kept for a replica that waits for its next try, and for successors of replicas that leave.


def hold_for_next_try(draft: Draft, outlook: ServiceOutlook) -> None:
    """Keep the places of failed replicas that wait for their next try from other services."""
    goal, spec = outlook.goal, outlook.spec
    if spec is None or outlook.name in draft.desired.demands:
        return
    missing = outlook.target - outlook.total()
    begins = goal.keep is not None and goal.spec is not None and not outlook.made_as(goal.version)
    if goal.version and backing_off(draft, outlook.name, goal.version) is not None:
        _hold(draft, outlook, goal.version, goal.spec or spec, max(missing, int(begins)))
    elif goal.keep and goal.keep_spec and backing_off(draft, outlook.name, goal.keep) is not None:
        # The first replica of the new version may have such a place: that version may be the cure.
        _hold(draft, outlook, goal.keep, goal.keep_spec, missing - int(begins))


def _hold(draft: Draft, outlook: ServiceOutlook, version: str, spec: ServiceSpec, count: int) -> None:
    for _ in range(count):
        if spec.gpu is None or not draft.gpus.place(outlook.name, spec.gpu):
            return
        outlook.held[version] = outlook.held.get(version, 0) + 1


def hold_for_successors(draft: Draft, outlook: ServiceOutlook, going: list[ReplicaOutlook]) -> None:
    """Keep what successors need beyond what leaving replicas free."""
    goal, spec = outlook.goal, outlook.spec
    most = len(going) - sum(outlook.held.values())
    if spec is None or most <= 0:
        return
    places = Places.after(draft.gpus, outlook.name, [replica.container for replica in going])
    wanted = [(goal.version, goal.spec or spec)] * (outlook.lacking() - outlook.held.get(goal.version, 0))
    if goal.keep_spec:
        wanted += [(goal.keep, goal.keep_spec)] * (outlook.kept_lacking() - outlook.held.get(goal.keep, 0))
    for version, made in wanted[:most]:
        uuids = places.budget.place(outlook.name, made.gpu) if made.gpu else ()
        if uuids and made.gpu:
            draft.gpus.hold(outlook.name, uuids, made.gpu.slot)
            outlook.held[version] = outlook.held.get(version, 0) + 1
