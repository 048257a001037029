"""An application as services written as classes: what `python -m pierhead serve`, `dev` and `build` know.

Each deployment is a subclass of RayDeployment, whose contract is two methods with bytes in and out. The bytes are
pickles with a seal (`pickles.py`). Handles call these methods, HAProxy does not: no route leads to them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar, Final, cast

from pierhead.classes.handles import handle_to, options
from pierhead.classes.service import Bound, Service, name_of
from pierhead.errors import Backpressure, DeadlineExceeded, NoReplica, PierheadError
from pierhead.raised import is_answerable
from pierhead.rayserve.context import (
    DEFAULT_APPLICATION,
    DeploymentID,
    ReplicaContext,
    ReplicaID,
    cancel_children,
)
from pierhead.rayserve.deployment import Application, BuiltApplication, BuiltDeployment
from pierhead.rayserve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    RequestCancelledError,
)
from pierhead.rayserve.handle import DeploymentHandle, RemoteCall, forget_dispatcher, register_dispatcher, resolved
from pierhead.rayserve.pickles import ALLOW, SECRET, PickledError, Seal, copied, dumps, failure_of, loads, seal
from pierhead.rayserve.request_router import tell_routers
from pierhead.rayserve.responses import REQUEST_ID, Message, prepare, request_of, serve_request, warm, words_of
from pierhead.rayserve.schema import ReplicaRank
from pierhead.rayserve.servant import Servant
from pierhead.request import accept_opaque, current_request
from pierhead.routing_stats import publish

logger = logging.getLogger("ray.serve")

_CALL, _REPLY = "call", "reply"

APPLICATION: Final = "PIERHEAD_RAY_APPLICATION"
"""The name of the application."""

PREFIXED: Final = "PIERHEAD_RAY_PREFIXED"
"""true: the names of its services begin with the application's, as another one of the project has deployments of the
same names.
"""


class RayDeployment(Service):
    """One replica of a deployment. Its subclasses are made by `bound_of`."""

    __built__: ClassVar[BuiltDeployment]
    __application__: ClassVar[AppGraph]
    __environment__: ClassVar[Mapping[str, str]] = {
        ALLOW: "true",
        SECRET: "${" + SECRET + ":?write a secret of 32 characters into .env}",
    }
    """What the compose file sets for the service beside its x-serve block."""

    def __init__(self, *_: Any) -> None:
        """The handles of bound services are not used: handles are had by name."""
        self._started: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        built, own_seal = self.__built__, seal()
        self._seal = own_seal.of(built.name)
        app_name = self.__application__.name
        replica = os.environ.get("PIERHEAD_REPLICA") or uuid.uuid4().hex[:8]
        replica_id = ReplicaID(replica, DeploymentID(built.name, app_name))
        self._dispatchers = dispatchers = {
            (deployment := DeploymentID(name, app_name)): RemoteDeployment(bound, deployment, own_seal)
            for name, bound in self.__application__.services.items()
        }
        for deployment, dispatcher in dispatchers.items():
            register_dispatcher(deployment, dispatcher)  # for threads that do not know their replica
        context = ReplicaContext(
            replica_id,
            None,
            built.options,
            ReplicaRank(0, 0, 0),
            built.options.first_replicas,
            _dispatchers=dispatchers,
        )
        self._servant = Servant(built, context)
        self._settings: Any = built.options.user_config

    # ---- the replica's hooks

    async def check_health(self) -> None:
        """Construct the object when first called; then the user's own check."""
        await self._ready()
        await self._servant.check_health()

    async def reconfigure(self, user_config: Any) -> None:
        """Settings from the compose file, before and after the start."""
        self._settings = user_config
        first = self._started is None
        await self._ready()
        if not first:
            await self._servant.reconfigure(user_config)

    async def aclose(self) -> None:
        """End the object."""
        for deployment, dispatcher in self._dispatchers.items():
            forget_dispatcher(deployment, dispatcher)
        if self._reporting is not None:
            self._reporting.cancel()
        if self._started is not None and self._started.done() and self._started.exception() is None:
            await self._servant.close()

    async def _ready(self) -> None:
        if self._started is None or (self._started.done() and self._started.exception() is not None):
            self._started = asyncio.create_task(self._start(), name="rayserve start")
        await asyncio.shield(self._started)

    async def _start(self) -> None:
        built = self.__built__
        app_name = self.__application__.name
        args, kwargs = built.arguments(lambda name: DeploymentHandle(name, app_name))
        if type(self).__asgi__ is not None:
            warm()
        await self._servant.start(args, kwargs, copied(self._settings))
        if self._servant.app is not None:
            prepare(self._servant.app)
        numbers = self._servant.report_stats(lambda stats: publish(**stats))
        self._reporting = asyncio.create_task(numbers, name="numbers for routers")

    # ---- calls

    async def call(self, request: bytes) -> bytes:
        """One result, or one exception."""
        await self._ready()
        call, args, kwargs = loads(self._seal.opened(request, _CALL))
        reply: Any
        try:
            reply = (True, await self._servant.call(call, args, kwargs))
        except BaseException as error:
            if not is_answerable(error):
                raise
            own = isinstance(error, asyncio.CancelledError)
            reply = (False, failure_of(RequestCancelledError(call.request_id) if own else error))
        return self._sealed(reply)

    async def stream(self, request: bytes) -> AsyncIterator[bytes]:
        """Many results; an exception is the last item."""
        await self._ready()
        call, args, kwargs = loads(self._seal.opened(request, _CALL))
        items = self._servant.stream(call, args, kwargs)
        try:
            async for item in items:
                yield self._sealed((True, item))
        except BaseException as error:
            if type(error) is GeneratorExit or not is_answerable(error):  # this stream is closed
                raise
            yield self._sealed((False, failure_of(error)))
        finally:
            await items.aclose()  # type: ignore[attr-defined]

    def _sealed(self, reply: Any) -> bytes:
        try:
            raw = dumps(reply)
        except Exception as error:
            raw = dumps((False, failure_of(error)))
        return self._seal.sealed(raw, _REPLY)

    # ---- HTTP

    async def _http(self, scope: Any, receive: Any, send: Any) -> None:
        """One request of the edge, whose answer is Ray Serve's."""
        await self._ready()
        current = current_request()
        found = next((value for key, value in scope["headers"] if key == REQUEST_ID), None)
        request_id = found.decode("latin-1") if found else current.request_id if current else uuid.uuid4().hex
        if found is None:
            scope["headers"] = [*scope["headers"], (REQUEST_ID, request_id.encode())]
        # With x-serve.strip_prefix the edge has put the route there.
        route = scope.get("root_path") or "/"
        request = request_of(scope, request_id, route=route, app_name=self.__application__.name)
        started = complete = False

        async def noted(message: Message) -> None:
            nonlocal started, complete
            started = True
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        async def watched() -> Message:
            message: Message = await receive()
            if message["type"] == "http.disconnect" and not complete:
                cancel_children()  # the application may end at this message, and leave them
            return message

        try:
            await serve_request(self._servant, request, scope, watched, noted)
        except BaseException as error:
            if not is_answerable(error):
                raise
            if started or scope["type"] != "http":
                logger.warning("Request %s failed", request_id, exc_info=error)
                if not started:
                    raise
                return
            status, text, headers = words_of(error)
            kind = (b"content-type", b"text/plain; charset=utf-8")
            await send({"type": "http.response.start", "status": status, "headers": [kind, *headers]})
            await send({"type": "http.response.body", "body": text.encode()})


async def _enter(scope: Any, receive: Any, send: Any) -> None:
    """The ASGI application of every ingress: the service itself stands in the scope (`classes.routes`)."""
    if scope["type"] == "lifespan":  # the object's start runs that of its application
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    await scope["pierhead.service"]._http(scope, receive, send)


class RemoteDeployment:
    """Calls of a deployment whose replicas are behind a service's handle. A Dispatcher."""

    def __init__(self, bound: Bound, deployment: DeploymentID, own_seal: Seal) -> None:
        self.loop = asyncio.get_running_loop()
        self.id = deployment
        self._handle: Any = handle_to(bound)
        self._options = cast("type[RayDeployment]", bound.cls).__built__.options
        self._seal = own_seal.of(deployment.name)

    async def call(self, call: RemoteCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """See Dispatcher."""
        args, kwargs = await resolved(args, kwargs)
        try:
            reply = await self._for(call).call(self._request(call, args, kwargs))
        except PierheadError as error:
            raise self._translated(error) from None
        return self._result(reply)

    async def stream(self, call: RemoteCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AsyncIterator[Any]:
        """See Dispatcher."""
        args, kwargs = await resolved(args, kwargs)
        items = self._for(call).stream(self._request(call, args, kwargs))
        try:
            async for item in items:
                yield self._result(item)
        except PierheadError as error:
            raise self._translated(error) from None
        finally:
            await items.aclose()

    async def broadcast(self, call: RemoteCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Not possible: a handle calls one replica."""
        raise RayServeException("handle.broadcast() works within one process only: a handle calls one replica")

    def _request(self, call: RemoteCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        if self._options.request_router_config is not None:
            tell_routers(self.id, self._options.max_ongoing_requests, call, args, kwargs)
        return self._seal.sealed(dumps((call, args, kwargs)), _CALL)

    def _for(self, call: RemoteCall) -> Any:
        session, model = accept_opaque(call.session_id), accept_opaque(call.model_id)
        return options(self._handle, session_id=session, model_id=model) if session or model else self._handle

    def _result(self, reply: bytes) -> Any:
        is_result, value = loads(self._seal.opened(reply, _REPLY))
        if is_result:
            return value
        raise cast("PickledError", value).error()

    def _translated(self, error: PierheadError) -> Exception:
        """The error of Ray Serve's name for one of the way to the replica."""
        if isinstance(error, Backpressure):
            given = self._options
            answer = given.backpressure_config
            most = given.max_queued_requests
            full = BackPressureError(most, most, answer.status_code, answer.retry_after_s)
            full.add_note(error.message)
            return full
        if isinstance(error, DeadlineExceeded):
            return TimeoutError(error.message)
        if isinstance(error, NoReplica):
            return DeploymentUnavailableError(self.id)
        return error


class AppGraph:
    """The services of one application by the names of its deployments."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.services: dict[str, Bound] = {}


def bound_of(app: Application) -> Bound:
    """The application's first deployment as a bound service, the others beneath it.

    APPLICATION and PREFIXED say how it is called. Raises RayServeException for deployments whose names make one
    service's name.
    """
    built = BuiltApplication(app)
    graph = AppGraph(os.environ.get(APPLICATION) or DEFAULT_APPLICATION)
    name = graph.name if os.environ.get(PREFIXED) == "true" else ""
    classes: dict[str, str] = {}
    for deployment in built.deployments.values():
        cls = _class_of(deployment, name, is_ingress=deployment.name == built.ingress)
        cls.__application__ = graph
        other = classes.setdefault(name_of(cls), deployment.name)
        if other != deployment.name:
            raise RayServeException(
                f"the deployments {other} and {deployment.name} would both be the service {name_of(cls)}: rename one "
                "by its option `name`"
            )
        children = [graph.services[child] for child in dict.fromkeys(deployment.children)]
        bind: Any = cls.bind
        graph.services[deployment.name] = bind(*children)
    return graph.services[built.ingress]


Application._to_services = bound_of


def service_name(deployment: str, application: str = "") -> str:
    """The name of a deployment's service in the compose file."""
    return name_of(type(_class_name(deployment, application), (), {}))


def _class_name(deployment: str, application: str) -> str:
    name = re.sub(r"\W+", "_", f"{application}_{deployment}", flags=re.ASCII).strip("_")
    return f"Deployment{name}" if not name or name[0].isdigit() else name


def _class_of(deployment: BuiltDeployment, application: str, *, is_ingress: bool) -> type[RayDeployment]:
    name = _class_name(deployment.name, application)
    definition = deployment.deployment.func_or_class
    names = {"__module__": definition.__module__, "__qualname__": name, "__doc__": definition.__doc__}
    keywords: dict[str, Any] = deployment.options.x_serve()
    if is_ingress:
        keywords |= {"asgi": _enter, "route": "/"}
    make: Any = type(RayDeployment)
    cls: type[RayDeployment] = make(name, (RayDeployment,), names, **keywords)
    cls.__built__ = deployment
    return cls
