"""One call's hold on a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pierhead.calls.replica import Replica

if TYPE_CHECKING:
    from pierhead.calls.pool import Pool


class Lease:
    """One call's place at a replica. Holds no reference to the call: a call that no code holds ends at once."""

    __slots__ = ("_pool", "began", "left", "replica", "trial")

    def __init__(self, pool: Pool, replica: Replica, began: float) -> None:
        self._pool = pool
        self.replica = replica
        self.began = began
        """When the replica was taken, in monotonic seconds."""
        self.left = -1
        """Calls of this process that were at the replica when this one's end arrived; -1 = it has not."""
        self.trial = False
        """Whether it decides if the replica comes back into service."""
        replica.inflight += 1
        replica.load += 1

    def end(self, _: object = None) -> None:
        """Give the place back; nothing happens the second time."""
        if self.left >= 0:
            return
        replica = self.replica
        self.left = replica.inflight = replica.inflight - 1
        replica.load -= 1
        self._pool.released(replica, self.trial)
