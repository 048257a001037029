"""HAProxy as the router: servers change through its runtime API, routes through a new configuration file and a reload.

The file on disk always lists the current servers, so a restarted container begins with them. A reload also passes on
their check results and drains, in a state file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from ..errors import RoutingError, RoutingUnreachable
from ..model.actions import (
    AddServer,
    DeleteServer,
    SetServerState,
    SetServerWeight,
    SetWaitingRoom,
    ShutdownSessions,
    WriteRouting,
)
from ..model.spec import ServiceSpec
from ..model.world import RoutingState, Server, ServerState
from ..settings import DEFAULT_LIMITS, EdgeLimits
from . import haproxy_config as config
from . import haproxy_state as state
from .base import RoutingAction, ServerAction
from .haproxy_socket import CommandRefused, MasterSocket, RuntimeSocket, command

_log = logging.getLogger(__name__)

REMOVABLE_WAIT_S = 5
NEW_WORKER_WAIT_S = 10.0
HTTP_WAIT_S = 2.0
"""An HTTP port that sends nothing for this long is silent."""
LISTED_S = 1.0
"""How long a list of the servers is reused while changes follow one another. Meanwhile only an operator at HAProxy's
socket could change it."""
_NO_STATES = "1\n"
"""A server state file without servers: only the number of its format."""
_GONE = ("No such server", "No such backend")
_BUSY = "Server still has connections"


class _Listed(NamedTuple):
    """A server that HAProxy has."""

    address: str
    number: int


class HAProxyRouter:
    """A `Router` over the sockets and the configuration file in `run_dir`, a volume shared with HAProxy's container.

    One change sends its commands at a time. Only a deletion lets other changes go on while it waits for the server's
    last connection to end. Changes of one server are carried out in turn. Snapshots may be taken at any time.
    """

    def __init__(
        self, run_dir: Path, limits: EdgeLimits = DEFAULT_LIMITS, http: tuple[str, int] = ("haproxy", 8000)
    ) -> None:
        """`http`: host and port at which HAProxy listens to HTTP clients."""
        self._http = http
        self._limits = limits
        self._runtime = RuntimeSocket(run_dir / "admin.sock")
        self._master = MasterSocket(run_dir / "master.sock")
        self._config_file = run_dir / "haproxy.cfg"
        self._states_file = run_dir / "servers.state"
        self._hashed: tuple[tuple[ServiceSpec, ...], str] | None = None
        """The services that were rendered last, and their routing hash."""
        self._changing = asyncio.Lock()
        self._changes_waiting = 0
        self._changing_server: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """By (backend, server), while that server is being changed."""
        self._listed: dict[tuple[str, str], _Listed] | None = None
        """By (backend, server), while changes follow one another; None = has to be read."""
        self._listed_at = 0.0
        self._leaving: Mapping[tuple[str, str], int] = {}
        """Requests in flight in replaced workers, at the last count."""
        self._alone: tuple[int, float] | None = None
        """The worker (pid, start time) that has no replaced worker beside it."""

    async def observe(self) -> RoutingState | None:
        """One snapshot; None while HAProxy does not answer. Raises RoutingError when its answers cannot be read.

        `sessions` of a server include requests in workers that a reload has replaced: only without these is it drained.
        """
        try:
            seen = await self._running()
        except RoutingUnreachable:
            return None
        leaving = await self._sessions_of_leaving_workers((seen.pid, seen.started_at))
        if not leaving:
            return seen
        return replace(
            seen,
            servers=tuple(
                replace(server, sessions=server.sessions + leaving.get((server.backend, server.name), 0))
                for server in seen.servers
            ),
        )

    async def http_is_silent(self) -> bool:
        """See `Router.http_is_silent`."""
        try:
            async with asyncio.timeout(HTTP_WAIT_S):
                reader, writer = await asyncio.open_connection(*self._http)
                try:
                    writer.write(b"GET /-/healthz HTTP/1.0\r\n\r\n")
                    await reader.read(1)
                finally:
                    writer.transport.abort()
        except TimeoutError:
            return True
        except OSError:  # refused, or no such name: there is no process
            return False
        return False

    async def perform(self, action: RoutingAction) -> None:
        """See `Router.perform`. Raises RoutingError (with the command and HAProxy's answer), RoutingUnreachable."""
        if isinstance(action, WriteRouting):
            async with self._one_at_a_time():
                self._listed = None
                await self._write_routing(action.services)
        elif isinstance(action, SetWaitingRoom):
            async with self._one_at_a_time():
                await self._set_waiting_room(action)
        else:
            await self._change_server(action)

    def routing_hash(self, services: Collection[ServiceSpec]) -> str:
        """See `Router.routing_hash`. Raises RoutingError when a value may not be put into a configuration.

        The loop calls it in each tick, so the configuration is rendered only when the services have changed.
        """
        asked = tuple(services)
        if self._hashed is None or self._hashed[0] != asked:
            self._hashed = asked, config.routing_hash(asked, self._limits)
        return self._hashed[1]

    # ---------------------------------------------------------------------------------------------------- servers

    async def _change_server(self, action: ServerAction) -> None:
        backend, name = config.checked_backend(action.backend), config.checked_server_name(action.target)
        async with self._changing_server.setdefault((backend, name), asyncio.Lock()):
            if await self._has_changed(action):
                return
            await self._until_removable(f"{backend}/{name}")
            if not await self._has_changed(action):
                raise RoutingError(
                    f"server {backend}/{name} has new connections and was not deleted; it is tried again"
                )

    async def _has_changed(self, action: ServerAction) -> bool:
        """Carry out the action; False if a server's last connection has to end first."""
        async with self._one_at_a_time():
            match action:
                case AddServer():
                    return await self._is_added(action)
                case DeleteServer():
                    return await self._is_deleted(action.backend, action.target)
                case SetServerState():
                    await self._set_state(action)
                case SetServerWeight():
                    await self._runtime.ask(command("set", "server", _path_of(action), "weight", str(action.weight)))
                case ShutdownSessions():
                    await self._shutdown_sessions(action)
        return True

    async def _is_added(self, action: AddServer) -> bool:
        """Add the server; False if a server of that name at another address has to be deleted first and still has
        connections.
        """
        server, address = _path_of(action), config.checked_address(action.address)
        listed = await self._servers()
        # Without an id some versions' algorithms misplace the server. This id is the next one after all in use.
        number = max((one.number for (where, _), one in listed.items() if where == action.backend), default=0) + 1
        same_name = listed.get((action.backend, action.target))
        if same_name is not None and same_name.address != address:
            if not await self._is_deleted(action.backend, action.target):
                return False
            same_name = None
        if same_name is None:
            options = config.server_options(action.spec)
            await self._runtime.ask(command("add", "server", server, address, "id", str(number), *options))
            listed[action.backend, action.target] = _Listed(address, number)
        if action.weight != 1:
            await self._runtime.ask(command("set", "server", server, "weight", str(action.weight)))
        await self._runtime.ask(command("enable", "health", server))
        await self._runtime.ask(command("enable", "server", server))
        return True

    async def _is_deleted(self, backend: str, name: str) -> bool:
        """Put the server into maintenance and delete it; False if it still has connections."""
        server = f"{backend}/{name}"
        try:
            await self._runtime.ask(command("set", "server", server, "state", "maint"))
            await self._runtime.ask(command("del", "server", server))
        except CommandRefused as error:
            if error.answer.startswith(_BUSY):
                return False
            if not error.answer.startswith(_GONE):
                raise
        if self._listed is not None:
            self._listed.pop((backend, name), None)
        return True

    async def _until_removable(self, server: str) -> None:
        """Wait for the end of the last connection of a server in maintenance, while other changes go on."""
        wait = command("wait", f"{REMOVABLE_WAIT_S}s", "srv-removable", server)
        try:
            await self._runtime.ask(wait, timeout_s=REMOVABLE_WAIT_S + 3)
        except CommandRefused as error:
            raise RoutingError(
                f"server {server} still has connections after {REMOVABLE_WAIT_S} s in maintenance and was not deleted "
                f"(`{wait}`: {error.answer}); it is tried again, or end them with `shutdown sessions server {server}`"
            ) from error

    async def _set_state(self, action: SetServerState) -> None:
        server = _path_of(action)
        try:
            if action.state is ServerState.READY:
                # A server whose addition was interrupted has no checks yet, and would stay in rotation when it is dead.
                await self._runtime.ask(command("enable", "health", server))
            await self._runtime.ask(command("set", "server", server, "state", action.state.value))
        except CommandRefused as error:
            if action.state is ServerState.READY or not error.answer.startswith(_GONE):
                raise

    async def _shutdown_sessions(self, action: ShutdownSessions) -> None:
        try:
            await self._runtime.ask(command("shutdown", "sessions", "server", _path_of(action)))
        except CommandRefused as error:
            if not error.answer.startswith(_GONE):
                raise

    async def _servers(self) -> dict[tuple[str, str], _Listed]:
        """Servers that HAProxy has, read once for changes that follow one another, as many replicas may become ready
        together. A change that adds or deletes a server updates this list.
        """
        now = asyncio.get_running_loop().time()
        if self._listed is None or now - self._listed_at > LISTED_S:
            found = state.servers(await self._runtime.ask("show servers state"), {})
            self._listed = {(one.backend, one.name): _Listed(one.address, number) for one, number in found}
            self._listed_at = now
        return self._listed

    async def _set_waiting_room(self, action: SetWaitingRoom) -> None:
        """Open or close the service's waiting room in this worker. A new worker begins with all of them open."""
        words = ("set", "held", config.checked_backend(action.backend), "open" if action.is_open else "closed")
        answer = await self._runtime.ask(command(*words))
        if answer:  # refusals of hold.lua have no severity
            raise CommandRefused(command(*words), answer)

    async def _sessions_of_leaving_workers(self, worker: tuple[int, float]) -> Mapping[tuple[str, str], int]:
        """Requests in flight by (backend, server) in workers that a reload replaced.

        Once `worker` has no replaced worker beside it, the master is not asked again until a reload starts another one.
        While the master does not answer (it restarts itself at a reload) the last count is used: too high a count keeps
        a replica a moment longer, too low a count would stop a replica that still has requests.
        """
        if worker == self._alone:
            return {}
        try:
            total: dict[tuple[str, str], int] = {}
            pids = await self._master.leaving_workers()
            for pid in pids:
                for server, seen in state.traffic(await self._master.ask_worker(pid, "show stat -1 4 -1")).items():
                    total[server] = total.get(server, 0) + seen.sessions
            self._leaving = total
            self._alone = None if pids else worker
        except RoutingUnreachable as error:
            _log.warning("the requests of replaced workers cannot be counted, the last count is used: %s", error)
        return self._leaving

    # ------------------------------------------------------------------------------------------------------- file

    async def _write_routing(self, services: Collection[ServiceSpec]) -> None:
        text = config.render(services, self._limits)
        before = await self._running()
        refusal = state.refusal_of_version(before.version)
        if refusal:
            raise RoutingError(f"HAProxy {refusal}. No routes were written.")
        wanted = config.hash_of(text)
        if before.routing_hash == wanted and config.hash_of(await asyncio.to_thread(self._read_config)) == wanted:
            return
        states = await self._runtime.ask("show servers state")
        text = config.with_servers(text, _lines(state.servers(states, {}), keep_state=True))
        previous = await asyncio.to_thread(self._read_config)
        # The new worker reads check results and drains here, so no server that is down or draining gets traffic.
        await asyncio.to_thread(_write, self._states_file, f"{states}\n")
        await asyncio.to_thread(_write, self._config_file, text)
        try:
            await self._master.reload()
            await self._new_worker(wanted)
        except RoutingError:
            if previous and (await self._hash_now()) != wanted:
                await asyncio.to_thread(_write, self._config_file, previous)
            raise
        finally:
            await asyncio.to_thread(_write, self._states_file, _NO_STATES)

    async def _running(self) -> RoutingState:
        return state.routing_state(*await self._runtime.ask_all(state.QUESTIONS))

    async def _hash_now(self) -> str | None:
        try:
            return (await self._running()).routing_hash
        except RoutingUnreachable:
            return None

    async def _new_worker(self, wanted: str) -> None:
        """Wait until a worker with the new configuration answers."""
        try:
            async with asyncio.timeout(NEW_WORKER_WAIT_S):
                while await self._hash_now() != wanted:  # noqa: ASYNC110  another process changes it
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise RoutingUnreachable(
                f"HAProxy loaded routing {wanted}, but no worker with it answered within {NEW_WORKER_WAIT_S:g} s"
            ) from None

    @contextlib.asynccontextmanager
    async def _one_at_a_time(self) -> AsyncIterator[None]:
        """Let one change send its commands at a time; the last one in the queue updates the file on disk."""
        self._changes_waiting += 1
        try:
            async with self._changing:
                try:
                    yield
                except BaseException:
                    self._listed = None  # a part of the failed change may have been carried out
                    raise
                finally:
                    if self._changes_waiting == 1:
                        self._listed = None
                        await self._refresh_file()
        finally:
            self._changes_waiting -= 1

    async def _refresh_file(self) -> None:
        """Write the current servers into the file, with which a HAProxy that restarts begins.

        Traffic does not depend on it, so a failure is logged and the next change retries. Draining servers are written
        as disabled: they must get no request after a restart.
        """
        try:
            now, running = await self._runtime.ask_all(("show servers state", "get var proc.pierhead_routing"))
            text = await asyncio.to_thread(self._read_config)
            if not text or config.hash_of(text) != state.variable(running):
                _log.warning(
                    "%s is not what HAProxy runs and was left alone; the next change of a route rewrites it",
                    self._config_file,
                )
                return
            refreshed = config.with_servers(text, _lines(state.servers(now, {}), keep_state=False))
            if refreshed != text:
                await asyncio.to_thread(_write, self._config_file, refreshed)
        except (RoutingError, OSError) as error:
            _log.warning("%s could not be brought up to date: %s", self._config_file, error)

    def _read_config(self) -> str:
        try:
            return self._config_file.read_text()
        except FileNotFoundError:
            return ""


def _path_of(action: ServerAction) -> str:
    return f"{action.backend}/{action.target}"


def _lines(servers: Collection[tuple[Server, int]], *, keep_state: bool) -> list[config.ServerLine]:
    """Lines for the file. Draining servers are disabled unless a state file says that they drain (`keep_state`)."""
    return [
        config.ServerLine(
            server.backend,
            server.name,
            server.address,
            number,
            disabled=server.state is ServerState.MAINT or (server.state is ServerState.DRAIN and not keep_state),
        )
        for server, number in servers
    ]


def _write(path: Path, text: str) -> None:
    """Replace a file in one step: a reader sees the old or the new one, also after a power cut."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
