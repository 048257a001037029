"""One HTTP request or WebSocket at a replica: Starlette's request in, any value out, by Ray Serve's rules."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

from pierhead.errors import SettingsError
from pierhead.raised import is_answerable
from pierhead.rayserve.context import _RequestContext
from pierhead.rayserve.deployed_object import DeployedObject
from pierhead.rayserve.exceptions import BackPressureError, DeploymentUnavailableError

logger = logging.getLogger("ray.serve")

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

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


def late(request_id: str, timeout_s: float | None) -> str:
    """The text of the answer to a request that has reached its timeout."""
    return f"Request {request_id} timed out after {timeout_s}s."


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
            add(kind, _answer_unavailable)


async def _answer_unavailable(_: Any, error: Any) -> Any:
    from starlette.responses import Response

    status, text, headers = words_of(error)
    return Response(text, status_code=status, headers={name.decode(): value.decode() for name, value in headers})


def words_of(error: BaseException) -> tuple[int, str, list[tuple[bytes, bytes]]]:
    """Status, text and further headers of the answer to an exception."""
    if isinstance(error, BackPressureError):
        wait_s = error.retry_after_s
        headers = [] if wait_s is None else [(b"retry-after", str(max(0, math.ceil(wait_s))).encode())]
        return error.status_code, error.message, headers
    if isinstance(error, DeploymentUnavailableError):
        return 503, error.message, []
    return 500, "Internal Server Error", []


async def serve_request(
    deployed: DeployedObject, request: _RequestContext, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer one request at a replica. Raises what user code raises, after the answer to it was sent."""

    async def serve() -> None:
        if deployed.app is not None:
            await deployed.app(scope, receive, send)
        else:
            await _serve_plain(deployed, scope, receive, send)

    await deployed.http(request, serve)


async def _serve_plain(deployed: DeployedObject, scope: Scope, receive: Receive, send: Send) -> None:
    requests = needs_starlette()
    from starlette.responses import Response

    try:
        result = await deployed.plain(requests.Request(scope, receive, send))
        if isinstance(result, Response):
            await result(scope, receive, send)
            return
        messages = [] if inspect.isasyncgen(result) or inspect.isgenerator(result) else messages_of(result)
    except BaseException as error:
        if not is_answerable(error):
            raise
        status, text, headers = words_of(error)
        answer = Response(text, status_code=status)
        answer.raw_headers.extend(headers)
        await answer(scope, receive, send)
        raise
    if not messages:
        raise TypeError("a generator is no response, as in Ray Serve: return a StreamingResponse of it")
    for message in messages:
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
