"""The HTTP side of a replica: aiohttp applications behind one middleware. Errors are JSON, always of one shape:

{"error": {"code": "bad_request", "message": "...", "request_id": "..."}}
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import hdrs, web

from pierhead.edge import Edge, is_answerable
from pierhead.errors import BadRequest, DeadlineExceeded, PierheadError
from pierhead.request import (
    CURRENT,
    MODEL_KEY,
    REQUEST_ID_KEY,
    SESSION_KEY,
    TIMEOUT_KEY,
    TRACEPARENT_KEY,
    RequestContext,
    accept_id,
    accept_opaque,
)

logger = logging.getLogger("pierhead")

KEEPALIVE_S = 3600.0
"""Idle connections outlive HAProxy's reuse of them: the side that closes first must never be the server."""

MAX_HEAD_BYTES = 32 * 1024
"""Of a request line or a header. HAProxy takes heads of 16 KiB at most and answers longer ones itself."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def guard(app: web.Application, edge: Edge) -> None:
    """Put an application behind the edge; call before it starts. Its own middlewares run inside."""
    app.middlewares.insert(0, _middleware(edge))  # type: ignore[arg-type]  # wants the decorator's private type
    app.on_response_prepare.append(_stamp)


def make_runner(app: web.Application) -> web.AppRunner:
    """A runner whose handlers are cancelled when their client goes away; no access log on the path."""
    return web.AppRunner(
        app,
        handle_signals=False,
        access_log=None,
        keepalive_timeout=KEEPALIVE_S,
        handler_cancellation=True,
        max_line_size=MAX_HEAD_BYTES,
        max_field_size=MAX_HEAD_BYTES,
        shutdown_timeout=0.1,  # the drain is over by then
    )


def error_response(error: PierheadError, request_id: str) -> web.Response:
    """The JSON answer for an error."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return _json(error.http_status, error.kind, error.message, request_id, headers)


async def _stamp(request: web.Request, response: web.StreamResponse) -> None:
    """Every response, streamed ones included, names its request."""
    context = CURRENT.get()
    if context is not None:
        response.headers[REQUEST_ID_KEY] = context.request_id
    if request.method == hdrs.METH_HEAD and not isinstance(response, web.Response):
        # A handler that streams goes on to write a body, which the next request on the connection would get.
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"


def _middleware(edge: Edge) -> Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]:
    @web.middleware
    async def pierhead_edge(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.monotonic()
        request_id = accept_id(request.headers.get(REQUEST_ID_KEY))
        method = _template(request)
        # aiohttp runs each request in a task, and so in a context, of its own: nothing to reset afterwards.
        CURRENT.set(RequestContext(request_id, started + edge.settings.request_timeout_s))
        status = 499  # what is counted when the client leaves: cancellation passes through
        try:
            try:
                response = await _admitted(request, handler, edge, method)
            except web.HTTPException as error:
                status = error.status
                if status < 400:
                    raise  # a redirect is an answer, not an error
                response = _from_http_exception(request, error, request_id)
            except (Exception, asyncio.CancelledError) as error:
                if not is_answerable(error):
                    raise
                response = _answer(request, error, edge, method)
            status = response.status
        finally:
            edge.finished(method, str(status), time.monotonic() - started)
        if edge.admission.draining:
            response.force_close()
        return response

    return pierhead_edge


async def _admitted(request: web.Request, handler: Handler, edge: Edge, method: str) -> web.StreamResponse:
    """Run the handler within admission and deadline."""
    context = CURRENT.get()
    assert context is not None  # noqa: S101 - set by the caller
    timeout = _timeout(request.headers.get(TIMEOUT_KEY), edge.settings.request_timeout_s)
    headers = request.headers
    CURRENT.set(
        RequestContext(
            context.request_id,
            time.monotonic() + timeout,
            accept_opaque(headers.get(TRACEPARENT_KEY)),
            accept_opaque(headers.get(SESSION_KEY)),
            accept_opaque(headers.get(MODEL_KEY)),
        )
    )
    refusal = edge.admission.enter_while_draining()
    if refusal is not None:
        edge.refused(refusal)
        raise refusal
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            response = await handler(request)
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineExceeded(f"{method} was not done within {timeout:g} s") from error
        raise
    finally:
        edge.admission.leave()
    if not isinstance(response, web.StreamResponse):
        raise TypeError(
            f"the handler of {method} returned {type(response).__name__}, expected a web.StreamResponse; is a `return` "
            "missing?"
        )
    return response


def _answer(request: web.Request, error: BaseException, edge: Edge, method: str) -> web.StreamResponse:
    """The response for an exception of the handler."""
    context = CURRENT.get()
    request_id = context.request_id if context is not None else ""
    if isinstance(error, web.RequestPayloadError):
        why = str(error).removeprefix("400, message:").strip()
        return error_response(BadRequest(f"the request body cannot be read: {why}"), request_id)
    if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
        raise error  # writing to a client that has left: nobody is there to answer
    known = edge.error_for(error, method)
    writer = getattr(request, "writer", None)
    if writer is not None and writer.output_size > 0:
        # Half of a response is on its way; another one behind it would be read as its body. Cutting the connection is
        # the only way left to say that it failed.
        logger.error("%s failed after its response had begun: %s", method, known.message)
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(known.message) from error
    return error_response(known, request_id)


def _from_http_exception(request: web.Request, error: web.HTTPException, request_id: str) -> web.Response:
    """What aiohttp and handlers say with exceptions, in the one error shape."""
    headers = error.headers.copy()
    headers.popall(hdrs.CONTENT_TYPE, None)
    headers.popall(hdrs.CONTENT_LENGTH, None)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        limit = request.client_max_size
        message = f"the request body is larger than the {limit} bytes that this service takes; send less at a time"
        return _json(413, "payload_too_large", message, request_id, headers)
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} does not take {request.method}; it takes {allowed}"
        return _json(405, "method_not_allowed", message, request_id, headers)
    if isinstance(error, web.HTTPNotFound) and request.match_info.http_exception is error:
        routes = ", ".join(sorted({_canonical(resource) for resource in request.app.router.resources()}))
        message = f"no route for {request.path}; this service has {routes}"
        return _json(404, "not_found", message, request_id, headers)
    code = error.reason.lower().replace(" ", "_").replace("-", "_")
    return _json(error.status, code, error.text or error.reason, request_id, headers)


def _json(status: int, code: str, message: str, request_id: str, headers: Mapping[str, str]) -> web.Response:
    body = {"error": {"code": code, "message": message, "request_id": request_id}}
    return web.json_response(body, status=status, headers=headers)


def _template(request: web.Request) -> str:
    """The route as it was declared (`GET /items/{id}`): raw paths as labels would grow without bound."""
    resource = request.match_info.route.resource
    if resource is None:
        return "unmatched"
    method = request.method if request.method in hdrs.METH_ALL else "OTHER"
    return f"{method} {_canonical(resource)}"


def _canonical(resource: web.AbstractResource) -> str:
    return resource.canonical


def _timeout(header: str | None, default: float) -> float:
    if header is None:
        return default
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise BadRequest(f'{TIMEOUT_KEY}: expected a number of seconds above 0, found "{header}"')
    return seconds
