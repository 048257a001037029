"""A lease for a request that is no call of a handle, as a proxy passes them on: it waits in the pool's line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Protocol

from pierhead.calls.lease import CallPlace
from pierhead.calls.pool import Pool
from pierhead.calls.queue import QueuePlace
from pierhead.calls.replica import Replica
from pierhead.policies.policy import RoutedCall
from pierhead.policies.router import PolicyRouter, Ranks


class LineFull(Exception):
    """As many requests wait as may."""


class RankedCall(RoutedCall, Protocol):
    """A request that keeps what an asynchronous policy has said of it."""

    ranks: Ranks[Replica] | None


async def lease_in_turn(
    pool: Pool,
    router: PolicyRouter,
    call: RankedCall,
    *,
    most_waiting: int,
    wait_s: float,
    tried: Collection[Replica] = (),
) -> CallPlace:
    """A lease on a replica with room, as soon as it is the call's turn. `most_waiting`: -1 = no bound.

    Raises LineFull, TimeoutError after `wait_s`, NoReplica, and UserCodeError of the policy.
    """
    now = time.monotonic()
    if router.is_async and (candidates := pool.candidates(router)):
        call.ranks = await router.rank(candidates, call)
    lease = pool.take(router, call, now, tried)
    if lease is not None:
        return lease
    if 0 <= most_waiting <= pool.waiting:
        raise LineFull
    turn: asyncio.Future[CallPlace] = asyncio.get_running_loop().create_future()

    def granted(lease: CallPlace) -> None:
        if turn.done():  # cancelled in this very turn
            lease.end()
        else:
            turn.set_result(lease)

    def denied(error: Exception) -> None:
        if not turn.done():
            turn.set_exception(error)

    place = QueuePlace(now, call, router, granted, denied)
    pool.join(place)
    try:
        async with asyncio.timeout(wait_s):
            return await turn
    except BaseException:
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            turn.result().end()
        raise
    finally:
        pool.leave(place)
