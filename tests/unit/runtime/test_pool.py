"""The line of waiting calls, and what replicas say of their load, with a clock in the test's hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from pierhead.errors import NoReplica
from pierhead.policies import PowerOfTwo
from pierhead.pool import Endpoint, Pool, Replica

from tests.unit.runtime.harness import until


class FakeConnection:
    """A transport without a network."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.ready = True
        self.closed = False
        self._changed = changed

    def become(self, ready: bool) -> None:
        self.ready = ready
        self._changed()

    def check(self) -> None: ...

    def open(self, *_: object) -> None: ...

    async def close(self) -> None:
        self.closed = True


class World:
    """A pool with fake connections and a clock."""

    def __init__(self, *limits: int) -> None:
        self.now = 100.0
        self.connections: dict[str, FakeConnection] = {}
        self.pool = Pool("ranker", self._connect, clock=lambda: self.now)
        self.policy = PowerOfTwo(Random(1))
        self.say(*limits)

    def say(self, *limits: int, draining: tuple[int, ...] = ()) -> None:
        self.pool.set_endpoints(
            [Endpoint(f"r{n}", f"10.0.0.{n}:1", n in draining, limit) for n, limit in enumerate(limits)]
        )

    def _connect(self, address: str, changed: Callable[[], None]) -> FakeConnection:
        made = self.connections[address] = FakeConnection(changed)
        return made

    def take(self) -> Replica | None:
        return self.pool.take(self.policy)

    def wait(self) -> asyncio.Task[Replica]:
        return asyncio.create_task(self.pool.wait(self.policy))


async def test_the_line_is_first_come_first_served() -> None:
    world = World(1)
    taken = world.take()
    assert taken is not None
    order: list[int] = []

    async def caller(number: int) -> None:
        replica = await world.pool.wait(world.policy)
        order.append(number)
        world.pool.release(replica)

    callers = [asyncio.create_task(caller(number)) for number in range(5)]
    await asyncio.sleep(0)
    assert world.take() is None, "nobody overtakes the line"
    world.pool.release(taken)
    await asyncio.gather(*callers)
    assert order == [0, 1, 2, 3, 4]
    assert taken.inflight == 0


@pytest.mark.parametrize("handed_over", [False, True])
async def test_leaving_the_line_gives_back_what_was_handed_over(handed_over: bool) -> None:
    world = World(1)
    taken = world.take()
    assert taken is not None
    leaver, stayer = world.wait(), world.wait()
    await asyncio.sleep(0)
    if handed_over:
        world.pool.release(taken)
        leaver.cancel()
    else:
        leaver.cancel()
        await asyncio.wait([leaver])
        world.pool.release(taken)
    assert await stayer is taken
    assert leaver.cancelled()
    assert taken.inflight == 1


async def test_a_replica_that_appears_serves_the_line() -> None:
    world = World()
    waiting = world.wait()
    await asyncio.sleep(0)
    world.say(1)
    assert (await waiting).name == "r0"


async def test_others_calls_count_for_a_while() -> None:
    world = World(10)
    replica = world.take()
    assert replica is not None
    world.pool.report(replica, 10, 1, world.now)
    assert replica.load == 10
    assert world.take() is None
    world.now += 1.01
    assert world.take() is replica


async def test_the_line_moves_on_after_a_failed_call_at_a_replica_that_once_refused() -> None:
    """Its refusal is long ago, no reply has said since that it has room, and the call there ended without one."""
    world = World(1)
    replica = world.take()
    assert replica is not None
    world.pool.release(replica)
    world.pool.refused(replica, 1, 0)
    world.now += 1
    assert world.take() is replica
    waiting = world.wait()
    await asyncio.sleep(0)
    world.pool.release(replica)
    async with asyncio.timeout(1):
        assert await waiting is replica


async def test_a_limit_learnt_is_forgotten_with_the_connection() -> None:
    world = World(0)
    replica = world.take()
    assert replica is not None
    world.pool.release(replica)
    world.pool.refused(replica, 3, 0)
    assert replica.limit == 3
    (connection,) = world.connections.values()
    connection.become(False)
    connection.become(True)
    assert [world.take() for _ in range(5)] == [replica] * 5


async def test_a_drain_told_by_the_replica_itself_ends_with_its_connection() -> None:
    world = World(5)
    replica = world.take()
    assert replica is not None
    world.pool.refuses(replica)
    assert world.take() is None
    world.say(5)
    assert world.take() is None, "a list that has not heard of the drain does not end it"
    (connection,) = world.connections.values()
    connection.become(False)
    connection.become(True)
    assert world.take() is replica


async def test_a_replica_no_longer_listed_keeps_its_connection_until_its_last_call() -> None:
    world = World(5)
    replica = world.take()
    assert replica is not None
    (connection,) = world.connections.values()
    world.say()
    assert world.take() is None
    assert not connection.closed
    world.pool.release(replica)
    await until(lambda: connection.closed, "the connection is closed")
    assert not world.pool.replicas()


async def test_one_that_is_listed_again_in_time_goes_on() -> None:
    world = World(5)
    replica = world.take()
    world.say()
    world.say(5)
    assert world.take() is replica


async def test_closing_tells_the_line() -> None:
    world = World()
    waiting = world.wait()
    await asyncio.sleep(0)
    await world.pool.close()
    with pytest.raises(NoReplica):
        await waiting


def test_what_is_known_is_told_in_one_line() -> None:
    world = World(4, 0, 2)
    (first, *_) = world.pool.replicas()
    first.inflight = 3
    world.connections["10.0.0.1:1"].ready = False
    world.say(4, 0, 2, draining=(2,))
    assert world.pool.describe() == "r0 works on 3 of 4, r1 is not connected, r2 is draining"
