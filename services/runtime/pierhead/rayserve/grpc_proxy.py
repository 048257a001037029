"""The gRPC server of `serve.run`: methods of the user's services, called at the application that the metadata names."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc

from pierhead.edge.grpc_server import SERVER_OPTIONS
from pierhead.rayserve.config import gRPCOptions
from pierhead.rayserve.engine import EngineApplication
from pierhead.rayserve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from pierhead.rayserve.grpc_util import RayServegRPCContext
from pierhead.rayserve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

_APPLICATION = "application"
_MODEL = "multiplexed_model_id"
_REQUEST_ID = "request_id"


class RayServeGrpc:
    """One server for every function `add_...Servicer_to_server` that the options name."""

    def __init__(self, applications: Mapping[str, EngineApplication], options: gRPCOptions, host: str) -> None:
        """`host`: where it listens."""
        self._applications = applications
        self._options = options
        self._host = host
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen. Raises what the import of the functions raises."""
        self._server = server = grpc.aio.server(options=SERVER_OPTIONS)
        for path in self._options.grpc_servicer_functions:
            module, _, name = path.rpartition(".")
            add = getattr(importlib.import_module(module), name)
            recorder = _Recorder()
            add(_Anything(), recorder)
            for service, handlers in recorder.services.items():
                served = {method: self._handler(method, handler) for method, handler in handlers.items()}
                server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, served),))
        host = f"[{self._host}]" if ":" in self._host else self._host
        server.add_insecure_port(f"{host}:{self._options.port}")
        await server.start()

    async def stop(self) -> None:
        """Close the port."""
        if self._server is not None:
            await self._server.stop(1)

    def _handler(self, name: str, handler: Any) -> Any:
        codec = (handler.request_deserializer, handler.response_serializer)

        async def one(request: Any, context: Any) -> Any:
            handle, given = await self._handle(name, context, stream=False)
            try:
                return await handle.remote(request, **given)
            except Exception as error:
                await _abort(context, error, given.get("grpc_context"))

        async def many(request: Any, context: Any) -> AsyncIterator[Any]:
            handle, given = await self._handle(name, context, stream=True)
            try:
                async for item in handle.remote(request, **given):
                    yield item
            except Exception as error:
                await _abort(context, error, given.get("grpc_context"))

        if handler.request_streaming:
            return None
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(many, *codec)
        return grpc.unary_unary_rpc_method_handler(one, *codec)

    async def _handle(self, method: str, context: Any, *, stream: bool) -> tuple[Any, dict[str, Any]]:
        metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        name = metadata.get(_APPLICATION, "")
        application = self._applications.get(name)
        if application is None and len(self._applications) == 1:
            application = next(iter(self._applications.values()))
        if application is None:
            words = f"Application '{name}' not found." if name else "Application metadata not set."
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"{words} Ping /ray.serve.RayServeAPIService/ListApplications for available applications.",
            )
            raise AssertionError("abort raises")
        context.set_trailing_metadata([(_REQUEST_ID, metadata.get(_REQUEST_ID, ""))])
        built = application.built.deployments[application.built.ingress]
        handle = DeploymentHandle[Any](built.name, application.name)
        handle = handle.options(method_name=method, stream=stream, multiplexed_model_id=metadata.get(_MODEL, ""))
        function = getattr(built.deployment.func_or_class, method, None)
        takes = function is not None and "grpc_context" in inspect.signature(function).parameters
        return handle, {"grpc_context": RayServegRPCContext(metadata)} if takes else {}


async def _abort(context: Any, error: Exception, own: RayServegRPCContext | None) -> None:
    code = grpc.StatusCode.INTERNAL
    if isinstance(error, TimeoutError):
        code = grpc.StatusCode.DEADLINE_EXCEEDED
    elif isinstance(error, RequestCancelledError):
        code = grpc.StatusCode.CANCELLED
    elif isinstance(error, BackPressureError):
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
    elif isinstance(error, DeploymentUnavailableError):
        code = grpc.StatusCode.UNAVAILABLE
    if own is not None and own.code() is not None:
        code = own.code() or code
    await context.abort(code, str(error)[:4096])


class _Recorder:
    """Stands in for a server while generated code registers a servicer."""

    def __init__(self) -> None:
        self.services: dict[str, Mapping[str, Any]] = {}

    def add_generic_rpc_handlers(self, _: object) -> None:
        """Does nothing: the other method gets the same handlers with their names."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.services[service] = handlers


class _Anything:
    """A servicer with every method."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None
