"""One version of an application in processes: `python -m pierhead serve` for each service, on ports that are free."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from pierhead.dev.application import check_routes
from pierhead.dev.described import ProcessFailed, ServiceFacts, described
from pierhead.dev.front import FrontRoute, route_of
from pierhead.dev.ports import free_ports
from pierhead.dev.version import Offer, VersionSource
from pierhead.dev.words import Words, settings_of, variables_of
from pierhead.settings import static_key

POLL_S = 0.05
PROBE_S = 2.0
END_S = 5.0
"""How long a process may take to end at once, before it is killed."""


class ServiceProcess:
    """The process of one service."""

    def __init__(self, name: str, facts: ServiceFacts, words: Words, ports: Sequence[int]) -> None:
        self.name = name
        self.facts = facts
        self.words = words
        self.settings = settings_of(name, words)
        self.http_port, self.grpc_port, self.admin_port = ports
        self.process: asyncio.subprocess.Process | None = None

    def environment(self) -> dict[str, str]:
        """The variables of its process, but for those that say where the others are."""
        return {
            **variables_of(self.words),
            "PIERHEAD_SERVICE": self.name,
            "PIERHEAD_REPLICA": self.name,
            "PIERHEAD_HOST": "127.0.0.1",
            "PIERHEAD_PORT": str(self.http_port if self.facts.has_http else self.grpc_port),
            "PIERHEAD_GRPC_PORT": str(self.grpc_port),
            "PIERHEAD_ADMIN_PORT": str(self.admin_port),
            "PIERHEAD_LOG_ENCODING": "text",
            "PIERHEAD_ACCESS_LOG": "all",
        }

    def route(self) -> FrontRoute:
        """Its route. Only for a service that has one."""
        return route_of(self.name, self.words, self.settings, self.http_port)

    async def ready(self) -> None:
        """Return once its /readyz answers 200. Raises ProcessFailed when it has ended."""
        assert self.process is not None  # noqa: S101 - it was started
        while not await _is_ready(self.admin_port):
            if self.process.returncode is not None:
                raise ProcessFailed(f"the process of {self.name} ended with {self.process.returncode}; see above")
            await asyncio.sleep(POLL_S)


def processes_of(services: Mapping[str, ServiceFacts], words: Mapping[str, Words]) -> list[ServiceProcess]:
    """A process for each service, with ports of its own."""
    ports = iter(free_ports(3 * len(services)))  # all at once: a port that was given back may be drawn again
    return [ServiceProcess(name, facts, words[name], list(islice(ports, 3))) for name, facts in services.items()]


class ProcessVersion:
    """A Version of which each service has a process."""

    def __init__(self, source: VersionSource) -> None:
        self._source = source
        self._processes: list[ServiceProcess] = []
        self._files: Sequence[Path] = ()
        self._ending: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[Offer] | None = None
        self._at_once = False
        self._ended = asyncio.Event()

    async def start(self) -> Offer:
        """See Version."""
        self._starting = asyncio.create_task(self._start())
        try:
            return await self._starting
        except asyncio.CancelledError:
            if self._ending is None:
                raise
            raise ProcessFailed("it was stopped while it started") from None
        except BaseException:
            self.stop(at_once=True)
            raise

    def stop(self, *, at_once: bool) -> None:
        """See Version."""
        self._at_once = self._at_once or at_once
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        elif at_once:
            for each in self._processes:
                _signal(each.process, again=True)

    async def ended(self) -> None:
        """See Version."""
        await self._ended.wait()

    def files(self) -> set[Path]:
        """See Version."""
        return set(self._files)

    async def _start(self) -> Offer:
        found = await described(self._source.target)
        self._files = found.files
        written = self._source.words()
        words = {name: {**facts.words, **written.get(name, {})} for name, facts in found.services.items()}
        check_routes(words, {name: facts.has_http for name, facts in found.services.items()})
        self._processes = processes_of(found.services, words)
        speaking = {each.facts.grpc_service: each for each in self._processes if each.facts.grpc_service}
        where = {
            f"PIERHEAD_STATIC_{static_key(each.name)}": f"127.0.0.1:{each.grpc_port}" for each in speaking.values()
        }
        secret = secrets.token_hex(16)
        for each in self._processes:
            own = {name: secret if "${" in value else value for name, value in each.facts.environment.items()}
            each.process = await self._spawn(each, {**own, **where})
        await asyncio.gather(*(each.ready() for each in self._processes))
        return Offer(
            [each.route() for each in self._processes if "route" in each.words],
            None,
            {service: f"127.0.0.1:{each.grpc_port}" for service, each in speaking.items()},
        )

    async def _spawn(self, each: ServiceProcess, more: Mapping[str, str]) -> asyncio.subprocess.Process:
        environment = {name: value for name, value in os.environ.items() if name != "PIERHEAD_DISCOVERY"}
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pierhead", "serve", self._source.target,
            env={**environment, **more, **each.environment()},
            # Ctrl-C is for `dev`, which ends its processes itself.
            start_new_session=True,
        )  # fmt: skip

    async def _end(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        for each in self._processes:  # callers first
            if each.process is None or each.process.returncode is not None:
                continue
            _signal(each.process, again=self._at_once)
            try:
                async with asyncio.timeout(END_S if self._at_once else each.settings.drain_timeout_s + END_S):
                    await each.process.wait()
            except TimeoutError:
                each.process.kill()
                await each.process.wait()
        self._ended.set()


def _signal(process: asyncio.subprocess.Process | None, *, again: bool) -> None:
    """One signal to drain; two to end at once, of different kinds, as two of one kind may arrive as one."""
    for number in (signal.SIGTERM, signal.SIGINT)[: 1 + again]:
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(number)


async def _is_ready(port: int) -> bool:
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return (await reader.readline()).startswith(b"HTTP/1.1 200")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
