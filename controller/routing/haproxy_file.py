"""HAProxy's configuration file, on HAProxy's own machine: loads another one, and keeps the servers in it up to date.

The file always lists the current servers, so a restarted container begins with them. A reload also passes on their
check results and drains, in a state file.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from pierhead.files import replace_file

from ..errors import RoutingError, RoutingUnreachable
from ..model.world import Server, ServerState
from . import haproxy_keys
from . import haproxy_state as state
from . import haproxy_text as config
from .haproxy_socket import MasterSocket, RuntimeSocket

_log = logging.getLogger(__name__)

NEW_WORKER_WAIT_S = 10.0
_NO_STATES = "1\n"
"""A server state file without servers: only the number of its format."""


class ConfigFile:
    """`haproxy.cfg` and `servers.state` in `run_dir`, a volume of HAProxy's container."""

    def __init__(self, run_dir: Path, runtime: RuntimeSocket, master: MasterSocket, *, is_edge: bool = False) -> None:
        """`is_edge`: the file also keeps each server's own maxconn, and the newest epoch of a controller."""
        self._path = run_dir / "haproxy.cfg"
        self._states_path = run_dir / "servers.state"
        self._runtime = runtime
        self._master = master
        self._is_edge = is_edge

    async def load(self, text: str, swap: Callable[[str, str], Awaitable[bool]] | None = None) -> None:
        """Write a configuration without servers, with the current servers, and reload; nothing if it runs already.

        `swap` changes what runs, from one text to the other, without a reload; False where it cannot.

        Raises RoutingError with HAProxy's messages when it does not start with it: the former one stays in force.
        """
        info, running = await self._runtime.ask_all(("show info", "get var proc.pierhead_routing"))
        refusal = state.refusal_of_version(state.info_facts(info)["Version"])
        if refusal:
            raise RoutingError(f"HAProxy {refusal}. No routes were written.")
        wanted, previous = config.hash_of(text), await asyncio.to_thread(self.read)
        if state.variable(running) == wanted == config.hash_of(previous):
            return
        if swap and state.variable(running) == config.hash_of(previous) and await swap(previous, text):
            _, servers = await self._servers()
            text = config.with_servers(text, _lines(servers, keep_state=False))
            await asyncio.to_thread(write, self._path, text)
            named = f"set var proc.pierhead_routing str({wanted})"
            await self._runtime.ask_all(("experimental-mode on", named))
            return
        await self._keep_keys()
        states, servers = await self._servers()
        text = await self._with_epoch(config.with_servers(text, _lines(servers, keep_state=True)))
        # The new worker reads check results and drains here, so no server that is down or draining gets traffic.
        await asyncio.to_thread(write, self._states_path, f"{states}\n")
        await asyncio.to_thread(write, self._path, text)
        try:
            await self._master.reload()
            await self._new_worker(wanted)
        except RoutingUnreachable:  # a worker with the new one may still come
            raise
        except RoutingError:
            if previous and (await self._hash_now()) != wanted:
                await asyncio.to_thread(write, self._path, previous)
            raise
        finally:
            await asyncio.to_thread(write, self._states_path, _NO_STATES)

    async def _servers(self) -> tuple[str, list[tuple[Server, int]]]:
        """`show servers state`, and the servers in it with their ids."""
        questions = ("show servers state", "show stat -1 4 -1")[: 1 + self._is_edge]
        states, *stat = await self._runtime.ask_all(questions)
        return states, state.servers(states, state.traffic(stat[0]) if stat else {})

    async def _with_epoch(self, text: str) -> str:
        """With the newest epoch: what HAProxy has seen, or what the text says."""
        if not self._is_edge:
            return text
        seen = state.number(await self._runtime.ask("get var proc.pierhead_epoch"))
        return config.with_epoch(text, max(seen, config.epoch_of(text)))

    async def _keep_keys(self) -> None:
        """See to the file of the clients' keys, which every configuration names. The controller writes it where it has
        the directory; on an edge it is what the process knows.
        """
        path = self._path.with_name(haproxy_keys.FILE)
        text = await asyncio.to_thread(path.read_text) if path.exists() else None
        if self._is_edge:
            seen = haproxy_keys.digest_in(await self._runtime.ask(haproxy_keys.ASK_DIGEST))
            if seen and seen != haproxy_keys.digest_of_file(text or ""):
                text = haproxy_keys.file_text(await haproxy_keys.known(self._runtime) or {})
                await asyncio.to_thread(write, path, text)
        if text is None:
            await asyncio.to_thread(write, path, "")

    async def _hash_now(self) -> str | None:
        try:
            return state.variable(await self._runtime.ask("get var proc.pierhead_routing"))
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

    async def refresh(self) -> None:
        """Write the current servers into the file, with which a HAProxy that restarts begins.

        Traffic does not depend on it, so a failure is logged and the next change retries. Draining servers are written
        as disabled: they must get no request after a restart.
        """
        try:
            running = state.variable(await self._runtime.ask("get var proc.pierhead_routing"))
            await self._keep_keys()
            text = await asyncio.to_thread(self.read)
            if not text or config.hash_of(text) != running:
                _log.warning(
                    "%s is not what HAProxy runs and was left alone; the next change of a route rewrites it", self._path
                )
                return
            _, servers = await self._servers()
            refreshed = await self._with_epoch(config.with_servers(text, _lines(servers, keep_state=False)))
            if refreshed != text:
                await asyncio.to_thread(write, self._path, refreshed)
        except (RoutingError, OSError) as error:
            _log.warning("%s could not be brought up to date: %s", self._path, error)

    def read(self) -> str:
        """The file; "" where there is none."""
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return ""


def _lines(servers: Collection[tuple[Server, int]], *, keep_state: bool) -> list[config.ServerLine]:
    """Lines for the file. Draining servers are disabled unless a state file says that they drain (`keep_state`)."""
    return [
        config.ServerLine(
            server.backend,
            server.name,
            server.address,
            number,
            disabled=server.state is ServerState.MAINT or (server.state is ServerState.DRAIN and not keep_state),
            limit=server.limit,
        )
        for server, number in servers
    ]


def write(path: Path, text: str) -> None:
    """Replace a file in one step: a reader sees the old or the new one, also after a power cut."""
    replace_file(path, text.encode(), 0o600, durable=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
