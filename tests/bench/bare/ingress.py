"""The echo's ingress with nothing of the runtime: aiohttp and a plain grpc.aio channel. See bare/child.py."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc
from aiohttp import web
from pierhead.echo.v1.echo_pb2 import EchoRequest, GenerateRequest
from pierhead.echo.v1.echo_pb2_grpc import EchoStub

from tests.bench.completion import DONE

if TYPE_CHECKING:
    from pierhead.echo.v1.echo_pb2_grpc import EchoAsyncStub

CHILD: web.AppKey[EchoAsyncStub] = web.AppKey("child")


async def echo(request: web.Request) -> web.Response:
    """`GET /echo?message=hi` -> `{"response": "Echo: hi"}`."""
    reply = await request.app[CHILD].Echo(EchoRequest(message=request.query["message"]), timeout=30)
    return web.json_response({"response": reply.response})


async def alone(request: web.Request) -> web.Response:
    """The same answer without the call: what an HTTP server in Python takes by itself."""
    return web.json_response({"response": f"Echo: {request.query['message']}"})


async def stream(request: web.Request) -> web.StreamResponse:
    """`GET /echo/stream?message=hi&num_tokens=50` -> that many server-sent events, then `[DONE]`."""
    wanted = GenerateRequest(message=request.query["message"], num_tokens=int(request.query["num_tokens"]))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    async for token in request.app[CHILD].Generate(wanted, timeout=30):
        await response.write(f"data: {token.text}\n\n".encode())
    await response.write_eof(DONE)
    return response


async def readyz(request: web.Request) -> web.Response:
    """For HAProxy's checks."""
    return web.Response()


async def connected(app: web.Application) -> AsyncIterator[None]:
    """One channel for the life of the application."""
    async with grpc.aio.insecure_channel(os.environ["PIERHEAD_STATIC_ECHO_CHILD"]) as channel:
        app[CHILD] = EchoStub(channel)
        yield


def main() -> None:
    """Serve on PIERHEAD_HOST:PIERHEAD_PORT."""
    app = web.Application()
    app.cleanup_ctx.append(connected)
    app.router.add_get("/echo", echo)
    app.router.add_get("/echo/stream", stream)
    app.router.add_get("/echo/alone/echo", alone)
    app.router.add_get("/readyz", readyz)
    host, port = os.environ["PIERHEAD_HOST"], int(os.environ["PIERHEAD_PORT"])
    web.run_app(app, host=host, port=port, access_log=None, print=None, keepalive_timeout=3600)


if __name__ == "__main__":
    main()
