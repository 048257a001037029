"""WebSockets of replicas that drain, scaled down or replaced: docs/how-to/http.md says what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType

from tests.harness.shared_stacks import WrittenStack
from tests.harness.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]

APP = (Path(__file__).parent / "apps" / "sockets.yaml").read_text()
MANY = 8
RESTART = 1012


@pytest.fixture
def sockets(written: WrittenStack) -> WrittenStack:
    """Two replicas of each."""
    written.become(APP, aiohttp=2, asgi=2, foreign=2)
    return written


class Socket:
    """One of a client, and what its replica has said of itself: its container and its version."""

    def __init__(self, connection: ClientWebSocketResponse, name: str) -> None:
        self._connection = connection
        self.container, self.version = name.split()

    async def answers(self) -> bool:
        await self._connection.send_str("still there")
        return bool((await self._connection.receive(PATIENCE_S)).data == "still there")

    async def ended_with(self) -> int | None:
        """Wait until the other side ends it; its close code."""
        message = await self._connection.receive(PATIENCE_S)
        assert message.type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.ERROR), message
        # The client's own close code is 1006 where it could not answer any more.
        return message.data if message.type is WSMsgType.CLOSE else self._connection.close_code


@asynccontextmanager
async def opened(stack: WrittenStack, service: str) -> AsyncIterator[list[Socket]]:
    """MANY of them, on two replicas."""
    async with ClientSession() as client, AsyncExitStack() as ends:

        async def one() -> Socket:
            connection = await ends.enter_async_context(client.ws_connect(stack.url(f"/{service}")))
            return Socket(connection, (await connection.receive(PATIENCE_S)).data)

        found = [await one() for _ in range(MANY)]
        assert len({one.container for one in found}) == 2
        yield found


def running(act: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(act())


@pytest.mark.parametrize("service", ["aiohttp", "asgi"])
def test_those_of_a_replica_that_is_scaled_away_are_closed_and_clients_connect_again(
    sockets: WrittenStack, service: str
) -> None:
    async def act() -> None:
        async with opened(sockets, service) as found:
            await asyncio.to_thread(sockets.scale, service, 1)
            (stays,) = await asyncio.to_thread(sockets.replica_ids, service)
            on = {one: stays.startswith(one.container) for one in found}
            assert {await one.ended_with() for one, is_on in on.items() if not is_on} == {RESTART}
            assert all([await one.answers() for one, is_on in on.items() if is_on])
            async with ClientSession() as client, client.ws_connect(sockets.url(f"/{service}")) as again:
                assert stays.startswith((await again.receive(PATIENCE_S)).data.split()[0])

    running(act)


@pytest.mark.parametrize("service", ["aiohttp", "asgi"])
def test_those_of_replicas_that_a_rollout_replaces_are_closed(sockets: WrittenStack, service: str) -> None:
    async def act() -> None:
        async with opened(sockets, service) as found:
            before = await asyncio.to_thread(sockets.replica_ids, service)
            sockets.write(APP.replace('VERSION: "1"', 'VERSION: "2"'))
            assert {await one.ended_with() for one in found} == {RESTART}

            def is_replaced() -> bool:
                return sockets.is_settled(service, 2) and sockets.replica_ids(service).isdisjoint(before)

            await asyncio.to_thread(eventually, is_replaced, "the new version serves")
        async with opened(sockets, service) as found:
            assert {one.version for one in found} == {"2"}

    running(act)


def test_those_of_another_image_are_waited_for_as_its_requests_are(sockets: WrittenStack) -> None:
    async def act() -> None:
        async with opened(sockets, "foreign") as found:
            sockets.forget_events()
            await asyncio.to_thread(sockets.scale, "foreign", 1)
            (stays,) = await asyncio.to_thread(sockets.replica_ids, "foreign")
            on = {one: stays.startswith(one.container) for one in found}
            assert RESTART not in {await one.ended_with() for one, is_on in on.items() if not is_on}
            assert all([await one.answers() for one, is_on in on.items() if is_on])

    running(act)
    assert any(
        "still busy after 3 s (graceful_shutdown_timeout_s)" in one for one in sockets.messages("signal_container")
    )
