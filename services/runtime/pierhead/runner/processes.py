"""A Runner of which each replica has a process: `python -m pierhead serve`, on ports that are free."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from pierhead.calls.replica import Endpoint
from pierhead.classes.service import Bound, serves_http
from pierhead.discovery.served import MOST_IN_ALL, DiscoveryServer, DiscoveryState
from pierhead.discovery.v1 import discovery_pb2
from pierhead.runner.graph import check_routes
from pierhead.runner.keeper import ReplicaKeeper, all_of
from pierhead.runner.options import Options, listing_of, replicas_of, route_of, settings_of, variables_of
from pierhead.runner.ports import free_ports
from pierhead.runner.runner import Changed, FrontRoute, Offer, ProcessFailed

POLL_S = 0.05
PROBE_S = 2.0
MOST_LATE = 3
"""Probes in a row without an answer in that time, after which a replica is ill."""
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
    """A KeptReplica: the process of one replica."""

    def __init__(self, name: str, service: ProcessService, ports: Sequence[int]) -> None:
        self.name = name
        self.settings = settings_of(service.name, service.words, name)
        self.http_port, self.grpc_port, self.admin_port = ports
        self._service = service
        self._process: asyncio.subprocess.Process | None = None

    def environment(self) -> dict[str, str]:
        """The variables of its process."""
        service = self._service
        return {
            **os.environ,
            **service.environment,
            **variables_of(service.words),
            "PIERHEAD_SERVICE": service.name,
            "PIERHEAD_REPLICA": self.name,
            "PIERHEAD_HOST": "127.0.0.1",
            "PIERHEAD_PORT": str(self.http_port if service.facts.has_http else self.grpc_port),
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

    async def ready(self) -> None:
        """Return once its /readyz answers 200. Raises ProcessFailed when it has ended."""
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pierhead", "serve", self._service.target,
            env=self.environment(),
            # Ctrl-C is for the runner, which ends its processes itself.
            start_new_session=True,
        )  # fmt: skip
        while not await _is_ready(self.admin_port):
            if process.returncode is not None:
                raise ProcessFailed(f"the process of {self._service.name} ended with {process.returncode}; see above")
            await asyncio.sleep(POLL_S)

    async def ill(self) -> None:
        """See KeptReplica."""
        assert self._process is not None  # noqa: S101 - it was started
        late = 0
        while self._process.returncode is None and late < MOST_LATE:
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._process.wait()
            is_ready = await _is_ready(self.admin_port)
            if is_ready is False:
                return
            late = 0 if is_ready else late + 1

    async def stop(self, *, at_once: bool) -> None:
        """See KeptReplica."""
        if self._process is None or self._process.returncode is not None:
            return
        _signal(self._process, again=at_once)
        try:
            async with asyncio.timeout(END_S if at_once else self.settings.drain_timeout_s + END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


class ProcessService(ReplicaKeeper[ServiceProcess]):
    """The replicas of one service."""

    def __init__(
        self, name: str, facts: ServiceFacts, words: Options, target: str, changed: Callable[[ProcessService], object]
    ) -> None:
        super().__init__(name, words, changed)
        self.facts = facts
        self.target = target
        self.environment: Mapping[str, str] = {}
        """What its processes have in addition to this one's variables."""
        self.ports: Iterator[Sequence[int]] = iter(())
        """Three for each of its first replicas."""

    def make(self, name: str) -> ServiceProcess:
        """See ReplicaKeeper."""
        return ServiceProcess(name, self, next(self.ports, ()) or free_ports(3))

    def route(self) -> FrontRoute:
        """Its route. Only for a service that has one."""
        ends = [each.endpoint(each.http_port) for each in self.replicas.values()]
        return route_of(self.name, self.words, settings_of(self.name, self.words), ends)

    def grpc(self) -> Sequence[Endpoint]:
        """Where its methods are."""
        return [each.endpoint(each.grpc_port) for each in self.replicas.values()]

    def listed(self) -> discovery_pb2.ServiceEndpoints:
        """What Discovery says of it."""
        listing = listing_of(self.words, self.grpc())
        return discovery_pb2.ServiceEndpoints(
            max_queued_requests=listing.max_queued_requests,
            policy=listing.policy or "",
            policy_kwargs=listing.policy_kwargs,
            endpoints=[
                discovery_pb2.Endpoint(
                    replica=each.name,
                    address=each.address,
                    state=discovery_pb2.Endpoint.READY,
                    max_ongoing_requests=each.max_ongoing_requests,
                )
                for each in listing.endpoints
            ],
        )


def draw_ports(services: Iterable[ProcessService]) -> None:
    """Give services the ports of their first replicas: all at once, as one that was given back may be drawn again."""
    counts = [(each, replicas_of(each.words)) for each in services]
    ports = iter(free_ports(3 * sum(count for _, count in counts)))
    for service, count in counts:
        service.ports = iter([tuple(islice(ports, 3)) for _ in range(count)])


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

        Raises NoApplication and NoOptions as LoopRunner does.
        """
        words = {name: {**facts.words, **(written or {}).get(name, {})} for name, facts in services.items()}
        check_routes(words, {name: facts.has_http for name, facts in services.items()})
        self.services = {
            name: ProcessService(name, facts, words[name], target, self._show) for name, facts in services.items()
        }
        self._changed = changed
        self._discovery_state = DiscoveryState(most_of_a_caller=MOST_IN_ALL)  # they have one address
        self._discovery: DiscoveryServer | None = None
        self._has_started = False

    async def start(self) -> Offer:
        """See Runner."""
        self._discovery = discovery = DiscoveryServer(self._discovery_state, "127.0.0.1", 0)
        await discovery.start()
        self._publish()
        secret = secrets.token_hex(16)
        for service in self.services.values():
            given = service.facts.environment.items()
            own = {key: os.environ.get(key, secret) if "${" in value else value for key, value in given}
            service.environment = {**own, "PIERHEAD_DISCOVERY": self.discovery}
        draw_ports(self.services.values())
        try:
            await all_of(each.start() for each in self.services.values())
        except BaseException:
            await self.stop(at_once=True)
            raise
        self._has_started = True
        return self._offer()

    @property
    def discovery(self) -> str:
        """The address of the list of replicas, for callers from outside; once it has started."""
        return f"127.0.0.1:{self._discovery.port if self._discovery else 0}"

    async def stop(self, *, at_once: bool = False) -> None:
        """See Runner."""
        self._has_started = False
        services = list(self.services.values())
        for together in [services] if at_once else [[each] for each in services]:
            await asyncio.gather(*(each.stop(at_once=at_once) for each in together))
        if self._discovery is not None:
            await self._discovery.stop()

    def ready(self) -> Mapping[str, int]:
        """See Runner."""
        return {name: len(service.replicas) for name, service in self.services.items()}

    def _offer(self) -> Offer:
        speaking = {each.facts.grpc_service: each.grpc() for each in self.services.values() if each.facts.grpc_service}
        routes = [each.route() for each in self.services.values() if "route" in each.words]
        return Offer(routes, None, {name: ends[0].address for name, ends in speaking.items() if ends})

    def _publish(self) -> None:
        self._discovery_state.publish({name: each.listed() for name, each in self.services.items()})

    def _show(self, _: ProcessService) -> None:
        self._publish()
        if self._has_started:
            self._changed(self._offer())


def _signal(process: asyncio.subprocess.Process, *, again: bool) -> None:
    """One signal to drain; two to end at once, of different kinds, as two of one kind may arrive as one."""
    for number in (signal.SIGTERM, signal.SIGINT)[: 1 + again]:
        with suppress(ProcessLookupError):
            process.send_signal(number)


async def _is_ready(port: int) -> bool | None:
    """What its /readyz says; None = nothing in time."""
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return (await reader.readline()).startswith(b"HTTP/1.1 200")
            finally:
                writer.close()
    except TimeoutError:
        return None
    except (OSError, ValueError):  # ValueError: a line of any length
        return False
