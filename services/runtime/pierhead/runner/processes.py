"""A Runner of which each replica has a process: `python -m pierhead serve`, on ports that are free."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from pierhead.calls.replica import Endpoint
from pierhead.classes.service import Bound, serves_http
from pierhead.runner.discovery import LocalDiscovery
from pierhead.runner.graph import check_routes
from pierhead.runner.options import Options, listing_of, replicas_of, route_of, settings_of, variables_of
from pierhead.runner.ports import free_ports
from pierhead.runner.runner import PAUSE_S, Changed, FrontRoute, Offer, ProcessFailed
from pierhead.tasks import end_tasks

logger = logging.getLogger("pierhead")

POLL_S = 0.05
PROBE_S = 2.0
WATCH_S = 1.0
"""Between two looks at a replica that is ready."""
END_S = 5.0
"""How long a process may take to end at once, before it is killed."""


class ServiceFacts(NamedTuple):
    """What has to be known of one service."""

    words: Mapping[str, Any]
    """Its class's keywords."""
    environment: Mapping[str, str]
    """Variables that its class names."""
    has_http: bool
    grpc_service: str
    """Full name; "" for a class without methods."""


def facts_of(bound: Bound) -> ServiceFacts:
    """Those of a bound service."""
    contract = bound.cls.__contract__
    grpc_service = contract.service if contract.methods else ""
    return ServiceFacts(bound.cls.__x_serve__, bound.cls.__environment__, serves_http(bound.cls), grpc_service)


class ServiceProcess:
    """The process of one replica."""

    def __init__(self, name: str, replica: str, facts: ServiceFacts, words: Options, ports: Sequence[int]) -> None:
        self.name = replica
        self.facts = facts
        self.settings = settings_of(name, words, replica)
        self.http_port, self.grpc_port, self.admin_port = ports
        self._words = words
        self._service = name
        self._process: asyncio.subprocess.Process | None = None

    def environment(self) -> dict[str, str]:
        """The variables of its process, but for those that all processes of the application have."""
        return {
            **variables_of(self._words),
            "PIERHEAD_SERVICE": self._service,
            "PIERHEAD_REPLICA": self.name,
            "PIERHEAD_HOST": "127.0.0.1",
            "PIERHEAD_PORT": str(self.http_port if self.facts.has_http else self.grpc_port),
            "PIERHEAD_GRPC_PORT": str(self.grpc_port),
            "PIERHEAD_ADMIN_PORT": str(self.admin_port),
            "PIERHEAD_SOCKET": "",  # those of a replica that this may run in are not its own
            "PIERHEAD_ADMIN_SOCKET": "",
            "PIERHEAD_LOG_ENCODING": "text",
            "PIERHEAD_ACCESS_LOG": "all",
        }

    def endpoint(self, port: int) -> Endpoint:
        """Where it is, by one of its ports."""
        return Endpoint(self.name, f"127.0.0.1:{port}", max_ongoing_requests=self.settings.max_ongoing_requests)

    async def start(self, target: str, more: Mapping[str, str]) -> None:
        """Return once its /readyz answers 200. Raises ProcessFailed when it has ended."""
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pierhead", "serve", target,
            env={**os.environ, **more, **self.environment()},
            # Ctrl-C is for the runner, which ends its processes itself.
            start_new_session=True,
        )  # fmt: skip
        while not await _is_ready(self.admin_port):
            if process.returncode is not None:
                raise ProcessFailed(f"the process of {self._service} ended with {process.returncode}; see above")
            await asyncio.sleep(POLL_S)

    async def ill(self) -> None:
        """Return once it has ended, or is not ready any more."""
        assert self._process is not None  # noqa: S101 - it was started
        while self._process.returncode is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._process.wait()
            if not await _is_ready(self.admin_port):
                return

    async def stop(self, *, at_once: bool) -> None:
        """Drain, or end at once; returns when it has ended."""
        if self._process is None or self._process.returncode is not None:
            return
        _signal(self._process, again=at_once)
        try:
            async with asyncio.timeout(END_S if at_once else self.settings.drain_timeout_s + END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def hurry(self) -> None:
        """End at once, where it drains already."""
        if self._process is not None and self._process.returncode is None:
            _signal(self._process, again=True)


class ProcessService:
    """The replicas of one service, each replaced by another one when it is ill."""

    def __init__(self, name: str, facts: ServiceFacts, words: Options, target: str) -> None:
        self.name = name
        self.facts = facts
        self.words = words
        self.ready: dict[str, ServiceProcess] = {}
        """By name."""
        self._target = target
        self._alive: list[ServiceProcess] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._numbers = itertools.count(1)
        self._more: Mapping[str, str] = {}

    def route(self) -> FrontRoute:
        """Its route. Only for a service that has one."""
        ends = [each.endpoint(each.http_port) for each in self.ready.values()]
        return route_of(self.name, self.words, settings_of(self.name, self.words), ends)

    def grpc(self) -> Sequence[Endpoint]:
        """Where its methods are."""
        return [each.endpoint(each.grpc_port) for each in self.ready.values()]

    async def start(
        self, ports: Sequence[Sequence[int]], more: Mapping[str, str], changed: Callable[[], object]
    ) -> None:
        """Start a replica on each of `ports`; return once all are ready. Raises ProcessFailed."""
        self._more = more
        starts = [asyncio.create_task(self._start(each)) for each in ports]
        try:
            started = await asyncio.gather(*starts)
        finally:
            await end_tasks(*starts)
        changed()
        for each in started:
            self._own(self._keep(each, changed))

    async def stop(self, *, at_once: bool) -> None:
        """End all of them; returns when they have ended."""
        await end_tasks(*self._tasks)
        self.ready.clear()
        await asyncio.gather(*(each.stop(at_once=at_once) for each in self._alive))

    def hurry(self) -> None:
        """End at once what drains."""
        for each in self._alive:
            each.hurry()

    def _own(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, ports: Sequence[int]) -> ServiceProcess:
        process = ServiceProcess(self.name, f"{self.name}-{next(self._numbers)}", self.facts, self.words, ports)
        self._alive.append(process)
        await process.start(self._target, self._more)
        self.ready[process.name] = process
        return process

    async def _keep(self, process: ServiceProcess, changed: Callable[[], object]) -> None:
        """Replace it by another replica whenever it is unhealthy."""
        while True:
            await process.ill()
            logger.error("%s is replaced: it is unhealthy, or has ended by itself", process.name)
            del self.ready[process.name]
            changed()
            self._own(self._end(process))
            process = await self._start_again()
            changed()

    async def _start_again(self) -> ServiceProcess:
        while True:
            try:
                return await self._start(free_ports(3))
            except ProcessFailed as error:
                logger.error("%s; another one is tried in %g s", error, PAUSE_S)  # noqa: TRY400 - it has said why
            await asyncio.sleep(PAUSE_S)

    async def _end(self, process: ServiceProcess) -> None:
        await process.stop(at_once=False)
        self._alive.remove(process)


def ports_of(services: Iterable[ProcessService]) -> dict[str, list[Sequence[int]]]:
    """By service, three ports for each of its first replicas."""
    counts = {each.name: replicas_of(each.words) for each in services}
    ports = iter(free_ports(3 * sum(counts.values())))  # all at once: one that was given back may be drawn again
    return {name: [tuple(islice(ports, 3)) for _ in range(count)] for name, count in counts.items()}


class ProcessRunner:
    """A Runner."""

    def __init__(
        self,
        target: str,
        services: Mapping[str, ServiceFacts],
        written: Mapping[str, Options] | None = None,
        changed: Changed = lambda _: None,
    ) -> None:
        """`services`: those of the application at `target`, callers before their callees; `written`: the words of a
        compose file.

        Raises NoApplication and NoWords as LoopRunner does.
        """
        words = {name: {**facts.words, **(written or {}).get(name, {})} for name, facts in services.items()}
        check_routes(words, {name: facts.has_http for name, facts in services.items()})
        self.services = {name: ProcessService(name, facts, words[name], target) for name, facts in services.items()}
        self._changed = changed
        self._discovery = LocalDiscovery(list(services))
        self._has_started = False

    async def start(self) -> Offer:
        """See Runner."""
        await self._discovery.start()
        secret = secrets.token_hex(16)
        where = {"PIERHEAD_DISCOVERY": self.discovery}
        ports, starts = ports_of(self.services.values()), []
        for name, service in self.services.items():
            given = service.facts.environment.items()
            own = {key: os.environ.get(key, secret) if "${" in value else value for key, value in given}
            start = service.start(ports[name], {**own, **where}, partial(self._show, service))
            starts.append(asyncio.create_task(start))
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await end_tasks(*starts)
            await self.stop(at_once=True)
            raise
        self._has_started = True
        return self._offer()

    @property
    def discovery(self) -> str:
        """The address of the list of replicas, for callers from outside; once it has started."""
        return f"127.0.0.1:{self._discovery.port}"

    async def stop(self, *, at_once: bool = False) -> None:
        """See Runner."""
        if at_once:
            for service in self.services.values():
                service.hurry()
        self._has_started = False
        for service in self.services.values():
            await service.stop(at_once=at_once)
        await self._discovery.stop()

    def ready(self) -> Mapping[str, int]:
        """See Runner."""
        return {name: len(service.ready) for name, service in self.services.items()}

    def _offer(self) -> Offer:
        speaking = {each.facts.grpc_service: each.grpc() for each in self.services.values() if each.facts.grpc_service}
        routes = [each.route() for each in self.services.values() if "route" in each.words]
        return Offer(routes, None, {name: ends[0].address for name, ends in speaking.items() if ends})

    def _show(self, service: ProcessService) -> None:
        self._discovery.update(service.name, listing_of(service.words, service.grpc()))
        if self._has_started:
            self._changed(self._offer())


def _signal(process: asyncio.subprocess.Process, *, again: bool) -> None:
    """One signal to drain; two to end at once, of different kinds, as two of one kind may arrive as one."""
    for number in (signal.SIGTERM, signal.SIGINT)[: 1 + again]:
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
