"""`serve.run` and the functions around it: applications of this process."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from pierhead.http.asgi_server import UvicornServer
from pierhead.raised import is_answerable
from pierhead.rayserve.config import HTTPOptions, gRPCOptions, made
from pierhead.rayserve.context import DEFAULT_APPLICATION, DeploymentID, current_replica
from pierhead.rayserve.deployment import Application
from pierhead.rayserve.dispatch import is_known
from pierhead.rayserve.exceptions import RayServeException, RayTaskError
from pierhead.rayserve.grpc_proxy import RayServeGrpc
from pierhead.rayserve.handle import DeploymentHandle
from pierhead.rayserve.logs import let_through, write_logs
from pierhead.rayserve.loop_thread import LoopThread
from pierhead.rayserve.proxy import RayServeProxy, listen
from pierhead.rayserve.running import RunningApplication
from pierhead.rayserve.schema import LoggingConfig, ProxyStatus, ServeStatus, TracingConfig

LEAVE_S: Final = 5.0
"""How long the servers may take to end at the process's end."""


@dataclass(frozen=True)
class RunTarget:
    """One application for `run_many`."""

    target: Application
    name: str = DEFAULT_APPLICATION
    route_prefix: str | None = "/"
    logging_config: Any = None
    external_scaler_enabled: bool = False


class Instance:
    """The applications of this process and their servers. Its coroutines run on the engine's loop."""

    def __init__(self) -> None:
        self.http = HTTPOptions()
        self.grpc = gRPCOptions()
        self.listens = True
        """Whether there is to be an HTTP server: `proxy_location` says so."""
        self.applications: dict[str, RunningApplication] = {}
        self._apart: list[RunningApplication] = []
        self.engine: LoopThread | None = None
        self._lock = threading.RLock()
        self._http_server: UvicornServer | None = None
        self._grpc_server: RayServeGrpc | None = None

    def start(self, *, listen: bool) -> LoopThread:
        """The engine, started and listening."""
        with self._lock:
            if self.engine is None:
                write_logs()
                self.engine = LoopThread()
                atexit.register(self.leave)
            if listen and self.listens and self._http_server is None:
                self.engine.run(self._listen())
            if self.grpc.grpc_servicer_functions and self._grpc_server is None:
                self.engine.run(self._listen_grpc())
            return self.engine

    async def _listen(self) -> None:
        self._http_server, port = await listen(RayServeProxy(self.applications, self.http), self.http)
        self.http = replace(self.http, port=port)

    async def _listen_grpc(self) -> None:
        server = RayServeGrpc(self.applications, self.grpc, self.http.host or "127.0.0.1")
        await server.start()
        self._grpc_server = server

    async def deploy_apart(self, target: RunTarget) -> RunningApplication:
        """Start an application for its handle alone, as a test does. Raises what its constructors raise."""
        application = RunningApplication(target.target, target.name, None, is_known=False)
        self._apart.append(application)
        application.announce()
        for error in (await application.start()).values():
            raise error
        return application

    async def deploy(self, target: RunTarget) -> RunningApplication:
        """Start an application in the place of the one of its name. Raises RayServeException, RuntimeError.

        One of which a deployment does not start stays, as in Ray Serve: calls of that deployment fail.
        """
        for other in self.applications.values():
            taken = target.route_prefix is not None and other.route_prefix == target.route_prefix
            if taken and other.name != target.name:
                refused = RayServeException(
                    f'Prefix {target.route_prefix} is being used by application "{other.name}". Failed to deploy '
                    f"application {target.name}."
                )
                raise RayTaskError(refused, str(refused)).as_instanceof_cause()  # Ray's controller raises it
        application = RunningApplication(target.target, target.name, target.route_prefix)
        application.built.default_logging(made(LoggingConfig, target.logging_config, "logging_config"))
        for each in application.built.deployments.values():
            let_through(each.options.logging_config)
        former = self.applications.get(target.name)
        application.announce(former)
        self.applications[target.name] = application  # in any case: its status says what failed
        try:
            if former is not None:
                await former.close(in_turn=True)
            failed = await application.start()
        except BaseException as error:
            if not is_answerable(error):
                raise
            await self.delete(target.name)
            raise RuntimeError(f"Deploying application {target.name} failed: {error!r}") from error
        for why in failed.values():
            raise RuntimeError(
                f"Deploying application {target.name} failed: Failed to update the deployments {list(failed)}: {why!r}"
            ) from why
        return application

    async def delete(self, name: str) -> None:
        """End an application; an unknown one is none."""
        application = self.applications.pop(name, None)
        if application is not None:
            await application.close()

    async def stop_servers(self) -> None:
        """Close their ports and connections."""
        if self._http_server is not None:
            await self._http_server.stop()
        if self._grpc_server is not None:
            await self._grpc_server.stop()
        self._http_server = self._grpc_server = None

    async def close(self) -> None:
        """End every application and the servers."""
        await self.stop_servers()
        for name in list(self.applications):
            await self.delete(name)
        while self._apart:
            await self._apart.pop().close()

    def leave(self) -> None:
        """The process ends: nothing drains. gRPC's server has to be stopped before its own thread is."""
        if self.engine is not None:
            with suppress(TimeoutError):
                self.engine.run(self.stop_servers(), LEAVE_S)
            self.engine.close()

    def shut_down(self) -> None:
        """End everything; the next `start` begins from nothing."""
        with self._lock:
            engine, self.engine = self.engine, None
            atexit.unregister(self.leave)
            if engine is not None:
                engine.run(self.close())
                engine.close()
            self.http, self.grpc, self.listens = HTTPOptions(), gRPCOptions(), True


INSTANCE: Final = Instance()
"""This process's."""

_NOT_RUNNING: Final = "There is no Serve instance running in this process: call `serve.run` or `serve.start`."


def start(
    proxy_location: Any = None,
    http_options: Any = None,
    grpc_options: Any = None,
    logging_config: Any = None,
    tracing_config: Any = None,
    controller_options: Any = None,
    **_: Any,
) -> None:
    """Set where HTTP and gRPC are listened for, and which requests have traces, and listen. The other options have no
    effect.

    Raises SettingsError where a port is taken, TypeError and ValueError for options that are none.
    """
    if INSTANCE.engine is None:
        INSTANCE.http = made(HTTPOptions, http_options, "http_options") or HTTPOptions()
        INSTANCE.grpc = made(gRPCOptions, grpc_options, "grpc_options") or gRPCOptions()
        INSTANCE.listens = getattr(proxy_location, "value", proxy_location) not in ("Disabled", "NoServer")
        os.environ.update((made(TracingConfig, tracing_config, "tracing_config") or TracingConfig()).variables())
    INSTANCE.start(listen=True)


def run(
    target: Application,
    blocking: bool = False,
    name: str = DEFAULT_APPLICATION,
    route_prefix: str | None = "/",
    logging_config: Any = None,
    _local_testing_mode: bool = False,
    external_scaler_enabled: bool = False,
    controller_options: Any = None,
) -> DeploymentHandle[Any]:
    """Serve an application in this process, and return a handle to its first deployment.

    HTTP at 127.0.0.1:8000, or where `start` says. With `_local_testing_mode` only the handle calls it. `blocking` waits
    for Ctrl-C. Raises TypeError for what `bind` has not made, RuntimeError for an application that does not start.
    """
    [handle] = run_many(
        [RunTarget(target, name, route_prefix, logging_config, external_scaler_enabled)],
        blocking=blocking,
        _local_testing_mode=_local_testing_mode,
    )
    return handle


def run_many(
    targets: Sequence[RunTarget],
    blocking: bool = False,
    wait_for_ingress_deployment_creation: bool = True,
    wait_for_applications_running: bool = True,
    _local_testing_mode: bool = False,
    controller_options: Any = None,
) -> list[DeploymentHandle[Any]]:
    """Serve several applications; see `run`."""
    if not targets:
        raise ValueError("No applications provided.")
    handles = []
    for target in targets:
        _check_target(target)
    for target in targets:
        engine = INSTANCE.start(listen=not _local_testing_mode)
        deploy = INSTANCE.deploy_apart if _local_testing_mode else INSTANCE.deploy
        handles.append(engine.run(deploy(target)).handle())
    if blocking:
        try:
            signal.pause()
        except KeyboardInterrupt:
            shutdown()
    return handles


def _check_target(target: RunTarget) -> None:
    if not target.name:
        raise RayServeException("Application name must a non-empty string.")
    if not isinstance(target.target, Application):
        raise TypeError("`serve.run` expects an `Application` returned by `Deployment.bind()`.")
    check_prefix(target.route_prefix)


def check_prefix(prefix: str | None) -> None:
    """Raise ValueError for a route prefix that cannot be."""
    if prefix is None:
        return
    if not prefix.startswith("/"):
        raise ValueError(f"Invalid route_prefix '{prefix}', must start with a forward slash ('/').")
    if prefix != "/" and prefix.endswith("/"):
        raise ValueError(f"Invalid route_prefix '{prefix}', may not end with a trailing '/'.")
    if "{" in prefix or "}" in prefix:
        raise ValueError(f"Invalid route_prefix '{prefix}', may not contain wildcards.")


def delete(name: str, _blocking: bool = True) -> None:
    """End an application. Raises RayServeException where nothing was started."""
    if INSTANCE.engine is None:
        raise RayServeException(_NOT_RUNNING)
    INSTANCE.engine.run(INSTANCE.delete(name))


def shutdown() -> None:
    """End every application of this process, and its servers."""
    INSTANCE.shut_down()


async def shutdown_async() -> None:
    """As `shutdown`."""
    await asyncio.to_thread(shutdown)


def status() -> ServeStatus:
    """The applications of this process."""
    applications = {name: each.status() for name, each in INSTANCE.applications.items()}
    return ServeStatus({"local": ProxyStatus.HEALTHY} if INSTANCE.engine is not None else {}, applications)


def get_app_handle(name: str) -> DeploymentHandle[Any]:
    """A handle to the first deployment of an application. Raises RayServeException for an unknown one."""
    application = INSTANCE.applications.get(name)
    if INSTANCE.engine is None:
        raise RayServeException(_NOT_RUNNING)
    if application is None:
        raise RayServeException(f"Application '{name}' does not exist.")
    return DeploymentHandle(application.built.ingress, name)


def get_deployment_handle(
    deployment_name: str, app_name: str | None = None, _check_exists: bool = True, **_: Any
) -> DeploymentHandle[Any]:
    """A handle to a deployment; within one, `app_name` is its own application.

    Raises KeyError for an unknown deployment, RayServeException outside of one without `app_name`.
    """
    if app_name is None:
        replica = current_replica()
        if replica is None:
            raise RayServeException(
                "Please specify an application name when getting a deployment handle outside of a Serve application."
            )
        app_name = replica.app_name
    deployment = DeploymentID(deployment_name, app_name)
    if _check_exists and not is_known(deployment):
        raise KeyError(f"{deployment} does not exist.")
    return DeploymentHandle(deployment_name, app_name)


def get_deployment_actor(actor_name: str) -> Any:
    """Raises RayServeException: there are no actors."""
    raise RayServeException(f"there is no actor {actor_name}: run the shared state as a deployment with one replica")


def get_deployment_actor_context() -> Any:
    """Raises RayServeException: there are no actors."""
    raise RayServeException(
        "`serve.get_deployment_actor_context()` may only be called from within an actor: none exist"
    )
