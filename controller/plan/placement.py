"""Assigns GPUs to new replicas. Pure.

A replica holds whole GPUs, or a slot of one: a number of bytes of its memory, or a fraction of it. Slots share a GPU as
far as they fit; a whole GPU is not shared. A GPU or a slot is taken while any container holds it, running or not: it is
free only when the removal of the container has succeeded.

A replica that sleeps holds nothing by its label, and its GPUs are given to others last. Memory that is in use and that
no slot accounts for belongs to it, to other processes, or to a former replica's processes that have not ended. It is
taken, and a GPU with such memory is not assigned whole. `IDLE_BYTES` of it are ignored; for a whole GPU on which
replicas sleep, one part in `SLEEPERS_PART` of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..model.actions import CreateContainer
from ..model.nodes import Node, fits
from ..model.observed import Observed
from ..model.spec import GPU_PARTS, GpuRequest, GpuSlot, _number, size_words, slot_words
from ..model.text import counted
from ..model.world import Gpu, ReplicaContainer

IDLE_BYTES = 1024**3
"""Memory in use beyond the slots that is ignored: drivers, displays and monitors use some on an idle GPU, and replicas
use more than their slots (the CUDA context of a process is some hundred MiB)."""
SLEEPERS_PART = 10
"""As much of a GPU as vLLM leaves free unless it is told otherwise (gpu_memory_utilization is 0.9)."""
FRESH_S = 15.0
"""The age in seconds from which a reading of the memory in use is outdated."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The GPUs for one replica, and the numbers of the plan's steps that it has to wait for."""

    gpus: tuple[Gpu, ...]
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why there is no place for a replica now, in one sentence with numbers."""

    reason: str
    blocked: bool = True
    """False when waiting may help: processes may end, or the memory in use is still being read."""
    is_brief: bool = False
    """Whether there is a place, and the machine has no time for a start at the moment."""


@dataclass(slots=True)
class _Card:
    """One GPU in the budget. Amounts are bytes of its memory; parts of `GPU_PARTS` where its memory is not known."""

    gpu: Gpu
    order: int
    size: int
    owners: list[str] = field(default_factory=list)
    """Services whose replicas hold all of it and stay."""
    used: int = 0
    """Amount of the slots that stay."""
    slots: int = 0
    sharers: dict[str, int] = field(default_factory=dict)
    """By service: how many of those slots it has."""
    strangers: int = 0
    """Memory in use by processes that are no replicas, or by replicas that sleep."""
    asleep: int = 0
    """Amount of the replicas that sleep."""
    leaving: int = 0
    """Amount held by the containers that the steps `freed_by` remove; `size` for a container that holds all."""
    freed_by: set[int] = field(default_factory=set)
    left: int = 0
    """Amount that is free for slots; -1 if a replica holds all of it. Cached, because it is read most often."""

    def __post_init__(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Work out what is left, after a change of anything above."""
        self.left = -1 if self.owners else self.size - self.used - self.strangers

    @property
    def size_known(self) -> bool:
        return bool(self.gpu.memory_bytes)  # 0 bytes = the driver does not know it

    @property
    def free(self) -> int:
        return max(self.left, 0)

    @property
    def is_idle(self) -> bool:
        """Whether the memory in use by strangers lets it be assigned whole."""
        return self.strangers <= (self.size // SLEEPERS_PART if self.asleep else 0)

    def copy(self) -> _Card:
        return replace(self, owners=[*self.owners], sharers={**self.sharers}, freed_by={*self.freed_by})

    def amount(self, slot: GpuSlot) -> int | None:
        """The amount of a slot here; None for bytes of a GPU whose memory is not known."""
        if slot.fraction is not None:
            return slot.of(self.size)
        return slot.memory_bytes if self.size_known else None

    def taken_by(self, slot: GpuSlot | None) -> int:
        """The amount of a slot; all of it for None, and for a slot that cannot be measured."""
        amount = None if slot is None else self.amount(slot)
        return self.size if amount is None else amount

    def hold(self, service: str, slot: GpuSlot | None) -> None:
        amount = None if slot is None else self.amount(slot)
        if amount is None:  # a slot that cannot be measured shares its GPU with no other
            self.owners.append(service)
        else:
            self.used += amount
            self.slots += 1
            self.sharers[service] = self.sharers.get(service, 0) + 1
        self.settle()

    def release(self, service: str, slot: GpuSlot | None, step: int) -> None:
        amount = None if slot is None else self.amount(slot)
        if amount is None:
            self.owners.remove(service)
            self.leaving = self.size
        else:
            self.used -= amount
            self.leaving += amount
            self.slots -= 1
            self.sharers[service] -= 1
        self.freed_by.add(step)
        self.settle()


@dataclass(slots=True)
class GpuBudget:
    """Free and taken GPUs while one plan is being made."""

    awaits_reading: bool = False
    """Whether the memory in use is being read: a GPU that no container holds may still be in use."""
    awaits_memory: bool = False
    """Whether a replica was refused only for memory in use, or because there is no reading of it."""
    nodes: tuple[Node, ...] = ()
    """Of an engine that has several."""
    _cards: dict[str, _Card] = field(default_factory=dict)
    _parts: dict[str, list[_Card]] = field(default_factory=dict)
    """GPU UUID -> its MIG devices."""
    _pools: dict[GpuRequest, list[_Card]] = field(default_factory=dict)
    _amounts: dict[GpuRequest, list[tuple[_Card, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, observed: Observed, now: float) -> GpuBudget:
        """Read the holders of GPUs from a snapshot, creations in progress included. `now` as in `plan`."""
        reading = observed.gpu_reading
        budget = cls(awaits_reading=reading is not None and now - reading.at > FRESH_S, nodes=observed.nodes)
        for order, gpu in enumerate(gpu for gpu in observed.gpus if gpu.uuid not in observed.gpu_faults):
            card = _Card(gpu, order, gpu.memory_bytes or GPU_PARTS)
            budget._cards[gpu.uuid] = card
            if gpu.parent:
                budget._parts.setdefault(gpu.parent, []).append(card)
        for uuid, name in sorted(observed.foreign_gpu_holders.items()):
            budget.hold(f"container {name}", (uuid,), None)
        present = {(container.name, container.gpus, container.gpu_slot) for container in observed.containers}
        for container in observed.containers:
            if container.id in observed.asleep:
                budget._note_sleeper(container)
            else:
                budget.hold(container.service, container.gpus, container.gpu_slot)
        for action in (one for one in observed.in_progress if isinstance(one, CreateContainer)):
            uuids = tuple(gpu.uuid for gpu in action.gpus)
            # A replica has its predecessor's name, and often its GPU: one of the two is there at a time.
            if (action.target, uuids, action.gpu_slot) not in present:
                budget.hold(action.service, uuids, action.gpu_slot)
        if reading is not None and not budget.awaits_reading:
            budget._find_strangers(observed, reading.used_bytes)
        return budget

    def free_bytes(self, uuid: str) -> int | None:
        """Memory of a GPU that a new slot could have; None where the GPU's memory is not known."""
        card = self._cards.get(uuid)  # one that is not used because of a fault has none
        return card.free if card is not None and card.size_known else None

    def free_after(self, container: ReplicaContainer, step: int = 0) -> None:
        """Count what a container holds as free for replicas that wait for that step (0: a trial's)."""
        for card in self._named(container.gpus):
            card.release(container.service, container.gpu_slot, step)

    def take(self, service: str, request: GpuRequest, preferred: tuple[str, ...]) -> Grant | Shortage:
        """Return the GPUs for one replica and the steps to wait for, or why there are not enough.

        `preferred` are the GPUs of the replica that the new one replaces. Then come GPUs on which nothing sleeps, and
        of those the free ones before those about to be free.
        """
        granted = self._take(service, request, preferred)
        self.awaits_memory |= isinstance(granted, Shortage) and not granted.blocked
        return granted

    def why_not(self, request: GpuRequest) -> str:
        """Why one more replica has no place, in words with numbers."""
        return self._shortage(request, self._pool(request)).reason

    def room(self, service: str, request: GpuRequest, most: int) -> int:
        """How many more replicas would find a place, at most `most`. Takes nothing, and waits for no reading."""
        trial = self.trial()
        return next((fits for fits in range(most) if not trial.place(service, request)), max(most, 0))

    def trial(self) -> GpuBudget:
        """A copy to try changes on; it waits for no reading of the memory in use."""
        cards = {uuid: card.copy() for uuid, card in self._cards.items()}
        parts = {uuid: [cards[card.gpu.uuid] for card in listed] for uuid, listed in self._parts.items()}
        return GpuBudget(nodes=self.nodes, _cards=cards, _parts=parts)

    def fits(self, service: str, request: GpuRequest) -> bool:
        """Whether there is a place for one more replica."""
        return bool(self._choose(service, request, ()))

    def is_free(self, service: str, request: GpuRequest, uuids: tuple[str, ...]) -> bool:
        """Whether a replica may have exactly these GPUs."""
        return {card.gpu.uuid for card in self._choose(service, request, uuids)} == set(uuids)

    def in_use_by_others(self, request: GpuRequest) -> frozenset[str]:
        """The GPUs for a request on which processes that are no replicas, or replicas that sleep, use memory."""
        return frozenset(card.gpu.uuid for card in self._pool(request) if card.strangers)

    def place(self, service: str, request: GpuRequest) -> tuple[str, ...]:
        """Take a place as `take` does; return its GPUs, none when there is no place."""
        chosen = self._choose(service, request, ())
        for card in chosen:
            card.hold(service, request.slot)
        return tuple(card.gpu.uuid for card in chosen)

    def hold(self, holder: str, uuids: Iterable[str], slot: GpuSlot | None) -> None:
        """Count GPUs, or a slot of each, as taken, even if others hold them."""
        for card in self._named(uuids):
            card.hold(holder, slot)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _take(self, service: str, request: GpuRequest, preferred: tuple[str, ...]) -> Grant | Shortage:
        pool, chosen = self._pool(request), self._choose(service, request, preferred)
        if self.awaits_reading and pool and (chosen or not all(card.size_known for card in pool)):
            return Shortage(f"it asks for {asked_words(request)}: the memory in use is being read", blocked=False)
        if not chosen:
            return self._shortage(request, pool)
        after: set[int] = set()
        for card in chosen:
            if card.leaving > (0 if request.slot is None else card.free - (card.amount(request.slot) or 0)):
                after |= card.freed_by
            card.hold(service, request.slot)
        return Grant(tuple(card.gpu for card in chosen), tuple(sorted(after)))

    def _choose(self, service: str, request: GpuRequest, preferred: tuple[str, ...]) -> list[_Card]:
        """The GPUs for one replica; none when there are not enough."""
        if request.slot:
            return self._best(service, request, preferred)
        return _whole(self._pool(request), request, preferred)

    def _named(self, uuids: Iterable[str]) -> Iterable[_Card]:
        """The GPUs of these names; for a GPU that was divided into MIG devices, its parts."""
        for uuid in uuids:
            if uuid in self._cards:
                yield self._cards[uuid]
            yield from self._parts.get(uuid, ())

    def _note_sleeper(self, container: ReplicaContainer) -> None:
        for card in self._named(container.gpus):
            card.asleep += card.taken_by(container.gpu_slot)

    def _find_strangers(self, observed: Observed, used_bytes: Mapping[str, int]) -> None:
        """Compare the memory in use with what running containers may use: the rest belongs to strangers."""
        explained: dict[str, int] = {}
        awake = [one for one in observed.containers if one.state.is_up and one.id not in observed.asleep]
        running = [(one.gpus, one.gpu_slot) for one in awake]
        running += [((uuid,), None) for uuid in observed.foreign_gpu_holders]
        for uuids, slot in running:
            for card in self._named(uuids):
                explained[card.gpu.uuid] = explained.get(card.gpu.uuid, 0) + card.taken_by(slot)
        for uuid, card in self._cards.items():
            unexplained = used_bytes.get(uuid, 0) - explained.get(uuid, 0)
            if card.size_known and unexplained > IDLE_BYTES:
                card.strangers = unexplained
                card.settle()

    def _pool(self, request: GpuRequest) -> list[_Card]:
        """The GPUs that may be given to a request, free or not. Software can use one MIG device at a time."""
        pool = self._pools.get(request)
        if pool is None:
            others = {node.name for node in self.nodes if not fits(node, request.constraints)}
            pool = [
                card
                for uuid, card in self._cards.items()
                if (not request.device_ids or uuid in request.device_ids)
                and request.takes(card.gpu.name)
                and card.gpu.node not in others
                and not (request.count > 1 and card.gpu.is_mig)
            ]
            self._pools[request] = pool
        return pool

    def _best(self, service: str, request: GpuRequest, preferred: tuple[str, ...]) -> list[_Card]:
        """The GPU for a slot; empty when it fits on none."""
        pairs = self._amounts.get(request)
        if pairs is None:
            slot = request.slot or GpuSlot()
            measured = [(card, card.amount(slot)) for card in self._pool(request)]
            pairs = self._amounts[request] = [(card, amount) for card, amount in measured if amount is not None]
        before = [pair for pair in pairs if pair[0].gpu.uuid in preferred] if preferred else []
        fitting = _fitting(before) or _fitting(pairs)
        rank = _packing if request.placement == "pack" else _spreading(service)

        def value(card: _Card, room: int) -> tuple[bool, bool, tuple[float, ...]]:
            return room < card.asleep, card.leaving > room, rank(card, room)

        return [min(fitting, key=lambda one: value(*one))[0]] if fitting else []

    def _shortage(self, request: GpuRequest, pool: list[_Card]) -> Shortage:
        asked = asked_words(request)
        largest = max((len(cards) for cards in _by_node(pool).values()), default=0)
        if self.nodes and largest < request.count:
            return Shortage(f"it asks for {asked} {self._never_words(request, largest)}")
        if not self._cards:
            return Shortage(
                f"it asks for {asked} and this machine offers none: check the driver and CDI (`docker info`)"
            )
        missing = [uuid for uuid in sorted(request.device_ids) if uuid not in self._cards]
        if missing and len(pool) < request.count:
            known = ", ".join(self._cards)
            return Shortage(f"it asks for GPU {', '.join(missing)}, which this machine does not have; it has {known}")
        if not any(request.takes(card.gpu.name) for card in self._cards.values()):
            names = ", ".join(sorted({card.gpu.name for card in self._cards.values()}))
            return Shortage(f'it asks for {asked} whose name has "{request.kind}" in it; this machine has {names}')
        if not pool:
            return Shortage(
                f"it asks for {asked} and all here are MIG devices, of which software can use one at a time"
            )
        if request.slot is None:
            free, most = _whole_free(pool), max(map(len, _by_node(pool).values()))
            if request.count > most and len({card.gpu.node for card in pool}) > 1:
                return Shortage(f"it asks for {asked} of one machine, and none has more than {most}: ask for fewer")
            words = f"it asks for {asked} and {len(free)} of {len(pool)} are free: {_who_is_in_the_way(pool)}"
            if len(free) >= request.count:
                most = max(len(cards) for cards in _by_node(free).values())
                words = f"it asks for {asked} of one machine, and the most that one has free is {most} of {len(pool)}"
            freed = sum(not card.owners and not card.slots for card in pool)
            return Shortage(words, blocked=freed < request.count)
        return _slot_shortage(request.slot, pool)

    def _never_words(self, request: GpuRequest, largest: int) -> str:
        """Why no node can ever have a replica, in words that follow what it asks for."""
        if not self._cards:
            return "and no node lists any: repeat `pierhead node join` where there are some"
        where = f"that fulfils {', '.join(request.constraints)}" if request.constraints else ""
        if not largest:
            return f"and no node {where} has any: change deploy.placement.constraints, or the nodes' labels"
        nodes = f"a node {where}".rstrip()
        return f"of one machine, and the most that {nodes} has is {largest}: ask for fewer, or add a node that has more"


def asked_words(request: GpuRequest) -> str:
    """What a request asks for: "1 GPU", "16 GiB of a GPU", "0.5 of a GPU"."""
    if request.slot is None:
        return counted(request.count, "GPU")
    return f"{slot_words(request.slot)} of a GPU"


# ------------------------------------------------------------------------------------------------------------- choosing


def _whole_free(pool: list[_Card]) -> list[_Card]:
    return [card for card in pool if not card.owners and not card.slots and card.is_idle]


def _whole(pool: list[_Card], request: GpuRequest, preferred: tuple[str, ...]) -> list[_Card]:
    """The GPUs for a request of whole ones, all of one machine; empty when none has enough."""
    free = sorted(
        _whole_free(pool),
        key=lambda card: (card.gpu.uuid not in preferred, card.asleep > 0, card.leaving > 0, card.order),
    )
    enough = (cards for cards in _by_node(free).values() if len(cards) >= request.count)
    return next(enough, [])[: request.count]


def _by_node(cards: Iterable[_Card]) -> dict[str, list[_Card]]:
    """The GPUs of each machine, in the order in which the machines come."""
    found: dict[str, list[_Card]] = {}
    for card in cards:
        found.setdefault(card.gpu.node, []).append(card)
    return found


def _fitting(pairs: Iterable[tuple[_Card, int]]) -> list[tuple[_Card, int]]:
    """The GPUs on which a slot of that amount fits, and the room that it leaves."""
    return [(card, card.left - amount) for card, amount in pairs if card.left >= amount]


def _packing(card: _Card, room: int) -> tuple[float, ...]:
    """A GPU that is in use already, and of those the one with the least room left."""
    return not (card.slots or card.strangers), room, card.order


def _spreading(service: str) -> Callable[[_Card, int], tuple[float, ...]]:
    """A GPU with the fewest replicas of this service, and of those the emptiest."""

    def rank(card: _Card, room: int) -> tuple[float, ...]:
        return card.sharers.get(service, 0), (card.used + card.strangers) / card.size, card.order

    return rank


# ------------------------------------------------------------------------------------------------------------- in words


def _who_is_in_the_way(pool: list[_Card]) -> str:
    """Of whole GPUs: "3 held by ranker, 1 shared by a, b, 1 with 2.1 GiB in use by other processes"."""
    held = _by_count(f"held by {card.owners[-1]}" for card in pool if card.owners)
    shared = _by_count(f"shared by {_sharers(card)}" for card in pool if card.slots and not card.owners)
    strange = [card for card in pool if not (card.is_idle or card.slots or card.owners)]
    if strange:
        sizes, some_sleep = {card.strangers for card in strange}, any(card.asleep for card in strange)
        most = "up to " if len(sizes) > 1 else ""
        shared.append(f"{len(strange)} with {most}{size_words(max(sizes))} in use by {_strangers(some_sleep)}")
    return ", ".join(held + shared)


def _slot_shortage(slot: GpuSlot, pool: list[_Card]) -> Shortage:
    """Of slots: "3 held by ranker, 1 has 2.1 GiB free"."""
    parts = _by_count(f"held by {card.owners[-1]}" for card in pool if card.owners)
    open_cards = [card for card in pool if not card.owners]
    unknown = [card for card in open_cards if card.amount(slot) is None]
    known = [card for card in open_cards if card.amount(slot) is not None]
    if known:
        roomiest = max(known, key=lambda card: card.free if slot.fraction is None else card.free / card.size)
        has = "has" if len(known) == 1 else "have at most"
        free = (
            size_words(roomiest.free)
            if slot.fraction is None
            else _number(roomiest.free * GPU_PARTS // roomiest.size / GPU_PARTS)
        )
        use = f" ({_strangers(roomiest.asleep)} use {size_words(roomiest.strangers)})" if roomiest.strangers else ""
        parts.append(f"{len(known)} {has} {free} free{use}")
    if unknown:
        parts.append(
            f"the memory of {len(unknown)} is not known, as nvidia-smi cannot be asked: write x-serve.gpu.fraction"
        )
    words = f"it asks for {slot_words(slot)} of a GPU and 0 of {len(pool)} GPUs fit: {', '.join(parts)}"
    would_fit = any(card.size - card.used >= (card.amount(slot) or 0) for card in known)
    return Shortage(words, blocked=not would_fit)


def _strangers(some_sleep: object) -> str:
    return "replicas that sleep or other processes" if some_sleep else "other processes"


def _sharers(card: _Card) -> str:
    return ", ".join(sorted(service for service, slots in card.sharers.items() if slots))


def _by_count(words: Iterable[str]) -> list[str]:
    """ "2 held by a", the highest count first."""
    return [f"{count} {one}" for one, count in sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))]
