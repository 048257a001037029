"""One HTTP request or WebSocket at a replica: Starlette's request in, any value out, by Ray Serve's rules."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import math
import sys
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from pierhead.classes.routes import SERVICE_KEY
from pierhead.errors import SettingsError
from pierhead.http.asgi_exchange import DisconnectListener, Message, Receive, Scope, Send
from pierhead.raised import is_answerable
from pierhead.rayserve.context import _RequestContext, cancel_children
from pierhead.rayserve.deployed_object import DeployedObject
from pierhead.rayserve.exceptions import BackPressureError, DeploymentUnavailableError
from pierhead.request import current_request

logger = logging.getLogger("ray.serve")

MODEL_HEADER: Final = "serve_multiplexed_model_id"
SESSION_HEADER: Final = "x_session_id"
REQUEST_ID: Final = b"x-request-id"
_TIMEOUT: Final = b"x-request-timeout-seconds"

_UNAVAILABLE: Final = (BackPressureError, DeploymentUnavailableError)


def timeout_of(headers: Mapping[bytes, bytes], default: float | None = None) -> float | None:
    """A request's own timeout in seconds; None = none."""
    try:
        own = float(headers[_TIMEOUT])
    except (KeyError, ValueError):
        return default
    return own if own > 0 else None


def needs_starlette() -> Any:
    """Starlette's module of requests. Raises SettingsError that names the extra where it is missing."""
    try:
        from starlette import requests
    except ImportError as error:
        raise SettingsError(
            "a deployment is to answer HTTP requests, and starlette is not installed: install pierhead[rayserve]"
        ) from error
    return requests


def warm() -> None:
    """Import what the first answer needs: it would hold up the event loop then. Raises SettingsError."""
    needs_starlette()
    with suppress(ImportError):
        importlib.import_module("fastapi.encoders")


def request_id_of(scope: Scope) -> str:
    """The request's id, which its headers have afterwards."""
    found = next((value for key, value in scope["headers"] if key == REQUEST_ID), None)
    if found is not None:
        return str(found.decode("latin-1"))
    current = current_request()
    made = str(uuid.uuid4()) if current is None else current.request_id
    scope["headers"] = [*scope["headers"], (REQUEST_ID, made.encode())]
    return made


def request_of(scope: Scope, request_id: str, *, route: str, app_name: str) -> _RequestContext:
    """The request's context, from its headers."""
    model = session = ""
    for key, value in scope["headers"]:
        name = key.decode("latin-1").lower().replace("-", "_")
        if name == MODEL_HEADER:
            model = value.decode("latin-1")
        elif name == SESSION_HEADER:
            session = value.decode("latin-1")
    client = scope.get("client")
    return _RequestContext(
        route=route,
        request_id=request_id,
        app_name=app_name,
        multiplexed_model_id=model,
        session_id=session,
        is_http_request=True,
        _client=f"{client[0]}:{client[1]}" if client else "",
    )


def prepare(app: Any) -> None:
    """Let a Starlette application answer errors of a full line as such, and not as its own."""
    add = getattr(app, "add_exception_handler", None)
    if callable(add):
        for kind in _UNAVAILABLE:
            add(kind, _answer_of)


async def _answer_of(_: Any, error: Any) -> Any:
    from starlette.responses import Response

    text, status, headers = words_of(error)
    return Response(text, status_code=status, headers={name.decode(): value.decode() for name, value in headers})


def words_of(error: BaseException) -> tuple[str, int, list[tuple[bytes, bytes]]]:
    """Text, status and further headers of the answer to an exception."""
    if isinstance(error, BackPressureError):
        wait_s = error.retry_after_s
        headers = [] if wait_s is None else [(b"retry-after", str(max(0, math.ceil(wait_s))).encode())]
        return error.message, error.status_code, headers
    if isinstance(error, DeploymentUnavailableError):
        return error.message, 503, []
    return "Internal Server Error", 500, []


class _Exchange:
    """The two callables for the application that answers a request. A client that leaves cancels `work`."""

    def __init__(self, receive: Receive, send: Send, *, listens: bool) -> None:
        self.work: asyncio.Task[None]
        self.started = self.closed = self._complete = False
        self._left_bytes = -1
        self._send = send
        self._listener = DisconnectListener(receive, self._left) if listens else None
        self._receive = receive if self._listener is None else self._listener.next

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._complete:
            cancel_children()  # the application may end at this message, and leave them
        return message

    async def send(self, message: Message) -> None:
        if self.closed:
            return
        self.started = True
        if message["type"] == "http.response.start":
            self._left_bytes = int(dict(message.get("headers", ())).get(b"content-length", -1))
        elif message["type"] == "http.response.body":
            # A client may leave once it has all bytes, while the application has still to say that there are no more.
            self._left_bytes -= len(message.get("body", b""))
            self._complete = not message.get("more_body", False) or self._left_bytes == 0
        await self._send(message)

    def _left(self) -> None:
        if not self._complete:
            logger.info("Client for %s disconnected, cancelling request.", self.work.get_name())
            self.closed = True
            self.work.cancel()

    def close(self) -> None:
        self.closed = True
        if self._listener is not None:
            self._listener.task.cancel()


async def answer(
    request_id: str,
    receive: Receive,
    send: Send,
    serve: Callable[[Receive, Send], Coroutine[Any, Any, None]],
    timeout_s: float | None,
    *,
    listens: bool = False,
) -> None:
    """Make `serve` answer a request within a time, None = any; returns once that has ended.

    `listens`: notice that the client leaves; else what stands before does it, and cancels this. Raises what user code
    raises before there is an answer.
    """
    exchange = _Exchange(receive, send, listens=listens)
    work = exchange.work = asyncio.create_task(serve(exchange.receive, exchange.send), name=f"request {request_id}")
    try:
        try:
            await asyncio.wait([work], timeout=timeout_s)
        except asyncio.CancelledError:
            # The replica's own deadline for this request is the same moment, and may come first: one answer to both.
            if timeout_s is None or not _is_late():
                raise
        if not (work.done() or exchange.started):
            exchange.closed = True
            await reply(send, f"Request {request_id} timed out after {timeout_s}s.", 408)
    finally:
        exchange.close()
        if not work.done():
            work.cancel()
            await asyncio.wait([work])
    error = None if work.cancelled() else work.exception()
    if error is not None:
        logger.warning("Request %s failed", request_id, exc_info=error)
        if not exchange.started:
            raise error


def _is_late() -> bool:
    """Whether the replica's deadline for the current request has passed; False where none is set."""
    request = current_request()
    return request is not None and request.remaining_s() == 0


async def serve_request(
    deployed: DeployedObject, request: _RequestContext, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer one request at a replica. Raises what user code raises, after the answer to it was sent."""

    async def serve() -> None:
        if deployed.app is not None:
            scope[SERVICE_KEY] = deployed.context.servable_object  # the `self` of its routes
            await deployed.app(scope, receive, send)
        else:
            await _serve_plain(deployed, scope, receive, send)

    await deployed.work_on(request, serve)


async def _serve_plain(deployed: DeployedObject, scope: Scope, receive: Receive, send: Send) -> None:
    requests = needs_starlette()
    from starlette.responses import Response

    try:
        result = await deployed.plain(requests.Request(scope, receive, send))
        if isinstance(result, Response):
            await result(scope, receive, send)
            return
        generates = inspect.isasyncgen(result) or inspect.isgenerator(result)
        messages = [] if generates else messages_of(result)
    except BaseException as error:
        if not is_answerable(error):
            raise
        own_answer = await _answer_of(None, error)
        await own_answer(scope, receive, send)
        raise
    if generates:
        raise TypeError("a generator is no response, as in Ray Serve: return a StreamingResponse of it")
    for message in messages:
        await send(message)


def fit_for(scope: Scope, send: Send) -> Send:
    """A `send` that turns a response to a WebSocket into a refusal. A server without the extension for responses gets a
    close.
    """
    if scope["type"] != "websocket":
        return send
    takes_responses = "websocket.http.response" in scope.get("extensions", {})

    async def refuse(message: Message) -> None:
        kind = message["type"]
        if not kind.startswith("http.response."):
            await send(message)
        elif takes_responses:
            await send({**message, "type": f"websocket.{kind}"})
        elif kind == "http.response.start":
            await send({"type": "websocket.close"})

    return refuse


async def reply(send: Send, value: Any, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Send a response with any value as its body. Raises TypeError and ValueError for one without, before it sends."""
    for message in messages_of(value, status, headers):
        await send(message)


def messages_of(
    value: Any = None, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()
) -> list[dict[str, Any]]:
    """The ASGI messages of a response with any value as its body. Raises TypeError and ValueError for one without."""
    if value is None:
        body, kind = b"", b"text/plain"
    elif isinstance(value, bytes):
        body, kind = value, b"text/plain"
    elif isinstance(value, str):
        body, kind = value.encode(), b"text/plain; charset=utf-8"
    else:
        body, kind = json.dumps(plain(value), separators=(",", ":")).encode(), b"application/json"
    return [
        {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *headers]},
        {"type": "http.response.body", "body": body},
    ]


def plain(value: Any) -> Any:
    """A value as JSON can hold it: with FastAPI's encoder where that is installed, and arrays as lists."""
    encoders = _encoders()
    try:
        from fastapi.encoders import jsonable_encoder
    except ImportError:
        return json.loads(json.dumps(value, default=lambda each: _encoded(each, encoders)))
    return jsonable_encoder(value, custom_encoder=encoders)


def _encoded(value: Any, encoders: Mapping[Any, Callable[[Any], Any]]) -> Any:
    for kind, encode in encoders.items():
        if isinstance(value, kind):
            return encode(value)
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, set | frozenset | tuple) or inspect.isgenerator(value):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _encoders() -> dict[Any, Callable[[Any], Any]]:
    found: dict[Any, Callable[[Any], Any]] = {Exception: str}
    numpy, pandas = sys.modules.get("numpy"), sys.modules.get("pandas")
    if numpy is not None:
        found[numpy.ndarray] = _array
        found[numpy.generic] = lambda value: value.item()
    if pandas is not None:
        found[pandas.DataFrame] = lambda value: value.to_dict(orient="records")
    return found


def _array(value: Any) -> Any:
    if value.dtype.kind == "f":
        return value.astype(float).tolist()
    if value.dtype.kind in "iu":
        return value.astype(int).tolist()
    return value.tolist()
