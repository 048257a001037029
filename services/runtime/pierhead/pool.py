"""The replicas of one service as this process sees them, and the calls that wait for one.

A call takes a replica (`take`, or `wait` when none has room) and gives it back (`release`). Everything here belongs to
one event loop; nothing awaits between looking at a count and changing it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from pierhead.budget import RetryBudget
from pierhead.connection import Connection
from pierhead.errors import NoReplica
from pierhead.policies import Policy
from pierhead.transports import Connect

REPORT_TRUSTED_S = 1.0
"""How long a replica's own word on its load counts."""

REPORT_PERIOD_S = 0.01
"""It is read this often at most: reading it costs more than it is worth on each reply."""

FULL_TRUSTED_S = 0.05
"""How long a replica that refused counts as full; then it is asked again."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replica is and whether it may be called; what a source of replicas tells."""

    name: str
    address: str
    draining: bool = False
    max_ongoing_requests: int = 0
    """0 = not known."""


class Replica:
    """One replica as this process sees it."""

    __slots__ = (
        "address", "closing", "connection", "full", "inflight", "limit", "listed_draining", "listed_limit", "name",
        "others", "others_until", "refuses", "reported_at",
    )  # fmt: skip

    def __init__(self, endpoint: Endpoint) -> None:
        self.address = endpoint.address
        self.connection: Connection
        self.inflight = 0
        """Calls of this process there."""
        self.others = 0
        """Calls of other processes there, by the replica's own last word."""
        self.others_until = 0.0
        self.full = False
        """Its last word on its load was a refusal."""
        self.reported_at = 0.0
        self.refuses = False
        """It said itself that it is draining; true until its connection breaks."""
        self.closing = False
        """No source lists it any more."""
        self.listed_limit = sys.maxsize
        self.limit = sys.maxsize
        """Requests it takes at a time: what the source says, or what its refusals teach."""
        self.update(endpoint)

    def update(self, endpoint: Endpoint) -> None:
        """Take over what a source says of it."""
        self.name = endpoint.name
        listed = endpoint.max_ongoing_requests or sys.maxsize
        if listed != self.listed_limit:
            self.limit = self.listed_limit = listed
        self.listed_draining = endpoint.draining
        self.closing = False

    def expire(self, now: float) -> None:
        """What it said of others' calls is old. One that refused is asked by one call at a time, not by all at once."""
        self.others = max(0, self.limit - self.inflight - 1) if self.full else 0
        self.others_until = now + FULL_TRUSTED_S

    def renewed(self) -> None:
        """Its connection broke: whoever answers there next may be another process."""
        self.refuses = False
        self.full = False
        self.others = 0
        self.limit = self.listed_limit

    @property
    def load(self) -> int:
        """Calls in flight there, as far as known."""
        return self.inflight + self.others

    @property
    def callable(self) -> bool:
        """Whether new calls may go there."""
        return self.connection.ready and not (self.listed_draining or self.refuses or self.closing)

    def describe(self) -> str:
        """The replica in a few words, for messages."""
        if self.listed_draining or self.refuses or self.closing:
            return f"{self.name} is draining"
        if not self.connection.ready:
            return f"{self.name} is not connected"
        limit = "" if self.limit == sys.maxsize else f" of {self.limit}"
        return f"{self.name} works on {self.load}{limit}"


class Lease:
    """One call's place at a replica. Holds no reference to the call: a call that is dropped must end at once."""

    __slots__ = ("_pool", "_replica", "left")

    def __init__(self, pool: Pool, replica: Replica) -> None:
        self._pool = pool
        self._replica = replica
        self.left = 0
        """Calls of this process that were at the replica when this one's end arrived."""

    def end(self, _: object = None) -> None:
        """Give the place back; called once."""
        self.left = self._replica.inflight - 1
        self._pool.release(self._replica)


class Pool:
    """The replicas of one service, over one transport."""

    def __init__(self, service: str, connect: Connect, clock: Callable[[], float] = time.monotonic) -> None:
        self.service = service
        self.budget = RetryBudget(clock())
        self.listed = False
        """Whether any source has answered yet."""
        self._clock = clock
        self._connect = connect
        self._replicas: dict[str, Replica] = {}
        self._callable: list[Replica] = []
        self._waiters: deque[tuple[asyncio.Future[Replica], Policy]] = deque()
        self._closing: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._changes: list[asyncio.Future[None]] = []
        self.closed = False

    # ---- what sources tell

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Replace the list. Replicas are known by address: one that stays keeps its connection and its counts."""
        self.listed = True
        wanted = {endpoint.address: endpoint for endpoint in endpoints}
        for address, replica in list(self._replicas.items()):
            if address not in wanted:
                replica.closing = True
                self._close_when_idle(replica)
        for address, endpoint in wanted.items():
            known = self._replicas.get(address)
            if known is not None:
                known.update(endpoint)
            else:
                replica = self._replicas[address] = Replica(endpoint)
                replica.connection = self._connect(address, self._watcher_of(replica))
        self._refresh()

    def replicas(self) -> Collection[Replica]:
        """Every replica that is known, callable or not."""
        return self._replicas.values()

    @property
    def has_callable(self) -> bool:
        """Whether any replica may be called, full or not."""
        return bool(self._callable)

    async def changed(self) -> None:
        """Return at the next change of which replicas may be called."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.append(future)
        await future

    def describe(self) -> str:
        """The replicas in one line, for messages."""
        if not self.listed:
            return "nothing has said yet where it is"
        if not self._replicas:
            return "no replica is known"
        return ", ".join(replica.describe() for replica in sorted(self._replicas.values(), key=lambda r: r.name))

    # ---- taking and giving back

    def take(self, policy: Policy, tried: Collection[Replica] = ()) -> Replica | None:
        """A replica with room, counted as taken; None when a call has to wait (also behind those that wait already)."""
        return None if self._waiters else self._take(policy, tried)

    async def wait(self, policy: Policy, *, first: bool = False) -> Replica:
        """Wait in line for a replica with room, counted as taken. Cancelling leaves the line.

        `first` is for a call that was refused: it had its turn already and does not go to the end.
        """
        future: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        entry = (future, policy)
        if first:
            self._waiters.appendleft(entry)
        else:
            self._waiters.append(entry)
        self._serve_waiters()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())  # a replica was handed over in the same turn
            else:
                future.cancel()
            raise

    def release(self, replica: Replica) -> None:
        """A call there is over."""
        replica.inflight -= 1
        if self._waiters:
            # How the call ended is known a moment later; a refusal made no room.
            if not replica.full:
                self._serve_waiters()
            elif replica.others:
                self._look_again()
            else:
                self._look_at(self._clock())
        if replica.closing and replica.inflight == 0:
            self._close_when_idle(replica)

    # ---- what calls learn

    def wants_report(self, replica: Replica, now: float) -> bool:
        """Whether to read a reply's word on the load: it matters where there is a choice, or where there are others."""
        matters = replica.others or len(self._callable) > 1
        return replica.full or bool(matters and now - replica.reported_at > REPORT_PERIOD_S)

    def report(self, replica: Replica, ongoing: int, ours: int, now: float) -> None:
        """A reply said how many requests the replica has in flight; `ours` of them were this process's at its arrival.

        Not `replica.inflight`, which has moved on: what has ended since would be taken for others' calls.
        """
        replica.full = False
        replica.others = max(0, ongoing - ours)
        replica.reported_at = now
        replica.others_until = now + REPORT_TRUSTED_S
        self._serve_waiters()

    def refused(self, replica: Replica, ongoing: int, ours: int) -> None:
        """The replica is full: what it has in flight is its limit. Others may make room there any time."""
        replica.full = True
        replica.limit = min(replica.limit, max(1, ongoing))
        replica.others = max(0, replica.limit - ours)
        replica.others_until = self._clock() + FULL_TRUSTED_S

    def refuses(self, replica: Replica) -> None:
        """The replica drains: leave it alone for good."""
        replica.refuses = True
        self._refresh()

    async def close(self) -> None:
        """Close every connection; calls in flight fail."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        for future, _ in self._waiters:
            if not future.done():
                future.set_exception(NoReplica(f"calls to {self.service} were closed by this process"))
        replicas, self._replicas, self._callable = list(self._replicas.values()), {}, []
        for replica in replicas:
            await replica.connection.close()
        if self._closing:
            await asyncio.wait(self._closing)

    # ---- inside

    def _take(self, policy: Policy, tried: Collection[Replica] = ()) -> Replica | None:
        now = self._clock()
        candidates = []
        for replica in self._callable:
            if replica.others and now >= replica.others_until:
                replica.expire(now)
            if replica.inflight + replica.others < replica.limit and replica not in tried:
                candidates.append(replica)
        if not candidates:
            return None
        chosen = policy.choose(candidates)
        chosen.inflight += 1
        return chosen

    def _serve_waiters(self) -> None:
        """Hand replicas with room to those at the head of the line."""
        while self._waiters:
            future, policy = self._waiters[0]
            if future.done():
                self._waiters.popleft()
                continue
            replica = self._take(policy)
            if replica is None:
                self._look_again()
                return
            self._waiters.popleft()
            future.set_result(replica)

    def _watcher_of(self, replica: Replica) -> Callable[[], None]:
        def changed() -> None:
            if not replica.connection.ready:
                replica.renewed()
            self._refresh()

        return changed

    def _refresh(self) -> None:
        self._callable = sorted((r for r in self._replicas.values() if r.callable), key=lambda replica: replica.name)
        self._serve_waiters()
        changes, self._changes = self._changes, []
        for future in changes:
            if not future.done():
                future.set_result(None)

    def _look_again(self) -> None:
        """What replicas said of others' calls wears off without an event: look again then."""
        times = [replica.others_until for replica in self._callable if replica.others]
        if times:
            self._look_at(min(times))

    def _look_at(self, when: float) -> None:
        """Look at the line a moment after `when`."""
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, when - self._clock()) + 0.001
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._serve_waiters()

    def _close_when_idle(self, replica: Replica) -> None:
        if replica.inflight or self._replicas.get(replica.address) is not replica:
            return
        del self._replicas[replica.address]
        task = asyncio.get_running_loop().create_task(replica.connection.close(), name=f"close {replica.address}")
        # The pool owns these: `close` waits for them.
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
