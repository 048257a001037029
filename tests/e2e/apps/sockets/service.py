"""Answers a WebSocket's messages, the first of which it sends itself: the name of its container, and its version."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import MutableMapping
from typing import Any

from aiohttp import web
from pierhead import asgi, serve

NAME = f"{socket.gethostname()} {os.environ['VERSION']}"


async def answer(request: web.Request) -> web.StreamResponse:
    found = web.WebSocketResponse()
    if not found.can_prepare(request):
        return web.Response(text=NAME)  # the probe
    await found.prepare(request)
    await found.send_str(NAME)
    async for message in found:
        await found.send_str(message.data)
    return found


async def application(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] != "websocket":
        return
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.send", "text": NAME})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})


kind = sys.argv[1]
app = web.Application()
app.add_routes([web.get(f"/{kind}", answer)])
match kind:
    case "aiohttp":
        serve(app)
    case "asgi":
        serve(asgi(application))
    case "foreign":
        web.run_app(app, port=8080, shutdown_timeout=0.1)
