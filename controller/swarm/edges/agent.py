"""The program next to HAProxy on each edge: `python3 -m controller.swarm.edges.agent`.

It fetches the routes from the controller over TLS, checks them, keeps them on the edge's volume and reloads HAProxy in
place. It also keeps the servers in the file up to date. Without a controller, HAProxy continues with its last file. It
needs nothing but Python's own library.

An edge takes no routes of a controller that is older than the newest one it knows, from HAProxy (which refuses the
commands of older controllers by itself), from the file, or from an answer.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import socket
import ssl
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...errors import RoutingError
from ...routing import haproxy_state as state
from ...routing import haproxy_text as text
from ...routing.haproxy_file import ConfigFile
from ...routing.haproxy_socket import MasterSocket, RuntimeSocket
from ..certificates import DOMAIN, context
from .offer import EPOCH_HEADER, PORT, WAIT_S, EdgeOffer, Known, judge, question

_log = logging.getLogger("edge")

RUN_DIR = Path("/run/haproxy")
SECRETS = Path(text.SECRETS)
RETRY_S = 2.0
"""Between questions to a controller that does not answer, or is not obeyed."""
CONNECT_S = 3.0
"""For each address of the controllers' name: that of a lost manager does not answer."""
CHECK_S = 30.0
"""For HAProxy to judge a configuration: as long as for a reload."""
REFRESH_S = 1.0
"""Between looks at the servers that the file has to list."""


class _ControllerConnection(http.client.HTTPSConnection):
    """To a controller, whose certificate has the name of its role."""

    def connect(self) -> None:
        plain = socket.create_connection((self.host, self.port), CONNECT_S)
        plain.settimeout(self.timeout)
        self.sock = self._context.wrap_socket(plain, server_hostname=f"any.controller.{DOMAIN}")  # type: ignore[attr-defined]


class Agent:
    """Keeps one edge's file: `run_dir/haproxy.cfg`, with the routes of the controller at `host:port`."""

    def __init__(self, edge: str, run_dir: Path, host: str, port: int, tls: ssl.SSLContext) -> None:
        self._edge, self._host, self._port, self._tls = edge, host, port, tls
        self._run_dir = run_dir
        self._runtime = RuntimeSocket(run_dir / "admin.sock")
        self._file = ConfigFile(run_dir, self._runtime, MasterSocket(run_dir / "master.sock"), is_edge=True)
        self._known = Known()
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Fetch and refresh, forever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._refresh_for_ever())
            while True:
                try:
                    pause_s = await self.turn()
                except (OSError, http.client.HTTPException, RoutingError) as error:
                    _log.warning("no routes from %s:%d: %s", self._host, self._port, error)
                    pause_s = RETRY_S
                await asyncio.sleep(pause_s)

    async def turn(self) -> float:
        """Ask once and do what follows; return the pause until the next question. Raises OSError, RoutingError."""
        await self._look()
        offer = await asyncio.to_thread(self._fetch, question(self._edge, self._known))
        await self._look()  # an answer takes long
        match judge(self._known, offer):
            case "older":
                _log.warning(
                    "a controller of epoch %d is not obeyed: there is one of %d", offer.epoch, self._known.epoch
                )
                return RETRY_S
            case "load":
                self._known = replace(self._known, epoch=offer.epoch)
                await self._load(text.with_epoch(offer.config, offer.epoch))
            case "nothing":  # what was refused is tried again: perhaps a reload did not end in time
                self._known = replace(self._known, epoch=offer.epoch, refused="", why="")
        return 0.0

    async def _look(self) -> None:
        """Take note of what HAProxy runs and of the newest epoch."""
        running, seen = await self._runtime.ask_all(("get var proc.pierhead_routing", "get var proc.pierhead_epoch"))
        epoch = max(self._known.epoch, state.number(seen))
        self._known = replace(self._known, hash=state.variable(running), epoch=epoch)

    async def _load(self, config: str) -> None:
        why = await check(config, self._run_dir)
        if not why:
            try:
                async with self._writing:
                    await self._file.load(config)
            except RoutingError as error:
                why = str(error)
        self._known = replace(self._known, refused=text.hash_of(config) if why else "", why=why)
        if why:
            _log.warning("the routes are refused, the former ones stay: %s", why)

    async def _refresh_for_ever(self) -> None:
        while True:
            async with self._writing:
                await self._file.refresh()
            await asyncio.sleep(REFRESH_S)

    def _fetch(self, path: str) -> EdgeOffer:
        connection = _ControllerConnection(self._host, self._port, timeout=WAIT_S + 10, context=self._tls)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            if answer.status not in (200, 204):
                raise OSError(f"{answer.status} {body[:200].decode(errors='replace')}")
            return EdgeOffer(int(answer.headers.get(EPOCH_HEADER) or 0), body.decode())
        finally:
            connection.close()


async def check(config: str, run_dir: Path) -> str:
    """What HAProxy says against a configuration; "" = nothing."""
    with tempfile.NamedTemporaryFile("w", dir=run_dir, prefix=".check-") as file:
        file.write(config)
        file.flush()
        process = await asyncio.create_subprocess_exec(
            *("haproxy", "-c", "-q", "-f", file.name), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(CHECK_S):
                said, _ = await process.communicate()
        except TimeoutError:
            return f"`haproxy -c` has not ended after {CHECK_S:g} s"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return said.decode(errors="replace").strip() if process.returncode else ""


def main(env: Mapping[str, str]) -> None:
    """Run until the container ends."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    tls = context(SECRETS / "edge.pem", SECRETS / "ca.pem", is_server=False)
    host, _, port = env.get("PIERHEAD_CONTROLLER", "controller").partition(":")
    asyncio.run(Agent(env.get("PIERHEAD_NODE", ""), RUN_DIR, host, int(port or PORT), tls).run())


if __name__ == "__main__":
    main(os.environ)
