"""The shared store as users import it, and how a process that asks the controller's is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from pierhead import Settings, StoreUnavailable, close_handles, shared_store
from pierhead.calls.clients import Clients
from pierhead.store.bounds import MOST_IN_FLIGHT
from pierhead.store.memory import OWN_STORE
from pierhead.store.remote import REST_S, RemoteStore

from tests.harness.ports import free_ports
from tests.harness.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    OWN_STORE.clear()


@pytest.fixture
async def _without_a_controller() -> AsyncIterator[None]:
    Clients.use(Settings())
    yield
    await close_handles()


@pytest.mark.usefixtures("_without_a_controller")
async def test_without_a_controller_it_is_this_process_s_own() -> None:
    await shared_store.set("a", "1")
    await shared_store.set_many({"b": "2", "c": ""}, ttl_s=5)
    assert [await shared_store.get(key) for key in "abcd"] == ["1", "2", "", None]
    assert await shared_store.get_many(["a", "c", "d"]) == {"a": "1", "c": ""}
    assert [await shared_store.incr("n"), await shared_store.incr("n", -3, ttl_s=1)] == [1, -2]
    other = asyncio.new_event_loop()  # as of a thread for user code
    try:
        assert await asyncio.to_thread(other.run_until_complete, shared_store.get("a")) == "1"
    finally:
        other.close()


class Silent:
    """A controller that accepts connections and says nothing."""

    async def start(self) -> str:
        self.connections: list[asyncio.StreamWriter] = []
        self.server = await asyncio.start_server(lambda _, writer: self.connections.append(writer), "127.0.0.1", 0)
        return f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self.server.close()
        for writer in self.connections:
            writer.close()
        await self.server.wait_closed()


@pytest.fixture
async def silent() -> AsyncIterator[str]:
    controller = Silent()
    yield await controller.start()
    await controller.stop()


async def test_a_controller_that_is_away_is_an_error_with_its_address_and_is_left_alone_for_a_while() -> None:
    now = [100.0]
    address = f"127.0.0.1:{free_ports(1)[0]}"
    store = RemoteStore(address, timeout_s=PATIENCE_S, clock=lambda: now[0])
    try:
        words = f"shared store: the controller at {address} does not answer: "
        with pytest.raises(StoreUnavailable, match=words) as first:
            await store.get(["a"])
        with pytest.raises(StoreUnavailable, match=words) as second:
            await store.get(["a"])
        assert str(second.value) == str(first.value), "it was not asked again"
        now[0] += REST_S
        with pytest.raises(StoreUnavailable, match=words):
            await store.set({"a": "1"}, 1.0)
    finally:
        await store.close()


async def test_a_controller_that_hangs_costs_a_call_its_timeout(silent: str) -> None:
    store = RemoteStore(silent, timeout_s=0.05)
    try:
        with pytest.raises(StoreUnavailable, match="does not answer: "):
            await store.incr("a", 1, 1.0)
    finally:
        await store.close()


async def test_more_requests_than_may_be_in_flight_are_refused_at_once(silent: str) -> None:
    store = RemoteStore(silent, timeout_s=PATIENCE_S)
    waiting = [asyncio.ensure_future(store.get(["a"])) for _ in range(MOST_IN_FLIGHT)]
    try:
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable, match=f"not asked: {MOST_IN_FLIGHT} requests of this process wait"):
            await store.get(["a"])
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        await store.close()


async def test_an_asker_that_gives_up_gives_back_its_place_and_ends_nobody_s_trust(silent: str) -> None:
    store = RemoteStore(silent, timeout_s=PATIENCE_S)
    try:
        for _ in range(MOST_IN_FLIGHT + 1):
            asking = asyncio.ensure_future(store.get(["a"]))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()
    finally:
        await store.close()


def test_the_error_is_one_that_callers_know() -> None:
    error = StoreUnavailable("away")
    assert (error.code(), error.http_status, error.kind) == (grpc.StatusCode.UNAVAILABLE, 503, "store_unavailable")
