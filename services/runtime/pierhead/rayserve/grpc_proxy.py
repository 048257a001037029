"""The gRPC server of `serve.run`: methods of the user's services, called at the application that the metadata names."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Final

import grpc
from google.protobuf.wrappers_pb2 import StringValue

from pierhead.edge.grpc_server import SERVER_OPTIONS
from pierhead.errors import MAX_DETAILS, clip
from pierhead.raised import is_answerable
from pierhead.rayserve.config import gRPCOptions
from pierhead.rayserve.context import _RequestContext, _serve_request_context
from pierhead.rayserve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from pierhead.rayserve.grpc_util import RayServegRPCContext, gRPCInputStream
from pierhead.rayserve.running import RunningApplication

logger = logging.getLogger("ray.serve")

_OWN_SERVICE: Final = "ray.serve.RayServeAPIService"


class RayServeGrpc:
    """One server for every function `add_...Servicer_to_server` that the options name, and for Ray Serve's own."""

    def __init__(self, applications: Mapping[str, RunningApplication], options: gRPCOptions, host: str) -> None:
        """`host`: where it listens."""
        self._applications = applications
        self._options = options
        self._host = host
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen. Raises what the import of the functions raises."""
        self._server = server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_OWN_SERVICE, self._own()),))
        for path in self._options.grpc_servicer_functions:
            module, _, name = path.rpartition(".")
            add = getattr(importlib.import_module(module), name)
            recorder = _Recorder()
            add(_Anything(), recorder)
            server.add_generic_rpc_handlers([_Answered(each, self._handler) for each in recorder.handlers])
        host = f"[{self._host}]" if ":" in self._host else self._host
        server.add_insecure_port(f"{host}:{self._options.port}")
        await server.start()

    async def stop(self) -> None:
        """Close the port."""
        if self._server is not None:
            await self._server.stop(1)

    def _own(self) -> dict[str, Any]:
        """Ray Serve's service for load balancers. Field 1 of its replies is text, as a StringValue's is."""

        async def healthz(_: bytes, __: Any) -> bytes:
            return StringValue(value="success").SerializeToString()

        async def list_applications(_: bytes, __: Any) -> bytes:
            return b"".join(StringValue(value=name).SerializeToString() for name in self._applications)

        return {
            "Healthz": grpc.unary_unary_rpc_method_handler(healthz),
            "ListApplications": grpc.unary_unary_rpc_method_handler(list_applications),
        }

    def _handler(self, name: str, handler: Any) -> Any:
        async def many(request: Any, context: Any) -> AsyncGenerator[Any]:
            own = RayServegRPCContext(context)
            own._set_on_grpc_context(context)
            application = await self._application(own.application() or "", context)
            given = gRPCInputStream(request) if handler.request_streaming else request
            try:
                found = self._items(application, name, given, own, context, stream=handler.response_streaming)
                async with aclosing(found) as items:
                    async for item in items:
                        yield item
            except BaseException as error:
                if type(error) is GeneratorExit or isinstance(error, grpc.aio.AbortError) or not is_answerable(error):
                    raise
                await self._abort(context, error, own)
            finally:
                if handler.request_streaming:
                    given.cancel()

        async def one(request: Any, context: Any) -> Any:
            async with aclosing(many(request, context)) as items:
                return await anext(items)

        kind = f"{'stream' if handler.request_streaming else 'unary'}_"
        kind += "stream" if handler.response_streaming else "unary"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        answer = many if handler.response_streaming else one
        return make(answer, handler.request_deserializer, handler.response_serializer)

    async def _application(self, name: str, context: Any) -> RunningApplication:
        application = self._applications.get(name)
        if application is None and len(self._applications) == 1:
            application = next(iter(self._applications.values()))
        if application is None:
            words = f"Application '{name}' not found." if name else "Application metadata not set."
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"{words} Ping /{_OWN_SERVICE}/ListApplications for available applications.",
            )
            raise AssertionError("abort raises")
        return application

    async def _items(
        self,
        application: RunningApplication,
        method: str,
        request: Any,
        own: RayServegRPCContext,
        context: Any,
        *,
        stream: bool,
    ) -> AsyncGenerator[Any]:
        """What the method returns or yields. Raises what it raises, and TimeoutError."""
        # gRPC runs each call in a task of its own.
        _serve_request_context.set(_RequestContext(own._id, application.route_prefix or "", application.name))
        model, session = own.multiplexed_model_id() or "", own._by_key.get("session_id", "")
        handle = application.handle().options(
            method_name=method, stream=stream, multiplexed_model_id=model, session_id=session
        )
        target = application.built.deployments[application.built.ingress].deployment.func_or_class
        function = target if inspect.isfunction(target) else getattr(target, method, None)
        takes = function is not None and "grpc_context" in inspect.signature(function).parameters
        limit_s = self._options.request_timeout_s
        until = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        response = handle.remote(request, **({"grpc_context": own} if takes else {}))
        try:
            while True:
                async with asyncio.timeout_at(until):
                    item = await (anext(response) if stream else response)
                own._set_on_grpc_context(context)
                yield item
                if not stream:
                    return
        except StopAsyncIteration:
            own._set_on_grpc_context(context)
        finally:
            response.cancel()

    async def _abort(self, context: Any, error: BaseException, own: RayServegRPCContext) -> None:
        words = str(error)
        if isinstance(error, TimeoutError):
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            limit_s = self._options.request_timeout_s
            words = "Request timed out." if limit_s is None else f"Request timed out after {limit_s}s."
        elif isinstance(error, RequestCancelledError):
            code = grpc.StatusCode.CANCELLED
        elif isinstance(error, BackPressureError):
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
        elif isinstance(error, DeploymentUnavailableError):
            code = grpc.StatusCode.UNAVAILABLE
        elif (set_code := own.code()) is not None:
            code, words = set_code, own.details() or words
        else:
            code = grpc.StatusCode.INTERNAL
        await context.abort(code, clip(words, MAX_DETAILS))


class _Recorder:
    """Stands in for a server while generated code registers a servicer."""

    def __init__(self) -> None:
        self.handlers: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        self.handlers += handlers

    def add_registered_method_handlers(self, *_: object) -> None:
        """Does nothing: the other method gets the same handlers, and from older code it alone does."""


class _Answered(grpc.GenericRpcHandler):
    """A service's methods, each answered by `answering(name, handler)` in the place of its handler."""

    def __init__(self, registered: Any, answering: Callable[[str, Any], Any]) -> None:
        self._registered = registered
        self._answering = answering

    def service(self, handler_call_details: Any) -> Any:
        """See GenericRpcHandler."""
        handler = self._registered.service(handler_call_details)
        name = handler_call_details.method.rpartition("/")[2]
        return None if handler is None else self._answering(name, handler)


class _Anything:
    """A servicer with every method."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None
