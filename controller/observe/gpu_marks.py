"""Marks on GPUs that must not be used: set by `gpu_faults`, or by an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..engines.base import Places
from ..errors import InvalidRequest
from ..model.actions import RemoveContainer
from ..model.observed import Observed
from ..model.world import GpuFault
from ..storage.events import EventLog
from ..storage.store import StateStore
from .gpu_faults import GpuWatch, Unmark


@dataclass(eq=False)
class GpuMarks:
    """Keeps the marks in the store and records each change as an event.

    `proven`: the version of each service that is known to work. No GPU is marked where the engine places.
    """

    _store: StateStore
    _events: EventLog
    _proven: Callable[[], Mapping[str, str]]
    _wake: Callable[[], None]
    _places: Places = "ours"
    _watch: GpuWatch = field(default_factory=GpuWatch)

    def look(self, observed: Observed, now: float) -> None:
        """Mark GPUs that are gone or on which replicas fail, and remove outdated marks."""
        if self._places != "ours":
            return
        for change in self._watch.look(observed, self._store.gpu_faults.snapshot(), now, self._proven()):
            self._change(change)

    def removed(self, action: RemoveContainer) -> None:
        """Count the failure of a replica, now removed, against its GPUs."""
        if action.failed:
            self._watch.failed((action.service, action.version), action.gpus)

    def mark(self, uuid: str, reason: str, now: float) -> None:
        """Place no replica on a GPU any more; its replicas stay. Raises StoreError."""
        self._change(GpuFault(uuid, reason, now, "marked"))

    def unmark(self, uuid: str) -> None:
        """Use a GPU again. Raises InvalidRequest (it has no mark), StoreError."""
        faults = self._store.gpu_faults
        if uuid not in faults:
            raise InvalidRequest(f"GPU {uuid} has no mark; with one: {', '.join(sorted(faults)) or 'none'}")
        self._change(Unmark(uuid, "removed by an operator", asked=True))
        self._watch.forget(uuid)

    def _change(self, change: GpuFault | Unmark) -> None:
        match change:
            case GpuFault(uuid, reason):
                self._store.mark_gpu(change)
                words = f"no replica is placed on GPU {uuid}: {reason}"
                self._events.record("gpu_marked", words, target=uuid, outcome="warning")
            case Unmark(uuid, why, asked):
                self._store.gpu_faults.drop(uuid, asked=asked)
                self._events.record("gpu_unmarked", f"GPU {uuid} is used again: {why}", target=uuid, outcome="ok")
        self._wake()
