"""Detects GPUs with a fault, on which no replica may be placed. No I/O; it keeps what earlier ticks have shown.

    gone      the engine no longer lists it, and a replica holds it
    failing   replicas of one version fail on it repeatedly, and work on another GPU
    marked    an operator marked it

No replica is placed on a GPU with a mark. The mark "gone" ends when the engine lists the GPU again. The mark "failing"
ends when the GPU disappears and returns (an operator has reset it), or when the version fails on other GPUs as well. An
operator can end any mark.

The driver's Xid errors are in the kernel's log, which no container can read. Here only their effect on replicas shows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ..model.observed import Observed
from ..model.world import FailureKey, GpuFault, ReplicaContainer, ReplicaHealth

GONE_AFTER_S = 60.0
"""A GPU must be missing for this time: the list is read every half minute, and CDI files are rewritten in place."""
STRIKES = 3
"""Failures in a row on one GPU."""


@dataclass(frozen=True, slots=True)
class Unmark:
    """A GPU may be used again. `asked`: an operator did it."""

    uuid: str
    why: str
    asked: bool = False


@dataclass(slots=True)
class GpuWatch:
    """The failures on each GPU, and the GPUs listed, since the controller's start."""

    _known: set[str] = field(default_factory=set)
    _missing_since: dict[str, float] = field(default_factory=dict)
    _strikes: dict[tuple[str, FailureKey], int] = field(default_factory=dict)
    _away: set[str] = field(default_factory=set)

    def failed(self, key: FailureKey, gpus: Iterable[str]) -> None:
        """A replica of a version has failed on these GPUs."""
        for uuid in gpus:
            self._strikes[uuid, key] = self._strikes.get((uuid, key), 0) + 1

    def forget(self, uuid: str) -> None:
        """Forget the failures on a GPU, because an operator has removed its mark."""
        self._strikes = {key: count for key, count in self._strikes.items() if key[0] != uuid}
        self._missing_since.pop(uuid, None)

    def look(
        self,
        observed: Observed,
        faults: Mapping[str, GpuFault],
        now: float,
        proven: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[GpuFault | Unmark, ...]:
        """Return the changes of marks after a snapshot. If no GPU is listed at all, the list has failed.

        `proven`: the version of each service that is known to work, where there is one. Another version may itself be
        the fault, so its failures do not count against the GPU.
        """
        listed = {gpu.uuid for gpu in observed.gpus}
        if not listed:
            return ()
        if listed - self._known:
            # The first look, or new names: an index became a UUID, or a MIG layout changed. A missing GPU may then
            # have another name.
            self._known = set(listed)
        well = self._forgive(observed)
        counted = {key for _, key in self._strikes if proven.get(key[0], key[1]) == key[1] or well.get(key)}
        gone = self._gone(observed, faults, listed, now)
        failing = self._failing(faults, listed, well, counted, now)
        return (*gone, *failing, *self._back(faults, listed))

    def _gone(
        self, observed: Observed, faults: Mapping[str, GpuFault], listed: set[str], now: float
    ) -> list[GpuFault | Unmark]:
        held = {uuid: one.name for one in observed.containers if one.state.is_up for uuid in one.gpus}
        missing = {uuid for uuid in held if uuid in self._known and uuid not in listed}
        self._missing_since = {uuid: self._missing_since.get(uuid, now) for uuid in sorted(missing)}
        return [
            GpuFault(uuid, f"the engine does not list it any more, and {held[uuid]} holds it", now, "gone")
            for uuid, since in self._missing_since.items()
            if now - since >= GONE_AFTER_S and uuid not in faults
        ]

    def _failing(
        self,
        faults: Mapping[str, GpuFault],
        listed: set[str],
        well: Mapping[FailureKey, set[str]],
        counted: Collection[FailureKey],
        now: float,
    ) -> list[GpuFault | Unmark]:
        changes: list[GpuFault | Unmark] = []
        for (uuid, key), strikes in sorted(self._strikes.items()):
            if strikes < STRIKES or uuid not in listed or key not in counted:
                continue
            if self._fails_elsewhere(uuid, key):
                if uuid in faults and faults[uuid].kind == "failing":
                    changes.append(Unmark(uuid, f"version {key[1]} of {key[0]} fails on other GPUs as well"))
            elif uuid not in faults and (well.get(key) or listed - set(faults) - {uuid}):
                others = f", and work on {', '.join(sorted(well[key]))}" if well.get(key) else ""
                words = f"replicas of {key[0]} failed on it {strikes} times in a row{others}"
                changes.append(GpuFault(uuid, words, now, "failing"))
        return changes

    def _fails_elsewhere(self, uuid: str, key: FailureKey) -> bool:
        counts = [count for (other, whose), count in self._strikes.items() if other != uuid and whose == key]
        return max(counts, default=0) >= STRIKES

    def _back(self, faults: Mapping[str, GpuFault], listed: set[str]) -> list[GpuFault | Unmark]:
        self._away = {uuid for uuid in self._away | (set(faults) - listed) if uuid in faults}
        back = sorted(
            uuid for uuid, fault in faults.items() if uuid in listed and uuid in self._away and fault.kind != "marked"
        )
        for uuid in back:
            self._away.discard(uuid)
            self.forget(uuid)
        return [Unmark(uuid, "the engine lists it again") for uuid in back]

    def _forgive(self, observed: Observed) -> Mapping[FailureKey, set[str]]:
        """Forget strikes of GPUs on which a replica of that version is ready, and of versions that are gone.

        Returns the GPUs on which each version is well.
        """
        well: dict[FailureKey, set[str]] = {}
        for container in observed.containers:
            if container.health is ReplicaHealth.READY:
                well.setdefault((container.service, container.version), set()).update(container.gpus)
        present = {(container.service, container.version) for container in observed.containers} | set(observed.failures)
        self._strikes = {
            (uuid, key): count
            for (uuid, key), count in self._strikes.items()
            if key in present and uuid not in well.get(key, set())
        }
        return well


def with_fault(container: ReplicaContainer, faults: Mapping[str, GpuFault]) -> ReplicaContainer:
    """Return the replica with the reason why it cannot stay where it is, if one of its GPUs is gone."""
    gone = next((uuid for uuid in container.gpus if uuid in faults and faults[uuid].kind == "gone"), None)
    return container if gone is None else replace(container, gpu_fault=f"its GPU {gone} is gone: {faults[gone].reason}")
