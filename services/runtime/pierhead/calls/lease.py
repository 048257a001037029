"""The lease that a call has on a replica while it is in flight there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pierhead.calls.replica import Replica

if TYPE_CHECKING:
    from pierhead.calls.pool import Pool


class CallPlace:
    """One call's place at a replica. Does not refer to the call: a call that is no longer referenced ends at once."""

    __slots__ = ("_pool", "began", "left", "replica", "trial")

    def __init__(self, pool: Pool, replica: Replica, began: float) -> None:
        self._pool = pool
        self.replica = replica
        self.began = began
        self.left = -1
        """Calls of this process that were at the replica when this call ended; -1 = it has not ended."""
        self.trial = False
        """Whether this call is the trial that decides if the replica returns into service."""
        replica.inflight += 1
        replica.load += 1

    def end(self, _: object = None) -> None:
        """Return the place; a second call does nothing."""
        if self.left >= 0:
            return
        replica = self.replica
        self.left = replica.inflight = replica.inflight - 1
        replica.load -= 1
        self._pool.released(replica, self.trial)
