"""One HAProxy, through its sockets: its state, and changes of its servers and waiting rooms.

The sockets are those of this machine, or of another one behind TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
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
    WriteKeys,
)
from ..model.world import RoutingState, ServerState
from . import haproxy_config as config
from . import haproxy_keys
from . import haproxy_state as state
from . import haproxy_text as text
from .base import ProcessAction, ServerAction
from .haproxy_socket import Address, CommandRefused, MasterSocket, RuntimeSocket, command

_log = logging.getLogger(__name__)

REMOVABLE_WAIT_S = 5
LISTED_S = 1.0
"""How long a list of the servers is reused while changes follow one another. In that time only an operator at HAProxy's
socket could change it."""
_GONE = ("No such server", "No such backend")
_BUSY = "Server still has connections"


class _Listed(NamedTuple):
    """A server that HAProxy has."""

    address: str
    number: int


async def _nothing() -> None:
    """HAProxy's own machine keeps its file up to date."""


class HAProxyProcess:
    """One HAProxy.

    One change sends its commands at a time. Only a deletion lets other changes proceed while it waits for the server's
    last connection to end. Changes of one server are carried out in turn. Snapshots may be taken at any time.
    """

    def __init__(
        self, runtime: Address, master: Address, after_changes: Callable[[], Awaitable[None]] = _nothing
    ) -> None:
        """`after_changes` is called when the last one of changes that follow one another has ended."""
        self.runtime = RuntimeSocket(runtime)
        self.master = MasterSocket(master)
        self._after_changes = after_changes
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
        """The worker (pid, start time) without a replaced worker that still runs."""

    async def observe(self) -> RoutingState:
        """One snapshot. Raises RoutingUnreachable while HAProxy does not answer, RoutingError when its answers cannot
        be read.

        `sessions` of a server include requests in workers that a reload has replaced: only without these is it drained.
        """
        seen = state.routing_state(*await self.runtime.ask_all(state.QUESTIONS))
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

    async def key_ages(self) -> Mapping[str, float]:
        """See `Router.key_ages`."""
        return haproxy_keys.ages(await self.runtime.ask("show table keys"))

    async def perform(self, action: ProcessAction) -> None:
        """See `Router.perform`. Raises RoutingError (with the command and HAProxy's answer), RoutingUnreachable."""
        if isinstance(action, SetWaitingRoom):
            async with self.one_at_a_time():
                await self._set_waiting_room(action)
        elif isinstance(action, WriteKeys):
            async with self.one_at_a_time():
                wanted = await asyncio.to_thread(haproxy_keys.entries, action.keys)
                await haproxy_keys.write(self.runtime, self.master, wanted)
        else:
            await self._change_server(action)

    @contextlib.asynccontextmanager
    async def one_at_a_time(self, *, relist: bool = False) -> AsyncIterator[None]:
        """Let one change send its commands at a time. `relist`: the list of the servers must be read again."""
        self._changes_waiting += 1
        try:
            async with self._changing:
                try:
                    if relist:
                        self._listed = None
                    yield
                except BaseException:
                    self._listed = None  # a part of the failed change may have been carried out
                    raise
                finally:
                    if self._changes_waiting == 1:
                        self._listed = None
                        await self._after_changes()
        finally:
            self._changes_waiting -= 1

    async def _change_server(self, action: ServerAction) -> None:
        backend, name = text.checked_backend(action.backend), text.checked_server_name(action.target)
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
        async with self.one_at_a_time():
            match action:
                case AddServer():
                    return await self._is_added(action)
                case DeleteServer():
                    return await self._is_deleted(action.backend, action.target)
                case SetServerState():
                    await self._set_state(action)
                case SetServerWeight():
                    await self.runtime.ask(command("set", "server", _path_of(action), "weight", str(action.weight)))
                case ShutdownSessions():
                    await self._ask_if_there("shutdown", "sessions", "server", _path_of(action))
        return True

    async def _is_added(self, action: AddServer) -> bool:
        """Add the server; False if a server of that name at another address has to be deleted first and still has
        connections.
        """
        server, address = _path_of(action), text.checked_address(action.address)
        listed = await self._servers()
        # Without an id some versions' algorithms misplace the server. This id is the next one after all in use.
        number = max((one.number for (where, _), one in listed.items() if where == action.backend), default=0) + 1
        same_name = listed.get((action.backend, action.target))
        if same_name is not None and same_name.address != address:
            if not await self._is_deleted(action.backend, action.target):
                return False
            same_name = None
        if same_name is None:
            words = text.server_words(address, number, config.server_options(action.spec))
            await self.runtime.ask(command("add", "server", server, *words))
            listed[action.backend, action.target] = _Listed(address, number)
        if action.weight != 1:
            await self.runtime.ask(command("set", "server", server, "weight", str(action.weight)))
        await self.runtime.ask(command("enable", "health", server))
        await self.runtime.ask(command("enable", "server", server))
        return True

    async def _is_deleted(self, backend: str, name: str) -> bool:
        """Put the server into maintenance and delete it; False if it still has connections."""
        server = f"{backend}/{name}"
        try:
            await self.runtime.ask(command("set", "server", server, "state", "maint"))
            await self.runtime.ask(command("del", "server", server))
        except CommandRefused as error:
            if error.answer.startswith(_BUSY):
                return False
            if not error.answer.startswith(_GONE):
                raise
        if self._listed is not None:
            self._listed.pop((backend, name), None)
        return True

    async def _until_removable(self, server: str) -> None:
        """Wait for the end of the last connection of a server in maintenance, while other changes proceed."""
        wait = command("wait", f"{REMOVABLE_WAIT_S}s", "srv-removable", server)
        try:
            await self.runtime.ask(wait, timeout_s=REMOVABLE_WAIT_S + 3)
        except CommandRefused as error:
            raise RoutingError(
                f"server {server} still has connections after {REMOVABLE_WAIT_S} s in maintenance and was not deleted "
                f"(`{wait}`: {error.answer}); it is tried again, or end them with `shutdown sessions server {server}`"
            ) from error

    async def _set_state(self, action: SetServerState) -> None:
        server, words = _path_of(action), ("state", action.state.value)
        if action.state is not ServerState.READY:
            await self._ask_if_there("set", "server", server, *words)
            return
        # A server whose addition was interrupted has no checks yet, and would stay in rotation when it is dead.
        await self.runtime.ask(command("enable", "health", server))
        await self.runtime.ask(command("set", "server", server, *words))

    async def _ask_if_there(self, *words: str) -> None:
        """Run a command about a server that may be gone."""
        try:
            await self.runtime.ask(command(*words))
        except CommandRefused as error:
            if not error.answer.startswith(_GONE):
                raise

    async def _servers(self) -> dict[tuple[str, str], _Listed]:
        """Servers that HAProxy has, read once for changes that follow one another, as many replicas may become ready
        together. A change that adds or deletes a server updates this list.
        """
        now = asyncio.get_running_loop().time()
        if self._listed is None or now - self._listed_at > LISTED_S:
            found = state.servers(await self.runtime.ask("show servers state"), {})
            self._listed = {(one.backend, one.name): _Listed(one.address, number) for one, number in found}
            self._listed_at = now
        return self._listed

    async def _set_waiting_room(self, action: SetWaitingRoom) -> None:
        """Open or close the service's waiting room in this worker. A new worker begins with all of them open."""
        words = ("set", "held", text.checked_backend(action.backend), "open" if action.is_open else "closed")
        answer = await self.runtime.ask(command(*words))
        if answer:  # refusals of hold.lua have no severity
            raise CommandRefused(command(*words), answer)

    async def _sessions_of_leaving_workers(self, worker: tuple[int, float]) -> Mapping[tuple[str, str], int]:
        """Requests in flight by (backend, server) in workers that a reload replaced.

        Once no replaced worker runs next to `worker`, the master is not asked again until a reload starts another one.
        While the master does not answer (it restarts itself at a reload) the last count is used: too high a count keeps
        a replica a moment longer, too low a count would stop a replica that still has requests.
        """
        if worker == self._alone:
            return {}
        try:
            total: dict[tuple[str, str], int] = {}
            pids = await self.master.leaving_workers()
            for pid in pids:
                for server, seen in state.traffic(await self.master.ask_worker(pid, "show stat -1 4 -1")).items():
                    total[server] = total.get(server, 0) + seen.sessions
            self._leaving = total
            self._alone = None if pids else worker
        except RoutingUnreachable as error:
            _log.warning("the requests of replaced workers cannot be counted, the last count is used: %s", error)
        return self._leaving


def _path_of(action: ServerAction) -> str:
    return f"{action.backend}/{action.target}"
