"""The echo's ingress: HTTP in, gRPC to the child. Run as `python -m services.echo.ingress`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING, Final

from aiohttp import web
from pierhead import BadRequest, current_request, handle, serve
from pierhead.echo.v1.echo_pb2 import EchoRequest, GenerateRequest, Token
from pierhead.echo.v1.echo_pb2_grpc import EchoStub

from services.echo.completion import DONE, CompletionStream
from services.echo.limits import MAX_TOKENS

if TYPE_CHECKING:
    from pierhead.echo.v1.echo_pb2_grpc import EchoAsyncStub

MODEL: Final = "echo"
DEFAULT_TOKENS: Final = 50


def make_app(child: EchoAsyncStub) -> web.Application:
    """The HTTP application; `child` is a stub of the Echo service."""
    ingress = EchoIngress(child)
    app = web.Application()
    app.router.add_get("/echo", ingress.echo)
    app.router.add_get("/echo/stream", ingress.stream, allow_head=False)
    return app


class EchoIngress:
    """Two routes, each one call to the child."""

    def __init__(self, child: EchoAsyncStub) -> None:
        self._child = child

    async def echo(self, request: web.Request) -> web.Response:
        """`GET /echo?message=hi` -> `{"response": "Echo: hi"}`."""
        reply = await self._child.Echo(EchoRequest(message=_message(request)))
        return web.json_response({"response": reply.response})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """`GET /echo/stream?message=hi&num_tokens=50` -> that many server-sent events, then `[DONE]`."""
        message, num_tokens = _message(request), _num_tokens(request)
        tokens = self._child.Generate(GenerateRequest(message=message, num_tokens=num_tokens))
        try:
            return await _send_events(request, tokens, num_tokens)
        finally:
            # The client may have gone away in the middle: then the child stops, too. After the end this does nothing.
            tokens.cancel()


async def _send_events(request: web.Request, tokens: AsyncIterable[Token], num_tokens: int) -> web.StreamResponse:
    current = current_request()
    events = CompletionStream(f"cmpl-{current.request_id if current else ''}", int(time.time()), MODEL)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    async for token in tokens:
        last = token.index == num_tokens - 1
        if not response.prepared:
            # Not earlier: a child that cannot answer still gets its own HTTP status and not a broken stream.
            await response.prepare(request)
        event = events.event(token.text, last=last)
        # The end travels with the last event.
        await response.write(event + DONE if last else event)
    await response.write_eof()
    return response


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
