"""The port that `pierhead console` has on a manager's loopback."""

from __future__ import annotations

import asyncio

from aiohttp import ClientSession, ServerDisconnectedError, web

from controller.swarm.tool import forward
from tests.harness.ports import free_port


async def test_requests_reach_the_controller_and_a_controller_that_is_away_ends_them() -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="the page")

    app = web.Application()
    app.router.add_get("/", page)
    runner, port = web.AppRunner(app), free_port()
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    server = await forward.listen("127.0.0.1", 0, ("127.0.0.1", port))
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server, ClientSession() as client:
        for answers in (False, True):
            if answers:
                await site.start()
            async with asyncio.timeout(forward.CONNECT_S):
                try:
                    async with client.get(url) as answer:
                        found = await answer.text()
                except ServerDisconnectedError:
                    found = ""
            assert found == ("the page" if answers else "")
    await runner.cleanup()
