"""The gRPC side of a replica: generated servicers behind admission, deadlines, and errors as statuses."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Iterable
from typing import Any, NoReturn, cast

import grpc

from pierhead.edge.edge import Edge, too_long
from pierhead.edge.methods import Context, ServedMethod, status_of
from pierhead.errors import ONGOING_KEY, REFUSED_KEY, PierheadError
from pierhead.held import MODELS_KEY
from pierhead.memory import process
from pierhead.memory.scope import SCOPE
from pierhead.memory.sharing import LINK_KEY, Sharing, around, serving
from pierhead.raised import is_answerable
from pierhead.request import CURRENT, from_metadata
from pierhead.routing_stats import STATS_KEY

SERVER_OPTIONS = (
    # Callers ping idle connections every two seconds to notice a dead peer; the default treats that as a flood.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # a second server on the port must fail
)

DEADLINE_MOMENT_S = 0.02
"""A call that is cancelled with less time left than this counts as late."""

ANSWER_S = 1.0
"""How long a failed call may take to send its status; until then it keeps its place."""

_ABOUT_REPLICA = (ONGOING_KEY, MODELS_KEY, STATS_KEY)

_LINK = re.compile("[0-9a-f]{32}")


def register(methods: Iterable[ServedMethod], server: grpc.aio.Server, edge: Edge) -> list[str]:
    """Register methods, each behind the edge, with a server; returns the full names of their gRPC services."""
    services = guarded(methods, edge)
    for service, handlers in services.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_registered_method_handlers(service, handlers)
    return list(services)


def guarded(methods: Iterable[ServedMethod], edge: Edge) -> dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]]:
    """What answers methods, each behind the edge, by the full name of its gRPC service and its own."""
    services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}
    for method in methods:
        services.setdefault(method.service, {})[method.name.rpartition("/")[2]] = _guard(method, edge)
    return services


def _guard(method: ServedMethod, edge: Edge) -> grpc.RpcMethodHandler[Any, Any]:
    """The method behind the edge. The edge decodes and encodes: a refusal must not cost the parsing of a tensor, and a
    reply that cannot be encoded counts as a failure of the service.
    """
    streams = method.request_streaming or method.response_streaming

    async def call(raw: Any, context: Context) -> Any:
        refusal = edge.admission.enter()
        if refusal is not None:
            reason = edge.refused(refusal)
            edge.metrics.requests.inc((method.name, refusal.grpc_status.name))
            await _abort(context, refusal, (REFUSED_KEY, reason), (ONGOING_KEY, str(edge.admission.ongoing)))
        try:
            async with _AcceptedCall(edge, method, context) as accepted:
                served = accepted.method
                known: Any = _Messages(context, served, edge) if streams else context
                running = served.behaviour(served.argument(raw), known)
                if method.response_streaming:
                    return await _stream(running, known)
                reply = await running
                return b"" if context.code() else served.encode(reply)  # gRPC sends no reply with such a status
        finally:
            edge.admission.leave()

    ways = ("stream" if many else "unary" for many in (method.request_streaming, method.response_streaming))
    make = getattr(grpc, f"{'_'.join(ways)}_rpc_method_handler")
    return cast("grpc.RpcMethodHandler[Any, Any]", make(call))


class _AcceptedCall:
    """One accepted call from admission to its end."""

    __slots__ = ("_request", "_sharing", "_timeout", "code", "context", "edge", "method", "started")

    def __init__(self, edge: Edge, method: ServedMethod, context: Context) -> None:
        self.edge = edge
        self.method = method
        self.context = context
        self.code = "OK"
        self.started = time.monotonic()
        remaining = cast("float | None", context.time_remaining())  # None = the caller set no deadline
        longest = edge.settings.request_timeout_s
        limit = longest if remaining is None else min(remaining, longest)
        self._request = request = from_metadata(
            context.invocation_metadata() or (), self.started + limit, edge.begin_trace
        )
        CURRENT.set(request)  # each call runs in a task, and so in a context, of its own
        self._sharing: Sharing | None = None
        if process.MEMORY is not None:
            token = next((value for key, value in context.invocation_metadata() or () if key == LINK_KEY), "")
            link = bytes.fromhex(str(token)) if _LINK.fullmatch(str(token)) else b""
            self._sharing = serving(link, many_in=method.request_streaming, many_out=method.response_streaming)
            self.method = around(self._sharing, method)
            SCOPE.set(self._sharing.scope)
        context.set_trailing_metadata(self._about_replica())  # already here, for calls that the service aborts
        # gRPC itself ends a call at its caller's deadline. Without one, or with a later one, the service's counts.
        self._timeout = asyncio.timeout(limit) if remaining is None or remaining > longest else None

    async def __aenter__(self) -> _AcceptedCall:
        if self._timeout is not None:
            await self._timeout.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._timeout is not None:
            try:
                await self._timeout.__aexit__(kind, error, trace)
            except TimeoutError:
                error = too_long(self.method.name, self.edge.settings)
        try:
            if error is not None:
                await self._fail(error)
            else:
                code = self.context.code()
                if code:
                    self.code = status_of(code).name
                theirs = [pair for pair in self.context.trailing_metadata() or () if pair[0] not in _ABOUT_REPLICA]
                self.context.set_trailing_metadata((*theirs, *self._about_replica()))
        finally:
            if error is not None:  # gRPC keeps what `abort` raised, and so this frame: arrays would keep their memory
                error.__traceback__ = trace = None
            if self._sharing is not None:
                self._sharing.end()
            request = self._request
            seconds = time.monotonic() - self.started
            self.edge.finished(self.method.name, self.code, seconds, request.request_id, request.trace)

    def _about_replica(self) -> tuple[tuple[str, str], ...]:
        """For callers' policies: the load without this call, the models held, the numbers published."""
        about: tuple[tuple[str, str], ...] = ((ONGOING_KEY, str(self.edge.admission.ongoing - 1)),)
        held, stats, _ = self.edge.reports
        if held.version:
            about = (*about, (MODELS_KEY, held.text))
        if stats.version:
            about = (*about, (STATS_KEY, stats.text))
        return about

    async def _fail(self, error: BaseException) -> None:
        """Answer with a status. Raises what `abort` raises; leaves cancellation and the user's own abort alone."""
        if isinstance(error, grpc.aio.AbortError):
            self.code = status_of(self.context.code()).name
            return
        if not is_answerable(error):
            # gRPC cancels a call both when its caller cancels it and when its caller's deadline passes. The deadline
            # passes there a moment earlier than here.
            late = self._timeout is None and self.context.time_remaining() <= DEADLINE_MOMENT_S
            self.code = (grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED).name
            return
        answer = self.edge.public_error_for(error, self.method.name)
        self.code = answer.grpc_status.name
        try:
            async with asyncio.timeout(ANSWER_S):
                await _abort(self.context, answer, *self._about_replica())
        except TimeoutError:
            # The status waits behind messages that the caller does not read. This ends the stream without a status.
            raise asyncio.CancelledError from None


async def _abort(context: Context, error: PierheadError, *more: tuple[str, str]) -> NoReturn:
    """End a call with an error's status, message and trailing metadata."""
    await context.abort(error.grpc_status, error.details(), (*error.trailing_metadata(), *more))


class _Messages:
    """A call's context that decodes each message that the method reads, and encodes and counts each that it writes."""

    __slots__ = ("_context", "_edge", "_method")

    def __init__(self, context: Context, method: ServedMethod, edge: Edge) -> None:
        self._context = context
        self._method = method
        self._edge = edge

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """The next request message, or `grpc.aio.EOF`."""
        raw = await self._context.read()
        return raw if raw is grpc.aio.EOF else self._method.decode(raw)

    async def write(self, message: Any) -> None:
        """Send a reply message."""
        await self._context.write(self._method.encode(message))
        self._edge.moved += 1


async def _stream(running: Any, context: Context) -> None:
    """Send the replies of a streaming method: it is an async generator, or a coroutine that calls `write`."""
    if not inspect.isasyncgen(running):
        await running
        return
    try:
        async for message in running:
            await context.write(message)
    finally:
        await running.aclose()  # a cancelled stream ends its generator now, not at garbage collection
