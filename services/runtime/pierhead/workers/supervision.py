"""What a supervisor decides. Pure: what is seen of the workers, and the time, are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pierhead.replica.user_config import ConfigReport
from pierhead.workers.board import Seen, WorkerState

SHORTEST_S = 0.5
LONGEST_S = 30.0
"""Pauses before a worker that ended is started again: doubled each time, as a replica's by the controller."""

WELL_S = 60.0
"""A worker that has lived so long is no sign of what will become of the next one."""

HUNG_S = 10.0
"""A worker whose event loop has stood still for so long is ended: about as long as a controller takes to give up a
replica of a single process that does not answer."""

ReplicaState = Literal["starting", "ready", "draining"]


def verdict(workers: Sequence[Seen], *, was_ready: bool, draining: bool) -> tuple[ReplicaState, str]:
    """What the replica says of itself, and why it is not ready.

    It becomes ready when all workers are. From then on one that has ended is missed only when none is left: the others
    have the port. One that listens and is ill makes the replica so: it goes on getting its share of the connections.
    """
    if draining:
        return "draining", "told to stop"
    ready = sum(worker.state is WorkerState.READY for worker in workers)
    if not was_ready:
        if ready == len(workers):
            return "ready", ""
        return "starting", f"{ready} of {len(workers)} workers {'is' if ready == 1 else 'are'} ready"
    for number, worker in enumerate(workers, 1):
        if worker.state in (WorkerState.ILL, WorkerState.BROKEN):
            return "starting", f"worker {number}: {worker.detail}"
    if ready == 0:
        return "starting", "no worker is left; they are being started again"
    return "ready", ""


def config_of(wanted: str, workers: Sequence[Seen]) -> ConfigReport:
    """Which user_config the replica has when `wanted`, a digest, was given to its workers: that one once all who live
    have it, until then what the first has that does not.
    """
    told = [(number, worker.config) for number, worker in enumerate(workers, 1) if worker.config is not None]
    late = [config.applied for _, config in told if config.applied != wanted]
    errors = [f"worker {number}: {config.error}" for number, config in told if config.wanted == wanted and config.error]
    applied = late[0] if late else wanted if told else ""
    return ConfigReport(wanted, applied, errors[0] if errors else "")


def hung(worker: Seen, now_s: float, looking_since_s: float) -> bool:
    """Whether a worker's event loop stands still. `looking_since_s`: the supervisor itself has run from then on."""
    if worker.state is WorkerState.ABSENT:
        return False  # it loads, or is not there
    return now_s - max(worker.beat_s, looking_since_s) >= HUNG_S


class Backoff:
    """How long to wait before the next start."""

    def __init__(self) -> None:
        self._ends = 0

    def after(self, lived_s: float) -> float:
        """A worker has ended that lived so long; returns the pause in seconds."""
        if lived_s >= WELL_S:
            self._ends = 0
        pause = min(LONGEST_S, SHORTEST_S * float(2**self._ends))
        self._ends = min(self._ends + 1, 10)
        return pause
