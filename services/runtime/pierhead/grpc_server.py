"""The gRPC side of a replica: generated servicers behind admission, deadlines, and errors as statuses."""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NoReturn, TypeAlias, cast

import grpc

from pierhead.edge import Edge, is_answerable
from pierhead.errors import ONGOING_KEY, REFUSED_KEY, BadRequest, DeadlineExceeded, PierheadError
from pierhead.request import CURRENT, RequestContext, from_metadata

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handlers: TypeAlias = "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"

SERVER_OPTIONS = (
    # Callers ping idle connections every two seconds to notice a dead peer; the default would call that a flood.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # a second server on the port is a mistake that must be seen
)

DEADLINE_MOMENT_S = 0.02
"""A call that is cancelled with less time left than this has met its deadline."""

_STATUS_NAME = {status.value[0]: status.name for status in grpc.StatusCode}


def registration_of(servicer: object) -> Callable[[Any, Any], None] | None:
    """The generated `add_<Name>Servicer_to_server` of the class that `servicer` implements; None when there is none."""
    for base in type(servicer).__mro__:
        module = sys.modules.get(base.__module__)
        found = getattr(module, f"add_{base.__name__}_to_server", None)
        if callable(found):
            return cast("Callable[[Any, Any], None]", found)
    return None


class _Recorder:
    """Stands in for a server while generated code registers a servicer, and keeps what it registers."""

    def __init__(self) -> None:
        self.services: dict[str, Handlers] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same handlers come with their names through the other method."""

    def add_registered_method_handlers(self, service: str, handlers: Handlers) -> None:
        self.services[service] = handlers


def register(servicer: object, server: grpc.aio.Server, edge: Edge) -> list[str]:
    """Put a servicer's methods, each behind the edge, onto a server; returns the full names of its gRPC services.

    Raises TypeError for a servicer whose class was not generated, or with a method that is not `async def`.
    """
    add = registration_of(servicer)
    if add is None:
        raise TypeError(f"{type(servicer).__name__} does not inherit from a generated ...Servicer class")
    recorder = _Recorder()
    add(servicer, recorder)
    for service, handlers in recorder.services.items():
        guarded = {name: _guard(f"{service}/{name}", handler, edge) for name, handler in handlers.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, guarded),))
        server.add_registered_method_handlers(service, guarded)
    return list(recorder.services)


def _guard(method: str, handler: grpc.RpcMethodHandler[Any, Any], edge: Edge) -> grpc.RpcMethodHandler[Any, Any]:
    """The same method behind the edge. Requests come in undecoded: refusing must not cost the parsing of a tensor."""
    behaviour = _behaviour(handler)
    if not (inspect.iscoroutinefunction(behaviour) or inspect.isasyncgenfunction(behaviour)):
        behaviour = _not_async(method, behaviour)
    kind = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
    if handler.response_streaming:
        return kind(_streaming(method, handler, behaviour, edge), None, handler.response_serializer)
    kind = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    return kind(_unary(method, handler, behaviour, edge), None, handler.response_serializer)


def _behaviour(handler: grpc.RpcMethodHandler[Any, Any]) -> Callable[..., Any]:
    for name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        found = getattr(handler, name)
        if found is not None:
            return cast("Callable[..., Any]", found)
    raise TypeError("a gRPC method handler without a behaviour")


def _not_async(method: str, behaviour: Callable[..., Any]) -> Callable[..., Awaitable[NoReturn]]:
    """A method that the servicer inherits answers UNIMPLEMENTED; one of its own that is not async is a mistake."""
    if not _is_generated(behaviour):
        raise TypeError(
            f"{method}: {behaviour.__qualname__} must be `async def`; a plain function would block the loop"
        )

    async def unimplemented(_: object, context: Context) -> NoReturn:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented by this service")

    return unimplemented


def _is_generated(behaviour: Callable[..., Any]) -> bool:
    return getattr(behaviour, "__module__", "").endswith("_pb2_grpc")


class _Call:
    """One accepted call from admission to its end."""

    __slots__ = ("_timeout", "code", "context", "edge", "method", "started")

    def __init__(self, edge: Edge, method: str, context: Context) -> None:
        self.edge = edge
        self.method = method
        self.context = context
        self.code = "OK"
        self.started = time.monotonic()
        remaining = cast("float | None", context.time_remaining())  # None = the caller set no deadline
        limit = edge.settings.request_timeout_s if remaining is None else remaining
        request: RequestContext = from_metadata(context.invocation_metadata() or (), self.started + limit)
        CURRENT.set(request)  # each call runs in a task, and so in a context, of its own
        context.set_trailing_metadata((self._ongoing(),))  # also on a reply that the service itself aborts
        # gRPC itself ends calls that bring a deadline; the others get the service's.
        self._timeout = asyncio.timeout(limit) if remaining is None else None

    async def __aenter__(self) -> _Call:
        if self._timeout is not None:
            await self._timeout.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._timeout is not None:
            try:
                await self._timeout.__aexit__(kind, error, trace)
            except TimeoutError:
                error = DeadlineExceeded(
                    f"{self.method} was not done within {self.edge.settings.request_timeout_s:g} s, the default of "
                    "this service for calls that bring no deadline"
                )
        try:
            if error is None:
                self._succeed()
            else:
                await self._fail(error)
        finally:
            self.edge.finished(self.method, self.code, time.monotonic() - self.started)

    def _succeed(self) -> None:
        code = self.context.code()
        if code:
            self.code = _status_name(code)
        theirs = [pair for pair in self.context.trailing_metadata() or () if pair[0] != ONGOING_KEY]
        self.context.set_trailing_metadata((*theirs, self._ongoing()))

    def _ongoing(self) -> tuple[str, str]:
        """The load that the reply tells: what is left when this call is gone."""
        return (ONGOING_KEY, str(self.edge.admission.ongoing - 1))

    async def _fail(self, error: BaseException) -> None:
        """Answer with a status. Raises what `abort` raises; leaves cancellation and the user's own abort alone."""
        if isinstance(error, grpc.aio.AbortError):
            self.code = _status_name(self.context.code())
            return
        if not is_answerable(error):
            # gRPC cancels alike what its caller cancels and what is past its caller's deadline. That strikes there a
            # moment earlier than here, and a cancellation is then what arrives.
            late = self._timeout is None and self.context.time_remaining() <= DEADLINE_MOMENT_S
            self.code = (grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED).name
            return
        answer = self.edge.error_for(error, self.method)
        self.code = answer.grpc_status.name
        await abort(self.context, answer, self._ongoing())


def _status_name(code: object) -> str:
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _STATUS_NAME.get(cast("int", code), "UNKNOWN")


async def abort(context: Context, error: PierheadError, *more: tuple[str, str]) -> NoReturn:
    """End a call with an error's status, message and trailing metadata."""
    await context.abort(error.grpc_status, error.details(), (*error.trailing_metadata(), *more))


async def _refuse(edge: Edge, method: str, context: Context, refusal: PierheadError) -> NoReturn:
    reason = edge.refused(refusal)
    edge.metrics.requests.inc((method, refusal.grpc_status.name))
    await abort(context, refusal, (REFUSED_KEY, reason), (ONGOING_KEY, str(edge.admission.ongoing)))


def _unary(
    method: str, handler: grpc.RpcMethodHandler[Any, Any], behaviour: Callable[..., Awaitable[Any]], edge: Edge
) -> Callable[[Any, Context], Awaitable[Any]]:
    decode = _decoder(method, handler)

    async def call(raw: Any, context: Context) -> Any:
        refusal = edge.admission.enter()
        if refusal is not None:
            await _refuse(edge, method, context, refusal)
        try:
            async with _Call(edge, method, context):
                return await behaviour(decode(raw), context)
        finally:
            edge.admission.leave()

    return call


def _streaming(
    method: str, handler: grpc.RpcMethodHandler[Any, Any], behaviour: Callable[..., Any], edge: Edge
) -> Callable[[Any, Context], Awaitable[None]]:
    decode = _decoder(method, handler)

    async def call(raw: Any, context: Context) -> None:
        refusal = edge.admission.enter()
        if refusal is not None:
            await _refuse(edge, method, context, refusal)
        try:
            async with _Call(edge, method, context):
                await _stream(behaviour(decode(raw), context), context)
        finally:
            edge.admission.leave()

    return call


async def _stream(running: Any, context: Context) -> None:
    """Send what a streaming method produces: it is an async generator, or a coroutine that writes by itself."""
    if not inspect.isasyncgen(running):
        await running
        return
    try:
        async for message in running:
            await context.write(message)
    finally:
        await running.aclose()  # a cancelled stream ends its generator now, not at garbage collection


def _decoder(method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> Callable[[Any], Any]:
    deserialise = handler.request_deserializer
    if deserialise is None:
        return lambda raw: raw

    def decode(raw: bytes) -> Any:
        try:
            return deserialise(raw)
        except Exception as error:
            raise BadRequest(f"{method}: {len(raw)} bytes that are not the request message it expects") from error

    if not handler.request_streaming:
        return decode

    async def decode_each(messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for raw in messages:
            yield decode(raw)

    return decode_each
