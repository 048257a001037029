"""The server of one replica: start, readiness, drain, end.

starting --(check_health passed, listening)--> ready --(SIGTERM)--> draining --(nothing in flight)--> exit 0
                                                 ^  |                    `--(second signal, drain timeout)--> stop now
                                                 |  v  check_health failed three times, or was certain; passed again
                                               starting
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pierhead import metrics as runtime_metrics
from pierhead.calls.clients import Clients
from pierhead.classes.parts import with_applications
from pierhead.classes.service import Service
from pierhead.edge import logs
from pierhead.edge.admission import Admission
from pierhead.edge.edge import REFUSAL_REASONS, Edge
from pierhead.edge.grpc_server import SERVER_OPTIONS, register
from pierhead.edge.methods import Context, ServedMethod, is_servicer, methods_of, pools_of
from pierhead.edge.unix_sockets import LANE_SUFFIX, admit, cannot_listen_at, clear
from pierhead.errors import SettingsError, cannot_listen
from pierhead.lanes.server import Lanes
from pierhead.memory.link_setup import SharedMemory, share_memory
from pierhead.raised import as_holdable, is_answerable
from pierhead.replica.admin import AdminServer, Readiness, State, admin_pages, admin_taker
from pierhead.replica.health import HealthWatch, ReplicaLoad, checks_of
from pierhead.replica.reflection import JoinedPools
from pierhead.replica.sleep import Sleep
from pierhead.replica.starting import START
from pierhead.replica.tally import tally
from pierhead.replica.thread.user_loop import UserLoop
from pierhead.replica.user_config import UserConfig, call_hook
from pierhead.routing_stats import STATS
from pierhead.settings import DEFAULT_ADMIN_PORT, DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT, Settings
from pierhead.tasks import END_S

if TYPE_CHECKING:
    from pierhead.http.server import HttpListener

logger = logging.getLogger("pierhead")

QUIET_S = 0.25
"""A drained replica closes its ports after this long without a request: callers that do not know of the drain yet get a
refusal and retry elsewhere, instead of a broken connection."""

QUIET_TRIES = 20
"""A caller that keeps calling a draining replica keeps it alive for at most this many times QUIET_S."""

LAST_STATUS_S = 0.2
"""How long gRPC may take to send the status of calls and lanes that have just ended; what is open then is cut off."""

HOOKS = ("check_health", "reconfigure")
"""An object with one of these methods can be a part."""


class ReplicaServer:
    """The parts of one replica, their ports, and the replica's state. `run` returns when it has ended."""

    def __init__(
        self,
        *parts: object,
        settings: Settings | None = None,
        metrics: runtime_metrics.RuntimeMetrics | None = None,
        contract: bytes = b"",
        inside: bool = False,
    ) -> None:
        """The replica of some parts, which `run` serves.

        - contract: what it tells of it on its admin port; see `admin_pages`.
        - inside: without ports but the one for HTTP: `methods`, behind `edge`, are called in this process.
        """
        if not parts:
            raise TypeError("serve() needs at least one part: a servicer, an aiohttp application")
        self.settings = settings or Settings.from_env()
        self.metrics = metrics or runtime_metrics.PROCESS
        self._contract = contract
        self.state: State = "starting"
        self.grpc_port: int | None = None
        """The bound port once `ready` is set; None without servicers."""
        self.http_port: int | None = None
        self.admin_port: int | None = None
        self.ready = asyncio.Event()
        self.ill = asyncio.Event()
        """Set once the health watch has judged it unhealthy."""
        self._detail = "starting"
        parts = tuple(with_applications(parts))
        self._servicers = [part for part in parts if is_servicer(part)]
        methods = [method for servicer in self._servicers for method in methods_of(servicer)]
        self.methods = [method if method.is_use else self._aside(method) for method in methods]
        """As callers reach them once `ready` is set."""
        self._asides = 0
        """Those of the requests in flight that are no use of the service."""
        self._no_use = {method.name for method in self.methods if not method.is_use}
        self._inside = inside
        self._listeners = listeners_of(part for part in parts if not is_servicer(part))
        self._ending = [part for part in parts if part in self._servicers or isinstance(part, Service)]
        self._user: UserLoop | None = None
        self._sharing: SharedMemory | None = None
        self._watch = HealthWatch(checks_of(parts), self.settings, self._load, self._judged, self._run)
        self._config = UserConfig(parts, self.settings.user_config, self._run)
        self._reject_unfit(parts)
        name = self.settings.replica or self.settings.service or "this replica"
        self._admission = Admission(self.settings.max_ongoing_requests, name)
        self._sleep = Sleep(parts, self._run, self._admission)
        self.edge = Edge(self.settings, self._admission, self.metrics)
        self._health = health.aio.HealthServicer()
        self._services: list[str] = []
        self._server: grpc.aio.Server | None = None
        self._lanes: Lanes | None = None
        self._admin: AdminServer | None = None
        self._stop_asked = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._describe()

    def stop(self) -> None:
        """Drain, as on SIGTERM. A second call, or a call while starting, stops at once."""
        if self._stop_asked.is_set() or not self.ready.is_set():
            self._stop_now.set()
        self._stop_asked.set()

    async def run(self) -> None:
        """Start, serve, drain, close. Raises the error that keeps the replica from starting."""
        if self.settings.run_user_code_in_separate_thread:
            self._user = UserLoop(self.settings)
        try:
            self._sharing = share_memory(self.settings, self.metrics)
            async with asyncio.TaskGroup() as tasks:
                life = tasks.create_task(self._live(), name="replica")
                helpers = [
                    tasks.create_task(self._once_ready(self._watch.run), name="health"),
                    tasks.create_task(self._once_ready(self._config.keep), name="user_config"),
                    tasks.create_task(self._once_ready(self._sleep.keep), name="sleep"),
                    tasks.create_task(self._end_on_stop(life), name="stop now"),
                ]
                if self._sharing is not None:
                    helpers.append(tasks.create_task(self._sharing.keep(), name="shared memory"))
                if self._user is not None:
                    helpers.append(tasks.create_task(self._user.lives(), name="user code"))
                await asyncio.wait([life])
                for helper in helpers:
                    helper.cancel()
                if life.cancelled() and not self._stop_now.is_set():
                    _reject_cancelled(life)
        except BaseExceptionGroup as group:
            if len(group.exceptions) > 1:
                raise
            raise group.exceptions[0] from None  # one failure needs no group around it
        finally:
            await self._close()

    def readiness(self) -> Readiness:
        """The content of /readyz."""
        waiting = {target: int(count) for (target,), count in list(self.metrics.queued.values.items()) if count}
        requests = dict(self.metrics.requests.values)
        answers = tally(requests)
        config = self._config.report()
        version = STATS.version  # read before the numbers, so that the numbers are never older
        return Readiness(
            self.state,
            self._admission.ongoing - self._asides,
            sum(waiting.values()),
            self._detail if self.ready.is_set() else config.error or START.words or self._detail,
            waiting,
            answers.answered,
            answers.errors,
            answers.in_time + self.edge.moved + sum(each.moved() for each in self._listeners.values()) + START.steps,
            config,
            dict(STATS.numbers),
            version,
            self.state == "starting" and self._watch.broken,
            "" if self.ready.is_set() else START.stage,
            self.edge.lasting,
            Clients.unreached(),
            int(sum(count for (method, _), count in requests.items() if method not in self._no_use)),
            self._sleep.report(),
        )

    def _aside(self, method: ServedMethod) -> ServedMethod:
        """The unary method, whose calls are counted in `_asides`."""

        async def behaviour(request: Any, context: Context) -> Any:
            self._asides += 1
            try:
                return await method.behaviour(request, context)
            finally:
                self._asides -= 1

        return replace(method, behaviour=behaviour)

    def _set_state(self, state: State, detail: str = "") -> None:
        self.state, self._detail = state, detail

    def _reject_unfit(self, parts: tuple[object, ...]) -> None:
        """Raise TypeError or SettingsError for parts that cannot be served, or not together."""
        for part in parts:
            known = part in self._servicers or id(part) in self._listeners or isinstance(part, Service)
            if not known and not any(hasattr(part, hook) for hook in HOOKS):
                raise TypeError(
                    f"serve() cannot serve a {type(part).__name__}: expected a Service, a subclass of a generated "
                    "...Servicer, an aiohttp.web.Application, an ASGI application (or asgi(one)), or an object with "
                    "`async def check_health(self)` or `def reconfigure(self, user_config)`"
                )
        if len(self._listeners) > 1:
            raise TypeError(
                f"serve() takes one HTTP application, found {len(self._listeners)}: join them with add_subapp or mount"
            )
        if self.settings.run_user_code_in_separate_thread and self._listeners:
            raise SettingsError(
                "PIERHEAD_RUN_USER_CODE_IN_SEPARATE_THREAD: expected false for a process that serves HTTP, found true: "
                "the handlers of an HTTP application read and write their connections and stay on the server's event "
                "loop; put what blocks into asyncio.to_thread, or run more replicas"
            )

    def _describe(self) -> None:
        self.metrics.service = self.settings.service
        self.metrics.replica = self.settings.replica
        for reason in REFUSAL_REASONS:
            self.metrics.refused.inc((reason,), 0)
        self.metrics.ongoing.read = lambda: self._admission.ongoing
        self.metrics.ready.read = lambda: float(self.state == "ready")
        self.metrics.log_lines_dropped.read = logs.dropped

    async def _end_on_stop(self, life: asyncio.Task[None]) -> None:
        await self._stop_now.wait()
        ongoing = self._admission.ongoing
        logger.log(logging.WARNING if ongoing else logging.INFO, "stopping at once with %d requests in flight", ongoing)
        life.cancel()

    async def _live(self) -> None:
        """The replica's life in order."""
        START.hand_over()
        if not self._inside:
            await self._listen_admin()
        if self._user is not None:
            await self._user.start()
            self.methods = [self._user.served(method) for method in self.methods]
        await self._config.settle(once=self._inside)
        await self._watch.check_all()
        await self._listen()
        if not self._inside:
            # Objects that live now live until the end: exclude them from later garbage collections.
            gc.collect()
            gc.freeze()
        await self._config.settle()  # another config may have arrived during the start
        await self._say_ready()
        self.ready.set()
        await self._stop_asked.wait()
        await self._drain()

    # ---- listening

    async def _listen_admin(self) -> None:
        traces = None if self.edge.traces is None else self.edge.traces.page
        pages = dict(admin_pages(self.readiness, self.metrics.expose, self._contract, traces))
        pages |= admin_taker("user_config", self._config.offer, self._config.report)
        if self._sleep.part is not None:
            pages |= admin_taker("sleep", self._sleep.offer, self._sleep.report)
        self._admin = AdminServer(pages, self.settings.admin_token)
        host, port = self.settings.host, self.settings.admin_port
        try:
            self.admin_port = await self._admin.start(host, port)
        except OSError as error:
            if port != DEFAULT_ADMIN_PORT or self.settings.discovery or error.errno != errno.EADDRINUSE:
                raise cannot_listen("PIERHEAD_ADMIN_PORT", host, port, error) from error
            # Without a controller several services share a machine, and nothing but a person looks at this port.
            self.admin_port = await self._admin.start(host, 0)
            logger.warning(
                "admin port %d is taken: /readyz and /metrics are on %d; PIERHEAD_ADMIN_PORT sets another one",
                port,
                self.admin_port,
            )
        if self.settings.admin_socket:  # last: it takes the place of another process's, where a port does not
            await self._admin.listen_at(self.settings.admin_socket)

    async def _listen(self) -> None:
        settings = self.settings
        if self._servicers and not self._inside:
            own = DEFAULT_GRPC_PORT if settings.port is None else settings.port
            port = settings.grpc_port if self._listeners else own
            self._server = grpc.aio.server(options=SERVER_OPTIONS)
            self._services = register(self.methods, self._server, self.edge)
            self._lanes = Lanes(self.methods, self.edge)
            self._lanes.add_to(self._server)
            # Outside admission, as they must answer when the replica is full.
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
            names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server, JoinedPools(pools_of(self._servicers)))
            self.grpc_port = self._bind_grpc(self._server, settings.request_host, port)
            if settings.socket and not self._listeners:
                # First, as the controller publishes both once it finds that of requests.
                await self._lanes.listen_at(settings.socket + LANE_SUFFIX)
                _bind_grpc_at(settings.socket, self._server)
            await self._server.start()
        for listener in self._listeners.values():
            port = DEFAULT_HTTP_PORT if settings.port is None else settings.port
            self.http_port = await listener.start(self.edge, settings.request_host, port)

    def _bind_grpc(self, server: grpc.aio.Server, host: str, port: int) -> int:
        try:
            return server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            variable = "PIERHEAD_GRPC_PORT" if self._listeners else "PIERHEAD_PORT"
            raise cannot_listen(variable, host, port, error) from error

    # ---- health

    async def _run(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> None:
        """Run user code where it belongs."""
        if self._user is not None:
            await self._user.run(function, *args)
        else:  # in a task of its own, whose end releases its models
            await asyncio.ensure_future(as_holdable(function, *args))

    async def _once_ready(self, work: Callable[[], Awaitable[None]]) -> None:
        await self.ready.wait()
        await work()

    async def _judged(self, why_ill: str) -> None:
        """Apply the health watch's judgement: an unhealthy replica is out of rotation until a check passes."""
        if not why_ill:
            await self._say_ready()
        elif self.state != "draining":
            self.ill.set()
            self._set_state("starting", why_ill)
            await self._set_grpc_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    def _load(self) -> ReplicaLoad:
        good = ("OK", "2", "3")
        answered = sum(count for (_, code), count in self.metrics.requests.values.items() if code.startswith(good))
        return ReplicaLoad(self._admission.ongoing, answered)

    async def _say_ready(self) -> None:
        if self.state == "starting":
            self._set_state("ready")
            await self._set_grpc_health(health_pb2.HealthCheckResponse.SERVING)
            logger.info("ready")

    async def _set_grpc_health(self, status: int) -> None:
        for service in ("", *self._services):
            await self._health.set(service, status)

    # ---- the end

    async def _drain(self) -> None:
        """Finish the requests in flight and refuse new ones, within the drain timeout."""
        self._set_state("draining", "stopped")
        self._admission.draining = True
        for listener in self._listeners.values():
            listener.drain()
        for end in list(self.edge.drained):
            end()
        await self._set_grpc_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        logger.info("draining: %d requests in flight", self._admission.ongoing)
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self._wait_quiet()
        except TimeoutError:
            logger.warning(
                "drain timeout of %g s is over with %d requests in flight; they are cut off",
                self.settings.drain_timeout_s,
                self._admission.ongoing,
            )

    async def _wait_quiet(self) -> None:
        """Return once no request is in flight and none has come for a moment: callers may not know of the drain yet,
        unless all of them are in this process.
        """
        for _ in range(QUIET_TRIES if self._listeners or not self._inside else 0):
            await self._admission.wait_idle()
            before = self._asked()
            await asyncio.sleep(QUIET_S)
            if self._admission.ongoing == 0 and self._asked() == before:
                return
        await self._admission.wait_idle()

    def _asked(self) -> float:
        return sum(self.metrics.requests.values.values())

    async def _close(self) -> None:
        try:
            await self._close_ports()
        finally:
            if self._user is None:
                await self._end_servicers()
            if self._sharing is not None:
                self._sharing.close()
        logger.info("stopped")

    async def _end_servicers(self) -> None:
        """Call the servicers' `aclose` or `close`, which end their engines and processes. A failure is logged."""
        for servicer in self._ending:
            names = [name for name in ("aclose", "close") if callable(getattr(servicer, name, None))]
            for name in names[:1]:
                try:
                    async with asyncio.timeout(END_S):
                        await self._run(call_hook, getattr(servicer, name))
                except BaseException as error:
                    if not is_answerable(error):
                        raise
                    logger.exception("%s.%s failed, or took more than %g s", type(servicer).__name__, name, END_S)

    async def _close_ports(self) -> None:
        for listener in self._listeners.values():
            await listener.stop()
        if self._admin is not None:
            await self._admin.close()
        if self._user is not None:
            await self._end_servicers()
            await self._user.close()
        if self._lanes is not None:
            await self._lanes.close()
        if self._server is not None:
            await self._server.stop(LAST_STATUS_S)


def _bind_grpc_at(path: str, server: grpc.aio.Server) -> None:
    """Add a Unix socket to a server. Raises SettingsError."""
    try:
        clear(path)
        server.add_insecure_port(f"unix:{path}")
        admit(path)
    except (OSError, RuntimeError) as error:
        raise cannot_listen_at(path, error) from error


def listeners_of(parts: Iterable[object]) -> dict[int, HttpListener]:
    """HTTP listeners by the part's id. Imported only if needed: they take a quarter of a small replica's memory."""
    found: dict[int, HttpListener] = {}
    for part in parts:
        from pierhead.http.server import listener_for

        listener = listener_for(part)
        if listener is not None:
            found[id(part)] = listener
    return found


def _reject_cancelled(life: asyncio.Task[None]) -> NoReturn:
    """Raise for an end without a stop signal, which would otherwise look like a drain, with exit code 0."""
    try:
        life.result()
    except asyncio.CancelledError as error:
        raise RuntimeError(
            "user code has raised CancelledError without being cancelled: check_health, or what the application "
            "does at its start; see where below"
        ) from error
    raise AssertionError("a task that was cancelled has a result")
