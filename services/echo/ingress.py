"""The echo's ingress: HTTP in, calls to the child. Run as `python -m services.echo.ingress`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Final

from aiohttp import WSMsgType, web
from pierhead import BadRequest, current_request, handle, serve, sse
from pierhead.echo.v1.echo_pb2 import EchoRequest, GenerateRequest, Token
from pierhead.echo.v1.echo_pb2_grpc import EchoStub

from services.echo.completion import DONE, CompletionStream
from services.echo.limits import MAX_TOKENS

if TYPE_CHECKING:
    from pierhead.echo.v1.echo_pb2_grpc import EchoAsyncStub

MODEL: Final = "echo"
DEFAULT_TOKENS: Final = 50

JSON: Final = {"Content-Type": "application/json"}

PING_S: Final = 30.0
"""How often a silent WebSocket gets a ping."""


def make_app(child: EchoAsyncStub) -> web.Application:
    """The HTTP application; `child` is a stub of the Echo service."""
    ingress = EchoIngress(child)
    app = web.Application()
    app.router.add_get("/echo", ingress.echo)
    app.router.add_get("/echo/stream", ingress.stream, allow_head=False)
    app.router.add_get("/echo/socket", ingress.socket, allow_head=False)
    return app


class EchoIngress:
    """Three routes: one call to the child, one stream of the child, one call for each message of a WebSocket."""

    def __init__(self, child: EchoAsyncStub) -> None:
        self._child = child

    async def echo(self, request: web.Request) -> web.Response:
        """`GET /echo?message=hi` -> `{"response": "Echo: hi"}`."""
        reply = await self._child.Echo(EchoRequest(message=_message(request)))
        return web.Response(body=json.dumps({"response": reply.response}).encode(), headers=JSON)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """`GET /echo/stream?message=hi&num_tokens=50` -> that many server-sent events, then `[DONE]`."""
        message, num_tokens = _message(request), _num_tokens(request)
        current = current_request()
        events = CompletionStream(f"cmpl-{current.request_id if current else ''}", int(time.time()), MODEL)

        def encode(token: Token) -> bytes:
            return events.event(token.text, last=token.index == num_tokens - 1)

        tokens = self._child.Generate(GenerateRequest(message=message, num_tokens=num_tokens))
        return await sse(request, tokens, encode, end=DONE)

    async def socket(self, request: web.Request) -> web.WebSocketResponse:
        """`GET /echo/socket`, a WebSocket: "hi" -> "Echo: hi", message by message."""
        socket = web.WebSocketResponse(heartbeat=PING_S)
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                reply = await self._child.Echo(EchoRequest(message=message.data))
                await socket.send_str(reply.response)
        return socket


def _message(request: web.Request) -> str:
    message = request.query.get("message")
    if message is None:
        raise BadRequest(f"message: missing in the query string; send {request.path}?message=hi (it may be empty)")
    return message


def _num_tokens(request: web.Request) -> int:
    raw = request.query.get("num_tokens")
    if raw is None:
        return DEFAULT_TOKENS
    # Not int() alone: it takes other scripts' digits, "1_0" and " 5 " as well.
    if raw.isascii() and raw.isdigit() and len(raw) <= len(str(MAX_TOKENS)) and 1 <= int(raw) <= MAX_TOKENS:
        return int(raw)
    raise BadRequest(f'num_tokens: expected an integer from 1 to {MAX_TOKENS}, found "{raw[:40]}"')


if __name__ == "__main__":
    serve(make_app(handle(EchoStub, "echo-child")))
