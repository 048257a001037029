"""HAProxy as the edge: scaling through its runtime API, new routes through a new file and a reload.

The file on disk always holds the servers of now. A reload therefore starts the new worker with all of them (and with
their checks' verdicts and drains, handed over in a state file), and so does a restart of the container.
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
from . import haproxy_config as config
from . import haproxy_state as state
from .base import RoutingAction
from .haproxy_socket import CommandRefused, MasterSocket, RuntimeSocket, command

_log = logging.getLogger(__name__)

REMOVABLE_WAIT_S = 5
NEW_WORKER_WAIT_S = 10.0
LISTED_S = 1.0
"""How long a list of the servers holds while changes follow one another: all but a person's on the socket are ours."""
_NO_STATES = "1\n"
"""A server state file without servers: just its format's number."""
_GONE = ("No such server", "No such backend")


class _Listed(NamedTuple):
    """A server that is there."""

    address: str
    number: int


class HAProxyRouter:
    """A `Router` over the sockets and the configuration file in `run_dir`, a volume shared with HAProxy's container.

    Changes are made one after the other; snapshots may be taken at any time.
    """

    def __init__(self, run_dir: Path) -> None:
        self._runtime = RuntimeSocket(run_dir / "admin.sock")
        self._master = MasterSocket(run_dir / "master.sock")
        self._config_file = run_dir / "haproxy.cfg"
        self._states_file = run_dir / "servers.state"
        self._changing = asyncio.Lock()
        self._changes_waiting = 0
        self._listed: dict[tuple[str, str], _Listed] | None = None
        """By (backend, server), while changes follow one another; None = to be read."""
        self._listed_at = 0.0
        self._leaving: Mapping[tuple[str, str], int] = {}
        self._alone: tuple[int, float] | None = None
        """Which worker (its pid, when it was started) was found without any of before a reload beside it."""

    async def observe(self) -> RoutingState | None:
        """One snapshot; None while HAProxy does not answer.

        `sessions` of a server include what workers of before a reload still have there: it is drained when they, too,
        are done with it.
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

    async def perform(self, action: RoutingAction, spec: ServiceSpec | None) -> None:
        """Carry out one action; "already there" and "already gone" are success. AddServer needs the spec.

        Raises RoutingError (the message quotes the command and HAProxy's answer), RoutingUnreachable.
        """
        async with self._one_at_a_time():
            match action:
                case AddServer():
                    await self._add(action, spec)
                case SetServerState():
                    await self._set_state(action)
                case SetServerWeight():
                    await self._set_weight(action)
                case ShutdownSessions():
                    await self._shutdown_sessions(action)
                case DeleteServer():
                    await self._delete(action.backend, action.target)
                case SetWaitingRoom():
                    await self._set_waiting_room(action)
                case WriteRouting():
                    self._listed = None
                    await self._write_routing(action.services)

    def routing_hash(self, services: Collection[ServiceSpec]) -> str:
        """Hash of the configuration without servers. Raises RoutingError when a value may not be put into it."""
        return config.routing_hash(services)

    async def close(self) -> None:
        """Nothing to let go of: a connection lives for one exchange."""

    # ---------------------------------------------------------------------------------------------------- servers

    async def _servers(self) -> dict[tuple[str, str], _Listed]:
        """Servers that are there. Read once for changes that follow one another: many replicas become ready together.

        Whoever changes which servers there are changes this list, or drops it.
        """
        now = asyncio.get_running_loop().time()
        if self._listed is None or now - self._listed_at > LISTED_S:
            found = state.servers(await self._runtime.ask("show servers state"), {})
            self._listed = {(one.backend, one.name): _Listed(one.address, number) for one, number in found}
            self._listed_at = now
        return self._listed

    async def _add(self, action: AddServer, spec: ServiceSpec | None) -> None:
        if spec is None:
            raise RoutingError(f"server {action.target} cannot be added without the spec of service {action.service!r}")
        name, backend = config.checked_server_name(action.target), config.checked_backend(action.backend)
        address = config.checked_address(action.address)
        server = f"{backend}/{name}"
        listed = await self._servers()
        # Without an id some versions' algorithms misplace it; the next free one after all that are there.
        number = max((one.number for (where, _), one in listed.items() if where == backend), default=0) + 1
        same_name = listed.get((backend, name))
        if same_name is not None and same_name.address != address:
            await self._delete(backend, name)
            same_name = None
        if same_name is None:
            options = config.server_options(spec)
            await self._runtime.ask(command("add", "server", server, address, "id", str(number), *options))
            listed[backend, name] = _Listed(address, number)
        if action.weight != 1:
            await self._runtime.ask(command("set", "server", server, "weight", str(action.weight)))
        await self._runtime.ask(command("enable", "health", server))
        await self._runtime.ask(command("enable", "server", server))

    async def _set_state(self, action: SetServerState) -> None:
        server = _server_path(action.backend, action.target)
        try:
            if action.state is ServerState.READY:
                # One whose adding was interrupted is not checked yet, and would serve for ever, dead or alive.
                await self._runtime.ask(command("enable", "health", server))
            await self._runtime.ask(command("set", "server", server, "state", action.state.value))
        except CommandRefused as error:
            if action.state is ServerState.READY or not error.answer.startswith(_GONE):
                raise

    async def _set_weight(self, action: SetServerWeight) -> None:
        server = _server_path(action.backend, action.target)
        await self._runtime.ask(command("set", "server", server, "weight", str(action.weight)))

    async def _shutdown_sessions(self, action: ShutdownSessions) -> None:
        server = _server_path(action.backend, action.target)
        try:
            await self._runtime.ask(command("shutdown", "sessions", "server", server))
        except CommandRefused as error:
            if not error.answer.startswith(_GONE):
                raise

    async def _delete(self, backend: str, name: str) -> None:
        server = _server_path(backend, name)
        if self._listed is not None:
            self._listed.pop((backend, name), None)
        try:
            await self._runtime.ask(command("set", "server", server, "state", "maint"))
        except CommandRefused as error:
            if error.answer.startswith(_GONE):
                return
            raise
        wait = command("wait", f"{REMOVABLE_WAIT_S}s", "srv-removable", server)
        try:
            await self._runtime.ask(wait, timeout_s=REMOVABLE_WAIT_S + 3)
        except CommandRefused as error:
            raise RoutingError(
                f"server {server} still has connections after {REMOVABLE_WAIT_S} s in maintenance and was not deleted "
                f"(`{wait}`: {error.answer}); it is tried again, or end them with `shutdown sessions server {server}`"
            ) from error
        await self._runtime.ask(command("del", "server", server))

    async def _set_waiting_room(self, action: SetWaitingRoom) -> None:
        """Of this worker: the next one begins with all of them open."""
        words = ("set", "held", config.checked_backend(action.backend), "open" if action.is_open else "closed")
        answer = await self._runtime.ask(command(*words))
        if answer:  # a command of hold.lua, whose answers have no severity
            raise CommandRefused(command(*words), answer)

    async def _sessions_of_leaving_workers(self, worker: tuple[int, float]) -> Mapping[tuple[str, str], int]:
        """Requests in flight by (backend, server) in workers that a reload replaced. Only a reload, which makes another
        worker of `worker`, can add to them: where none is left the master is not asked again.

        While the master cannot say (it starts itself anew at a reload) the last answer holds: too many keep a replica
        for a moment longer, too few would end one that is still at work.
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
            _log.warning("sessions of workers before the last reload are unknown, the last count holds: %s", error)
        return self._leaving

    # ------------------------------------------------------------------------------------------------------- file

    async def _write_routing(self, services: Collection[ServiceSpec]) -> None:
        text = config.render(services)
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
        # The new worker takes checks' verdicts and drains from here, so nothing that is down or draining gets traffic.
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
        try:
            answers = await self._runtime.ask_all((*state.QUESTIONS, state.HELD_QUESTION))
        except CommandRefused as error:
            if error.command != state.HELD_QUESTION:
                raise
            # What runs was written before there was a waiting room. Its hash differs, so it is replaced next.
            answers = [*await self._runtime.ask_all(state.QUESTIONS), state.NOTHING_HELD]
        return state.routing_state(*answers)

    async def _hash_now(self) -> str | None:
        try:
            return (await self._running()).routing_hash
        except RoutingUnreachable:
            return None

    async def _new_worker(self, wanted: str) -> None:
        """Wait until the socket is answered by a worker that runs the new configuration."""
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
        """Hold off other changes; the last one of a queue brings the file on disk up to date."""
        self._changes_waiting += 1
        try:
            async with self._changing:
                try:
                    yield
                except BaseException:
                    self._listed = None  # what has been done nobody knows
                    raise
                finally:
                    if self._changes_waiting == 1:
                        self._listed = None
                        await self._refresh_file()
        finally:
            self._changes_waiting -= 1

    async def _refresh_file(self) -> None:
        """Put the servers of now into the file, so that a HAProxy that is started anew begins with them.

        Traffic does not depend on it, so a failure is told in the log and mended with the next change. Servers that
        drain are written as disabled: after a restart nothing must reach them any more.
        """
        try:
            now, running = await self._runtime.ask_all(("show servers state", "get var proc.pierhead_routing"))
            text = await asyncio.to_thread(self._read_config)
            if not text or config.hash_of(text) != state.variable(running):
                _log.warning(
                    "%s is not what HAProxy runs and was left alone; the next change of a route writes it anew",
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


def _server_path(backend: str, name: str) -> str:
    return f"{config.checked_backend(backend)}/{config.checked_server_name(name)}"


def _lines(servers: Collection[tuple[Server, int]], *, keep_state: bool) -> list[config.ServerLine]:
    """Lines for the file. With `keep_state` the state file tells what drains, else such servers are disabled."""
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
