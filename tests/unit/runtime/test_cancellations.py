"""Ten thousand calls of all kinds, cancelled at random moments in every way there is: nothing of them is left.

Moments are turns of the event loop and fractions of a millisecond, so that cancellations hit calls everywhere: before
they are sent, in line at their caller, waiting for a place at the replica, in a batch, in the middle of a stream, at
their end. Two callers with a lane each, and a replica with few places.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import pytest
from pierhead import PierheadError, Settings, batch
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.deadlines import Deadlines
from pierhead.metrics import RuntimeMetrics
from pierhead.replica.server import ReplicaServer

from tests.unit.runtime.harness import Cluster, address, until
from tests.unit.runtime.pipes import PipesServicer, PipesStub

pytestmark = pytest.mark.timeout(180)

CANCELLATIONS = {"lane": 10_000, "plain gRPC": 4_000}
"""By the way that the calls travel: what a few seconds allow."""
GRPC_FAILS = {"lane": [], "plain gRPC": ["ReplicaDied"]}
"""What a few calls in ten thousand end with because gRPC's server fails to send a status when a deadline strikes."""

GRPC_KEEPS = {"lane": 0, "plain gRPC": 10}
"""Futures and tasks of gRPC's own that wait for operations which its core never ends, after such a failure."""

AT_A_TIME = 64
PLACES = 40
"""Calls that the replica takes at a time: some have to wait."""


class Work(PipesServicer):
    """Each kind of call takes a moment, in a batch or between messages; counts what began and what ended."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def _counted(self, kind: str) -> AsyncIterator[None]:
        self.begun[kind] += 1
        try:
            yield
        finally:
            self.ended[kind] += 1

    @batch(max_batch_size=8, batch_wait_timeout_s=0.001, max_concurrent_batches=2)
    async def together(self, requests: list[bytes]) -> list[bytes]:
        async with self._counted("batch"):
            await self._moment()
            return requests

    async def _moment(self) -> None:
        await asyncio.sleep(self._rng.random() * 0.002)

    async def One(self, request: bytes, context: Any) -> bytes:
        async with self._counted("One"):
            return await self.together(request)

    async def Split(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        async with self._counted("Split"):
            for _ in range(4):
                await self._moment()
                yield request

    async def Join(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        async with self._counted("Join"):
            return await self.together(b"".join([request async for request in requests]))

    async def Talk(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async with self._counted("Talk"):
            async for request in requests:
                await self._moment()
                yield request


class Callers:
    """Make calls, and cancel them."""

    def __init__(self, stubs: list[PipesStub], kinds: list[Kind], rng: Random) -> None:
        self._stubs = stubs
        self._kinds = kinds
        self._rng = rng
        self.outcomes: Counter[str] = Counter()

    async def cancel(self, count: int) -> None:
        """Make calls until so many were cancelled."""
        ways = (self._cancel_the_task, self._cancel_the_call, self._close_the_iterator, self._run_out_of_time)

        async def caller() -> None:
            while self.outcomes["cancelled"] < count:
                try:
                    async with asyncio.timeout(10):
                        await self._rng.choice(ways)()
                except PierheadError as error:
                    self.outcomes[type(error).__name__] += 1

        await asyncio.gather(*[caller() for _ in range(AT_A_TIME)])

    async def all_kinds(self) -> list[Any]:
        """What one whole call of each kind brings each of the callers."""
        return [await use(make(stub, 5.0)) for stub in self._stubs for make, use in self._kinds]

    def _kind(self) -> Kind:
        return self._rng.choice(self._kinds)

    async def _cancel_the_task(self) -> None:
        make, use = self._kind()
        task = asyncio.ensure_future(use(make(self._rng.choice(self._stubs), 5.0)))
        await self._some_time()
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            self.outcomes["cancelled"] += 1

    async def _cancel_the_call(self) -> None:
        make, use = self._kind()
        call = make(self._rng.choice(self._stubs), 5.0)
        task = asyncio.ensure_future(use(call))
        await self._some_time()
        cancelled = call.cancel()
        try:
            await task
        except asyncio.CancelledError:
            assert cancelled, "a call that had ended was cancelled"
            self.outcomes["cancelled"] += 1

    async def _close_the_iterator(self) -> None:
        make, _ = self._kinds[1]
        call = make(self._rng.choice(self._stubs), 5.0)
        wanted = self._rng.randrange(4)
        async with contextlib.aclosing(call) as messages:
            seen = 0
            async for _ in messages:
                seen += 1
                if seen > wanted:
                    break
        self.outcomes["cancelled"] += seen > wanted

    async def _run_out_of_time(self) -> None:
        make, use = self._kind()
        await use(make(self._rng.choice(self._stubs), self._rng.random() * 0.03))

    async def _some_time(self) -> None:
        if self._rng.random() < 0.5:
            for _ in range(self._rng.randrange(40)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(self._rng.random() * 0.02)


Kind = tuple[Callable[[PipesStub, float], Any], Callable[[Any], Awaitable[Any]]]


async def _requests() -> AsyncIterator[bytes]:
    for _ in range(3):
        await asyncio.sleep(0)
        yield b"x"


async def _whole(call: Any) -> Any:
    return await call


async def _messages(call: Any) -> list[bytes]:
    return [message async for message in call]


KINDS: dict[str, list[Kind]] = {
    "lane": [
        (lambda stub, timeout: stub.One(b"x", timeout=timeout), _whole),
        (lambda stub, timeout: stub.Split(b"x", timeout=timeout), _messages),
    ],
    "plain gRPC": [
        (lambda stub, timeout: stub.Join(_requests(), timeout=timeout), _whole),
        (lambda stub, timeout: stub.Talk(_requests(), timeout=timeout), _messages),
    ],
}
"""By the way that they travel."""


class Held:
    """What this process holds in addition to before: tasks, deadlines, futures without a result."""

    def __init__(self, tolerated: int) -> None:
        self._tolerated = tolerated
        self._before = self._now()

    @staticmethod
    def _now() -> Counter[str]:
        gc.collect()
        deadlines = sum(len(slot) for slot in Deadlines.current()._slots.values())
        pending = sum(issubclass(type(each), asyncio.Future) and not each.done() for each in gc.get_objects())
        return Counter(tasks=len(asyncio.all_tasks()), deadlines=deadlines, futures=pending)

    def more(self) -> dict[str, int]:
        more = self._now() - self._before
        return {what: count for what, count in more.items() if count > (self._tolerated if what != "deadlines" else 0)}


def left_at_callers(channels: list[HandleChannel]) -> dict[str, int]:
    left: Counter[str] = Counter()
    for channel in channels:
        pool = channel.pool()
        left["in line"] += pool.waiting + channel.queued + int(sum(channel.metrics.queued.values.values()))
        for replica in pool.replicas():
            left["in flight"] += replica.inflight
            lane = getattr(replica.connection, "_lane", None)
            left["in the lane"] += len(lane._calls) if lane is not None else 0
    return dict(+left)


def left_at_replica(server: ReplicaServer, service: Work) -> dict[str, int]:
    left = Counter(ongoing=int(server.metrics.ongoing.read()), waiting=server._admission.waiting)
    assert server._lanes is not None
    for lane in server._lanes._lanes.values():
        left["in the lane"] += len(lane.calls)
        left["parcels"] += len(lane._kept)
    runner = service.together
    left["batches"] += len(runner._tasks)
    left["in the window"] += len(runner._window)
    return dict(+(left + (service.begun - service.ended)))


@pytest.mark.parametrize("way", KINDS)
async def test_ten_thousand_cancellations_leave_nothing(cluster: Cluster, way: str) -> None:
    rng = Random(20_26)
    server = await cluster.start(service := Work(rng), max_ongoing_requests=PLACES)
    Clients.use(Settings(static={"ONE": (address(server),), "OTHER": (address(server),)}))
    channels = [HandleChannel(name, metrics=RuntimeMetrics()) for name in ("one", "other")]
    callers = Callers([PipesStub(channel) for channel in channels], KINDS[way], rng)
    whole = {"lane": [b"x", [b"x"] * 4] * 2, "plain gRPC": [b"xxx", [b"x"] * 3] * 2}[way]
    assert await callers.all_kinds() == whole
    held = Held(GRPC_KEEPS[way])
    await callers.cancel(CANCELLATIONS[way])
    await until(lambda: not left_at_callers(channels), f"nothing is left at the callers: {left_at_callers(channels)}")
    await until(lambda: not left_at_replica(server, service), f"nothing is left: {left_at_replica(server, service)}")
    await until(lambda: not held.more(), f"nothing more is held: {held.more()}")
    assert await callers.all_kinds() == whole, "everything works as before"
    assert set(service.begun) == ({"One", "Split", "batch"} if way == "lane" else {"Join", "Talk", "batch"})
    print(f"{dict(callers.outcomes)}; begun at the replica: {dict(service.begun)}")
    assert {"cancelled", "DeadlineExceeded"} <= set(callers.outcomes)
    assert set(callers.outcomes) <= {"cancelled", "DeadlineExceeded", "Backpressure", *GRPC_FAILS[way]}
