"""Whether the machine has memory, process ids and time for one more replica. Pure.

Memory and process ids are a question of room: what one replica takes is known from those that run. Replicas that are
being started count as if they had taken nothing yet. Time is a question of turns: few replicas start at a time, and
while too many processes wait for a core, or for memory, only those start without which a service would have none, or
which take the place of others, one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..model.actions import CreateContainer
from ..model.machine import Footprint, Machine
from ..model.observed import Observed
from ..model.spec import ServiceSpec, size_words
from ..model.text import counted
from ..model.world import ContainerState, Gpu, ReplicaContainer, ReplicaHealth, is_asleep
from .placement import Shortage

KEPT_PART = 20
"""The machine keeps one part in this many of its memory, and of its process ids."""
MOST_KEPT_BYTES = 2 * 1024**3
STARTING_S = 30.0
"""A replica that is not ready counts as starting for this time: after it the reading has what it takes."""
LEAST_STARTS = 8
STARTS_PER_CORE = 2
MOST_LOAD_PER_CORE = 10
MOST_STALLED_PERCENT = 20


@dataclass(frozen=True, slots=True)
class _Resource:
    """Something of which every replica takes some."""

    each: int
    """What one replica takes; 0 = that is not known."""
    given: int
    """What one that runs gives back; 0 = that is not known."""
    free: int
    words: str
    """Why there is no room for one more, if there is none."""

    @property
    def room(self) -> int | None:
        """For how many more replicas there is enough; None = for any number, as far as is known."""
        if self.free <= 0:
            return 0
        return self.free // self.each if self.each else None

    @property
    def room_after_one(self) -> int:
        """0 if one more fits once another one has gone, else less than 0."""
        return min(0, (self.free + self.given) // max(self.each, 1) - 1)


@dataclass(slots=True)
class MachineBudget:
    """What the machine has left while one plan is being made."""

    machine: Machine | None
    """None = not known: nothing is bounded."""
    starting: Counter[str] = field(default_factory=Counter)
    """By service: replicas that are being started, and may not have taken yet what they need."""
    not_ready: Counter[str] = field(default_factory=Counter)
    """By service: these, and older ones that are not ready yet."""
    gpus: Mapping[str, Gpu] = field(default_factory=dict)
    pledged_bytes: int = 0
    """Memory into which the GPUs' memory of replicas goes that fall asleep."""

    @classmethod
    def of(cls, observed: Observed, now: float) -> MachineBudget:
        """Count the replicas that are being started. `now` as in `plan`."""
        there = {one.name for one in observed.containers}
        creating = [one for one in observed.in_progress if isinstance(one, CreateContainer) and one.target not in there]
        coming = [one for one in observed.containers if _is_coming(one, observed)]
        new = Counter(action.service for action in creating)
        starting = Counter(one.service for one in coming if now - one.begun_at < STARTING_S)
        gpus = {gpu.uuid: gpu for gpu in observed.gpus}
        budget = cls(observed.machine, starting + new, Counter(one.service for one in coming) + new, gpus)
        for one in observed.containers:
            mark = observed.retirements.get(one.id)
            if mark is None or mark.sleeping_since is None or mark.stopping_since is not None:
                continue
            if one.state.is_up and not is_asleep(one, mark):
                budget.pledged_bytes += _gpu_bytes(one, gpus) or 0
        return budget

    def take_sleeper(self, container: ReplicaContainer, spec: ServiceSpec) -> bool:
        """Take the memory that a replica may need to sleep; False = the machine, or its container, has not enough, or
        that is not known.

        What it holds of its GPUs is an upper bound: what moves is a part of it.
        """
        amount = _gpu_bytes(container, self.gpus)
        if not amount or self.machine is None or amount > self._free_bytes(self.machine):
            return False
        limit = spec.container.get("HostConfig", {}).get("Memory") or 0
        if limit and amount > limit:
            return False
        self.pledged_bytes += amount
        return True

    def left(self, spec: ServiceSpec) -> int | None:
        """How many more replicas of a service the machine has room for; None = that is not known. Less than 0: there is
        none either when as many of the service have gone.
        """
        rooms = [
            room if room else one.room_after_one for one in self._resources(spec) if (room := one.room) is not None
        ]
        return min(rooms, default=None)

    def shortage(self, spec: ServiceSpec, *, is_needed: bool) -> Shortage | None:
        """Why one more replica does not start now; None = it may.

        `is_needed`: it takes another one's place, or its service has none.
        """
        machine, starting = self.machine, self.starting.total()
        if machine is None:
            return None
        full = [one.words for one in self._resources(spec) if one.room == 0]
        if full:
            return Shortage(full[0], blocked=not (starting or self.pledged_bytes))
        words = self._turn_words(machine, spec.name, is_needed=is_needed)
        return Shortage(words, blocked=False, is_brief=True) if words else None

    def _turn_words(self, machine: Machine, service: str, *, is_needed: bool) -> str:
        """Why it is not the turn of one more replica, for which there is room; "" = it is."""
        starting, late = self.starting.total(), self.not_ready[service]
        most = max(LEAST_STARTS, STARTS_PER_CORE * machine.cores)
        overload = _overload_words(machine)
        if overload and (starting or not is_needed):
            return overload
        if starting >= most:
            return (
                f"{starting} replicas are starting, and at most {most} do at a time on {counted(machine.cores, 'core')}"
            )
        if late >= most:
            return f"{late} of its replicas are not ready yet: no more are started before that"
        return ""

    def take(self, service: str) -> None:
        """Count one more replica as starting."""
        self.starting[service] += 1
        self.not_ready[service] += 1

    def _resources(self, spec: ServiceSpec) -> list[_Resource]:
        """Memory and process ids, once the replicas that start have theirs."""
        machine = self.machine
        if machine is None:
            return []
        known = machine.footprints
        coming = self._coming(machine)
        each = known.get(spec.name, Footprint())
        reserved = spec.container.get("HostConfig", {}).get("MemoryReservation") or 0
        kept_ids = machine.most_processes // KEPT_PART
        free_ids = machine.most_processes - machine.processes
        bytes_each = max(each.memory_bytes, reserved)
        return [
            _Resource(
                bytes_each,
                each.memory_bytes,
                self._free_bytes(machine),
                _taken_words(size_words(bytes_each) if bytes_each else "")
                + f"{size_words(machine.free_bytes)} of {size_words(machine.memory_bytes)} of memory are free on this "
                f"machine, which keeps {size_words(_kept_bytes(machine))}: ask for fewer, or free memory",
            ),
            _Resource(
                each.processes,
                each.processes,
                free_ids - kept_ids - sum(count * one.processes for count, one in coming),
                _taken_words(str(each.processes) if each.processes else "")
                + f"{free_ids} of {machine.most_processes} process ids are free on this machine, which keeps "
                f"{kept_ids}: ask for fewer, or raise kernel.pid_max and kernel.threads-max",
            ),
        ]

    def _free_bytes(self, machine: Machine) -> int:
        """Memory that is free once the replicas that start, or fall asleep, have theirs."""
        starting = sum(count * one.memory_bytes for count, one in self._coming(machine))
        return machine.free_bytes - _kept_bytes(machine) - starting - self.pledged_bytes

    def _coming(self, machine: Machine) -> list[tuple[int, Footprint]]:
        known = machine.footprints
        return [(count, known[name]) for name, count in self.starting.items() if name in known]


def _kept_bytes(machine: Machine) -> int:
    return min(machine.memory_bytes // KEPT_PART, MOST_KEPT_BYTES)


def _gpu_bytes(container: ReplicaContainer, gpus: Mapping[str, Gpu]) -> int | None:
    """The memory of its GPUs that a replica holds; None = that is not known."""
    found = 0
    for uuid in container.gpus:
        size = gpus[uuid].memory_bytes if uuid in gpus else None
        if not size:
            return None
        slot = container.gpu_slot
        found += size if slot is None else slot.memory_bytes or slot.of(size) or 0
    return found


def _is_coming(one: ReplicaContainer, observed: Observed) -> bool:
    """Whether a replica is not ready yet."""
    is_new = one.state is ContainerState.CREATED or (one.state.is_up and one.health is ReplicaHealth.UNKNOWN)
    return is_new and one.id not in observed.retirements


def _taken_words(each: str) -> str:
    return f"one replica takes {each} and " if each else ""


def _overload_words(machine: Machine) -> str:
    """Why the machine has no time for a start; "" = it has."""
    if machine.load > MOST_LOAD_PER_CORE * machine.cores:
        cores = counted(machine.cores, "core")
        return f"this machine has no time for a start: {machine.load:.0f} processes want to run on {cores}"
    if machine.stalled_percent > MOST_STALLED_PERCENT:
        share = f"{machine.stalled_percent:.0f} % of the last 10 s"
        return f"this machine has no time for a start: processes waited for memory in {share}"
    return ""
