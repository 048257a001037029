"""An application as services written as classes: what `python -m pierhead serve`, `dev` and `build` know.

Each deployment is a subclass of RayDeployment, whose contract is two methods with bytes in and out. The bytes are
pickles with a seal (`pickles.py`). Handles call these methods, HAProxy does not: no route leads to them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar, Final

from pierhead.classes.routes import SERVICE_KEY
from pierhead.classes.service import Bound, Service, name_of
from pierhead.edge.edge import Reports
from pierhead.held import HeldModels
from pierhead.http.asgi_exchange import Receive, Send
from pierhead.raised import is_answerable
from pierhead.rayserve.context import DEFAULT_APPLICATION, DeploymentID, ReplicaContext, ReplicaID, _RequestContext
from pierhead.rayserve.deployed_object import DeployedObject
from pierhead.rayserve.deployment import Application, BuiltApplication, BuiltDeployment
from pierhead.rayserve.dispatch import CALL, REPLY, AppGraph, HandleCall, forget_dispatchers, register_dispatchers
from pierhead.rayserve.exceptions import RayServeException, RequestCancelledError
from pierhead.rayserve.handle import DeploymentHandle
from pierhead.rayserve.pickles import ALLOW, SECRET, copied, dumps, failure_of, loads, seal
from pierhead.rayserve.responses import (
    answer,
    fit_for,
    prepare,
    reply,
    request_id_of,
    request_of,
    serve_request,
    timeout_of,
    warm,
    words_of,
)
from pierhead.rayserve.schema import ReplicaRank
from pierhead.routing_stats import Published, publish
from pierhead.tasks import end_tasks

logger = logging.getLogger("ray.serve")

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
    """What the compose file sets for the service outside its x-serve block."""
    __ranks__: ClassVar[set[int]]
    """Those of its replicas in this process."""

    def __init__(self, *_: Any) -> None:
        """The handles of bound services are not used: handles are looked up by name."""
        self._started: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        built, graph = self.__built__, self.__application__
        self._seal = seal().of(built.name)
        self._dispatchers = graph.dispatchers()
        own_name = "" if graph.in_process else os.environ.get("PIERHEAD_REPLICA", "")
        if not graph.in_process:
            register_dispatchers(self._dispatchers)  # for threads that do not know their replica
        self._rank = _rank_of(own_name, self.__ranks__)
        self.__ranks__.add(self._rank)
        name = own_name or uuid.uuid4().hex[:8]
        context = ReplicaContext(
            ReplicaID(name, DeploymentID(built.name, graph.name)),
            None,
            built.options,
            ReplicaRank(rank=self._rank, node_rank=0, local_rank=self._rank),
            built.options.first_replicas,
            _dispatchers=self._dispatchers,
            _shares_process=graph.in_process,
        )
        if graph.in_process:
            self.__reports__ = context._reports = Reports(HeldModels(), Published(), name)
        self.deployed = DeployedObject(built, context)
        """The user's object."""
        self._settings: Any = built.options.user_config

    # ---- the replica's hooks

    async def check_health(self) -> None:
        """Construct the object when first called; then the user's own check."""
        await self._ready()
        await self.deployed.check_health()

    async def reconfigure(self, user_config: Any) -> None:
        """Settings from the compose file, before and after the start."""
        self._settings = user_config
        first = self._started is None
        await self._ready()
        if not first:
            await self.deployed.reconfigure(user_config)

    async def aclose(self) -> None:
        """End the object."""
        self.__ranks__.discard(self._rank)
        forget_dispatchers(self._dispatchers)
        if self._reporting is not None:
            self._reporting.cancel()
        if self._started is None:
            return
        if not self._started.done():
            await end_tasks(self._started)
        if not self._started.cancelled() and self._started.exception() is None:
            await self.deployed.close()

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
        await self.deployed.start(args, kwargs, copied(self._settings))
        if self.deployed.app is not None:
            prepare(self.deployed.app)
        own = self.__reports__
        numbers = self.deployed.report_stats(own.stats.publish if own is not None else lambda stats: publish(**stats))
        self._reporting = asyncio.create_task(numbers, name="numbers for routers")

    # ---- calls

    async def call(self, request: bytes) -> bytes:
        """One result, or one exception."""
        await self._ready()
        call = self._opened(request)
        reply: Any
        try:
            reply = (True, await self.deployed.call(*call))
        except BaseException as error:
            if not is_answerable(error):
                raise
            reply = self._failed(call, error)
        return self._sealed(reply)

    async def stream(self, request: bytes) -> AsyncIterator[bytes]:
        """Many results; an exception is the last item."""
        await self._ready()
        call = self._opened(request)
        items = self.deployed.stream(*call)
        try:
            async for item in items:
                yield self._sealed((True, item))
        except BaseException as error:
            if type(error) is GeneratorExit or not is_answerable(error):  # this stream is closed
                raise
            yield self._sealed(self._failed(call, error))
        finally:
            await items.aclose()  # type: ignore[attr-defined]

    def _opened(self, request: bytes) -> HandleCall:
        context, args, kwargs = loads(self._seal.opened(request, CALL))
        return HandleCall(_RequestContext(**context), args, kwargs)

    def _failed(self, call: HandleCall, error: BaseException) -> tuple[bool, Any]:
        """The reply to a call whose user code has raised."""
        if isinstance(error, asyncio.CancelledError):
            error = RequestCancelledError(call.context.request_id)
        kept = self.__application__.kept
        if kept is None:
            return False, failure_of(error)
        kept[id(error)] = error
        return False, id(error)

    def _sealed(self, reply: Any) -> bytes:
        try:
            raw = dumps(reply)
        except Exception as error:
            raw = dumps((False, failure_of(error)))
        return self._seal.sealed(raw, REPLY)

    # ---- HTTP

    async def _http(self, scope: Any, receive: Any, send: Any) -> None:
        """One request of the edge, whose answer is Ray Serve's."""
        await self._ready()
        send = fit_for(scope, send)
        # With x-serve.strip_prefix the edge has put the route there.
        route, request_id = scope.get("root_path") or "/", request_id_of(scope)
        request = request_of(scope, request_id, route=route, app_name=self.__application__.name)

        async def serve(receive: Receive, send: Send) -> None:
            await serve_request(self.deployed, request, scope, receive, send)

        try:
            await answer(request_id, receive, send, serve, timeout_of(dict(scope["headers"])))
        except BaseException as error:
            if scope["type"] != "http" or not is_answerable(error):
                raise
            await reply(send, *words_of(error))


async def _enter(scope: Any, receive: Any, send: Any) -> None:
    """The ASGI application of every ingress: the service itself stands in the scope (`classes.routes`)."""
    if scope["type"] == "lifespan":
        raise NotImplementedError("the object's start runs the lifespan of its application")
    await scope[SERVICE_KEY]._http(scope, receive, send)


def bound_of(app: Application) -> Bound:
    """The application's first deployment as a bound service, the others beneath it.

    APPLICATION and PREFIXED say how it is called. Raises RayServeException for deployments whose names make one
    service's name.
    """
    graph = AppGraph(os.environ.get(APPLICATION) or DEFAULT_APPLICATION)
    return services_of(BuiltApplication(app), graph, graph.name if os.environ.get(PREFIXED) == "true" else "")


def services_of(built: BuiltApplication, graph: AppGraph, prefix: str) -> Bound:
    """As `bound_of`; `prefix`: what services' names begin with. Puts them into `graph`."""
    classes: dict[str, str] = {}
    for deployment in built.deployments.values():
        defaults = deployment.defaults
        keywords: dict[str, Any] = {**defaults, **deployment.options.x_serve(defaults.get("request_timeout_s"))}
        if graph.in_process:
            keywords.pop("user_config", None)  # the replica has it itself, of any size
        elif deployment.name == built.ingress:
            keywords |= {"asgi": _enter, "route": "/"}
        # In a process there is no name but the one that handles know: those of services are only to differ.
        module = __name__ if graph.in_process else deployment.deployment.func_or_class.__module__
        numbered = f"{prefix}_{len(classes)}" if graph.in_process else prefix
        cls = _class_of(deployment, numbered, module, keywords)
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


def _class_of(
    deployment: BuiltDeployment, application: str, module: str, keywords: Mapping[str, Any]
) -> type[RayDeployment]:
    name = _class_name(deployment.name, application)
    names = {"__module__": module, "__qualname__": name, "__doc__": deployment.deployment.func_or_class.__doc__}
    make: Any = type(RayDeployment)
    cls: type[RayDeployment] = make(name, (RayDeployment,), names, **keywords)
    cls.__built__ = deployment
    cls.__ranks__ = set()
    return cls


def _rank_of(replica: str, taken: set[int]) -> int:
    """The number at the end of a replica's name, from 0; without a name the least that none has."""
    numbered = re.search(r"-(\d+)$", replica)
    if numbered:
        return max(0, int(numbered[1]) - 1)
    return next(number for number in itertools.count() if number not in taken)
