"""A gateway with nothing of the runtime: aiohttp, and one stream to bare/llm_engine.py.

Run as `python -m tests.bench.bare.llm_gateway`. It reads the body as JSON for its model, and writes each event as a
chunk as soon as it comes, without waiting for the client. There is no key, limit, log, metric, deadline, choice of a
replica, or slow client.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
from aiohttp import web

from tests.bench.bare.ingress import readyz
from tests.bench.bare.llm_engine import LAST, NUMBER, OPEN, PIECE

HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class Gateway:
    """One stream, and who waits at which number."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.turn = asyncio.Lock()
        """To write: gRPC takes one message at a time."""
        self.number = 0
        self.streams: dict[int, tuple[Any, asyncio.Future[None]]] = {}

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`, streamed."""
        body = await request.read()
        if json.loads(body)["model"] != "mock":
            raise web.HTTPNotFound
        response = web.StreamResponse(headers=HEADERS)
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b": \n\n")
        self.number = number = self.number + 1
        done = asyncio.get_running_loop().create_future()
        self.streams[number] = (request.transport, done)
        try:
            async with self.turn:
                await self.stream.write(NUMBER.pack(number) + body)
            await done
        finally:
            del self.streams[number]
        await response.write_eof()
        return response

    async def models(self, request: web.Request) -> web.Response:
        """`GET /v1/models`."""
        return web.json_response({"object": "list", "data": [{"id": "mock", "object": "model"}]})

    async def read(self) -> None:
        """Hand out what comes."""
        last = len(LAST)
        while True:
            raw = await self.stream.read()
            at = 0
            while at < len(raw):
                number, length = PIECE.unpack_from(raw, at)
                at += 6
                if stream := self.streams.get(number):  # else its client has gone
                    transport, done = stream
                    transport.write(b"%x\r\n%b\r\n" % (length, raw[at : at + length]))
                    if length == last:
                        done.set_result(None)
                at += length


def main() -> None:
    """Serve on PIERHEAD_HOST:PIERHEAD_PORT."""
    app = web.Application()

    async def connected(app: web.Application) -> AsyncIterator[None]:
        async with grpc.aio.insecure_channel(os.environ["BARE_ENGINE"]) as channel:
            gateway = Gateway(channel.stream_stream(OPEN)(wait_for_ready=True))
            app.router.add_post("/v1/chat/completions", gateway.chat)
            app.router.add_get("/v1/models", gateway.models)
            app.router.add_get("/readyz", readyz)
            reading = asyncio.get_running_loop().create_task(gateway.read())
            yield
            reading.cancel()

    app.cleanup_ctx.append(connected)
    host, port = os.environ["PIERHEAD_HOST"], int(os.environ["PIERHEAD_PORT"])
    web.run_app(app, host=host, port=port, access_log=None, print=None, keepalive_timeout=3600)


if __name__ == "__main__":
    main()
