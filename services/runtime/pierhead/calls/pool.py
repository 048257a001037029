"""The replicas of one service as this process sees them, and the calls that wait for one.

A call takes a lease on a replica (`take`, or a place in the queue when none has room) and ends it when it is over.
Everything here belongs to one event loop; nothing awaits between looking at a count and changing it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from random import Random
from typing import Any, Protocol
from weakref import WeakSet

from pierhead.calls import weights
from pierhead.calls.budget import RetryBudget
from pierhead.calls.lease import CallPlace
from pierhead.calls.outliers import Outliers, Standing, left_out, next_change
from pierhead.calls.queue import CallQueue, QueuePlace
from pierhead.calls.replica import FULL_TRUSTED_S, REFUSAL_TRUSTED_S, Replica, ReplicaListing
from pierhead.errors import NoReplica, PierheadError
from pierhead.lanes.client import Connect
from pierhead.policies.policy import RoutedCall
from pierhead.policies.router import PolicyRouter, Unranked
from pierhead.routing_stats import Stats
from pierhead.tasks import next_change as next_wake
from pierhead.tasks import wake_all

REPORT_TRUSTED_S = 1.0
"""How long a replica's reported load counts."""

REPORT_PERIOD_S = 0.01
"""Shortest time between two reads of the load: reading it on each reply costs more than it is worth."""

NEVER = float("inf")


class Timer(Protocol):
    """What `call_later` returns."""

    def cancel(self) -> None:
        """Do not call back."""
        ...


CallLater = Callable[[float, Callable[[], None]], Timer]


class Pool:
    """The replicas of one service, over one transport."""

    def __init__(
        self,
        service: str,
        connect: Connect,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
        ejected: Callable[[], None] = lambda: None,
        call_later: CallLater | None = None,
    ) -> None:
        self.service = service
        self.budget = RetryBudget(clock())
        self.listed = False
        """Whether any source has answered yet."""
        self.listing = ReplicaListing()
        self.closed = False
        self._clock = clock
        self._connect = connect
        self._ejected = ejected
        self._replicas: dict[str, Replica] = {}
        # Sorted by name, and replaced instead of changed: policies receive these lists themselves.
        self._callable: list[Replica] = []
        self._in_service: list[Replica] = []
        self._random = rng or Random()  # noqa: S311 - jitter, and shares of calls
        self._outliers = Outliers(self._random)
        self._weighed = False
        self._due = NEVER
        """When the next reported load or time out expires."""
        self._queue = CallQueue()
        self._serving = False
        self._call_later: CallLater = call_later or asyncio.get_running_loop().call_later
        self._timer: Timer | None = None
        self._timer_at = NEVER
        self._closing: set[asyncio.Task[None]] = set()
        self._changes: list[asyncio.Future[None]] = []
        self._watching: WeakSet[PolicyRouter] = WeakSet()

    # ---- what sources report

    def update(self, listing: ReplicaListing) -> None:
        """Take over a listing. A replica whose address stays keeps its connection and its counts."""
        self.listed = True
        former, self.listing = self.listing, listing
        if (listing.policy, listing.policy_kwargs) != (former.policy, former.policy_kwargs):
            for router in list(self._watching):
                router.follow(listing.policy, listing.policy_kwargs)
        before = self._listed_names()
        wanted = {endpoint.address: endpoint for endpoint in listing.endpoints}
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
                replica.lost_at = self._clock()
                replica.connection = self._connect(address, self._watcher_of(replica))
        self._refresh()
        self._report_gone(before - self._listed_names())

    def replicas(self) -> Collection[Replica]:
        """Every replica that is known, callable or not."""
        return self._replicas.values()

    def unreached(self) -> dict[str, str]:
        """The listed replicas to which no call goes, and why. For any thread."""
        now = self._clock()
        return {one.name: why for one in list(self._replicas.values()) if (why := one.unreached(now))}

    def watch(self, router: PolicyRouter) -> None:
        """Report gone replicas and the service's policy to `router`, for as long as it is referenced."""
        router.follow(self.listing.policy, self.listing.policy_kwargs)
        if router.watches_replicas or router.follows:
            self._watching.add(router)

    @property
    def has_callable(self) -> bool:
        """Whether any replica may be called, full or not."""
        return bool(self._callable)

    def hopeless(self) -> NoReplica | None:
        """The error of a call that would wait in vain; None = a replica may still come."""
        if self.listing.absence is None or self._callable:
            return None
        return self.listing.absence(self.service)

    async def changed(self) -> None:
        """Return at the next change of which replicas may be called."""
        await next_wake(self._changes)

    async def drained(self) -> None:
        """Return once no replica is left: those that no source lists any more go when their calls have ended."""
        while self._replicas:
            await self.changed()

    def describe(self) -> str:
        """The replicas in one line, for messages."""
        if not self.listed:
            return "nothing has said yet where it is"
        if not self._replicas:
            return "no replica is known"
        now = self._clock()
        return ", ".join(r.describe(now) for r in sorted(self._replicas.values(), key=lambda r: r.name))

    # ---- taking and returning

    def take(
        self, router: PolicyRouter, call: RoutedCall, now: float, tried: Collection[Replica] = ()
    ) -> CallPlace | None:
        """A lease on a replica with room that is not in `tried`; None when the call has to wait, also behind others.

        Raises UserCodeError when the policy fails, and Unranked when it is asynchronous and has not been asked.
        """
        return None if self._queue.waiting and not router.waits else self._take(router, call, now, tried)

    def candidates(self, router: PolicyRouter) -> Sequence[Replica]:
        """The replicas that an asynchronous policy chooses among: those that may be called, full or not."""
        if self._clock() >= self._due:
            self._wear_off(self._clock())
        return self._in_service if router.eject_outliers else self._callable

    def join(self, place: QueuePlace) -> None:
        """Join the queue; `granted` or `denied` may be called before this returns."""
        if self.closed:
            place.denied(self._closed_by_us())
            return
        self._queue.join(place)
        self._serve()

    def leave(self, place: QueuePlace) -> None:
        """Leave the queue; nothing happens if its turn has come already."""
        # The next call may fit where this one did not.
        if self._queue.leave(place) and self._queue.waiting:
            self._serve()

    @property
    def waiting(self) -> int:
        """Calls in the queue."""
        return self._queue.waiting

    def released(self, replica: Replica, trial: bool) -> None:
        """A lease on the replica has ended."""
        if trial and replica.standing.on_trial:
            now = self._clock()
            replica.standing.end_trial(now)
            self._sort(now)
        if self._queue.waiting:
            # The outcome of the call is known a moment later; a refusal frees no room.
            if not replica.full:
                self._serve()
            elif replica.others:
                self._look_again()
            else:
                self._look_at(self._clock())
        if replica.closing and replica.inflight == 0:
            self._close_when_idle(replica)

    # ---- what calls learn

    def wants_report(self, replica: Replica, now: float, model_id: str | None = None) -> bool:
        """Whether to read a reply's report on its replica; it matters with several replicas, or other callers.

        Always read after a call for a model that the replica was not known to hold: it holds it now.
        """
        if replica.full:
            return True
        old = now - replica.reported_at > REPORT_PERIOD_S or (model_id is not None and model_id not in replica.models)
        return old and (len(self._callable) > 1 or replica.others > 0)

    def report(
        self,
        lease: CallPlace,
        ongoing: int,
        now: float,
        models: frozenset[str] | None = None,
        stats: Stats | None = None,
    ) -> None:
        """Take over a reply's report: the replica's requests in flight, and perhaps its models and its numbers."""
        replica = lease.replica
        replica.full = False
        replica.reported_at = now
        self._take_report(lease, ongoing, now + REPORT_TRUSTED_S)
        if models is not None:
            replica.models = models
        if stats is not None:
            replica.learn(stats)
        self._serve()

    def refused(self, lease: CallPlace, ongoing: int) -> None:
        """The replica is full: its requests in flight are its limit. Other callers may free room at any time."""
        replica, now = lease.replica, self._clock()
        replica.full = True
        replica.limit = min(replica.limit, max(1, ongoing))
        replica.standing.answered_at = now
        self._take_report(lease, replica.limit, now + FULL_TRUSTED_S)

    def refuses(self, replica: Replica) -> None:
        """The replica drains or sleeps: send it no more calls. One that is awake again may not be known from a source:
        after a while it is tried again.
        """
        if not replica.refuses:
            replica.refuses = True
            self._call_later(REFUSAL_TRUSTED_S, lambda: self._may_accept(replica))
        self._refresh()

    def _may_accept(self, replica: Replica) -> None:
        replica.refuses = False
        self._refresh()

    def answered(self, lease: CallPlace, now: float) -> None:
        """The replica worked."""
        standing = lease.replica.standing
        if standing.failures or standing.until:
            self._judge(lease, now, lambda standing, began, now, _: standing.answered(began, now))
        else:
            standing.answered_at = now

    def failed(self, lease: CallPlace, now: float) -> None:
        """The replica, or the way there, is broken."""
        self._judge(lease, now, self._outliers.failed)

    def timed_out(self, lease: CallPlace, now: float) -> None:
        """The call's deadline passed while the replica had it."""
        self._judge(lease, now, self._outliers.timed_out)

    async def close(self) -> None:
        """Close every connection; calls in flight fail."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._report_gone(self._listed_names())
        replicas, self._replicas = list(self._replicas.values()), {}
        self._callable = self._in_service = []
        wake_all(self._changes)
        while (place := self._queue.head()) is not None:
            self._queue.leave(place)
            place.denied(self._closed_by_us())
        await asyncio.gather(*(replica.connection.close() for replica in replicas))
        if self._closing:
            await asyncio.wait(self._closing)

    def _closed_by_us(self) -> NoReplica:
        return NoReplica(f"calls to {self.service} were closed by this process")

    # ---- choosing

    def _take(
        self, router: PolicyRouter, call: RoutedCall, now: float, tried: Collection[Replica] = ()
    ) -> CallPlace | None:
        if now >= self._due:
            self._wear_off(now)
        candidates = self._in_service if router.eject_outliers else self._callable
        for replica in candidates:
            if replica.load >= replica.limit or tried:
                candidates = [r for r in candidates if r.load < r.limit and r not in tried]
                break
        if not candidates or (router.waits and _waits_for_others(call, candidates)):
            return None
        choice = weights.group(candidates, self._random.random()) if self._weighed else candidates
        chosen = router.choose(choice, call)
        lease = CallPlace(self, chosen, now)
        standing = chosen.standing
        if standing.until and not standing.unwanted(now):
            lease.trial = True
            standing.begin_trial()
            self._sort(now)
        if router.watches_calls:
            try:
                router.routed(chosen, call)
            except PierheadError:
                lease.end()
                raise
        return lease

    def _serve(self) -> None:
        """Grant replicas with room to the calls at the head of the queue; fail calls for which no replica will come."""
        if self._serving:  # re-entered from `granted` or `denied`: the outer loop continues anyway
            return
        self._serving = True
        passed: list[QueuePlace] = []
        try:
            while (place := self._queue.head()) is not None:
                try:
                    lease = self._take(place.router, place.call, self._clock())
                except (PierheadError, Unranked) as error:
                    self._queue.leave(place)
                    place.denied(error)
                    continue
                if lease is not None:
                    self._queue.leave(place)
                    place.granted(lease)
                    continue
                hopeless = self.hopeless()
                if hopeless is None and not place.router.waits:
                    self._look_again()
                    return
                self._queue.leave(place)
                if hopeless is None:
                    passed.append(place)
                else:
                    place.denied(hopeless)
        finally:
            self._serving = False
            for place in passed:
                self._queue.join(place)
            if passed:
                self._look_again()

    # ---- which may be called

    def _watcher_of(self, replica: Replica) -> Callable[[], None]:
        def changed() -> None:
            if not replica.connection.ready:
                lost = not replica.drains  # a draining replica closes its connection as planned
                replica.lost_at = self._clock()
                replica.renewed()
                if lost:
                    standing, out = replica.standing, replica.standing.until
                    self._outliers.lost_connection(standing, self._clock(), self._standings())
                    if standing.until > out:
                        self._ejected()
            self._refresh()

        return changed

    def _refresh(self) -> None:
        self._callable = sorted((r for r in self._replicas.values() if r.callable), key=lambda replica: replica.name)
        self._weighed = weights.differ(self._callable)
        self._sort(self._clock())
        wake_all(self._changes)
        self._serve()

    def _sort(self, now: float) -> None:
        """Decide which replicas are left out now, and until when."""
        standings = self._standings()
        out = left_out(standings, now)
        self._in_service = [r for r in self._callable if r.standing not in out] if out else self._callable
        expiry = min((replica.others_until for replica in self._callable if replica.others), default=NEVER)
        self._due = min(expiry, next_change(standings, now))

    def _judge(
        self, lease: CallPlace, now: float, verdict: Callable[[Standing, float, float, Collection[Standing]], None]
    ) -> None:
        """Pass a verdict on the replica, which may change the end of its time out."""
        standing = lease.replica.standing
        out = standing.until
        verdict(standing, lease.began, now, self._standings())
        if standing.until == out:
            return
        if standing.until > out:
            self._ejected()
        self._sort(now)
        self._serve()

    def _standings(self) -> list[Standing]:
        return [replica.standing for replica in self._callable]

    def _wear_off(self, now: float) -> None:
        for replica in self._callable:
            if replica.others and now >= replica.others_until:
                replica.expire(now)
        self._sort(now)

    def _take_report(self, lease: CallPlace, ongoing: int, until: float) -> None:
        """Take over the load that a replica reports, less this process's own calls when the reply arrived: without
        that moment, calls that have ended since would count as other callers'.
        """
        replica = lease.replica
        replica.set_others(ongoing - (lease.left if lease.left >= 0 else replica.inflight - 1), until)
        if replica.others:
            self._due = min(self._due, until)

    def _listed_names(self) -> set[str]:
        return {replica.name for replica in self._replicas.values() if not replica.closing}

    def _report_gone(self, names: Iterable[str]) -> None:
        for router in list(self._watching):
            for name in sorted(names):
                router.replica_gone(name)

    # ---- looking again

    def _look_again(self) -> None:
        """Reported loads and times out expire without an event: set a timer that looks at the queue again."""
        if self._due < NEVER:
            self._look_at(self._due)

    def _look_at(self, when: float) -> None:
        """Look at the queue a moment after `when`."""
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._call_later(max(0.0, when - self._clock()) + 0.001, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._serve()

    def _close_when_idle(self, replica: Replica) -> None:
        if replica.inflight or self._replicas.get(replica.address) is not replica:
            return
        del self._replicas[replica.address]
        wake_all(self._changes)
        task = asyncio.get_running_loop().create_task(replica.connection.close(), name=f"close {replica.address}")
        # The pool owns these: `close` waits for them.
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _waits_for_others(call: Any, candidates: Collection[Replica]) -> bool:
    """Whether the policy has named replicas that may be called, and none of `candidates`."""
    named = [replica for group in call.ranks or () for replica in group if replica.callable]
    return bool(named) and not any(replica in candidates for replica in named)
