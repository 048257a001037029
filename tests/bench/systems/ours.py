"""Our services as processes of this host: static replica lists, HAProxy in front. So is the bare chain.

Each replica has an address of its own within 127.0.0.0/8, so ports are the same for all, as in containers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tests.bench.cases import TRITON, Subject
from tests.bench.processes import Kept, free_ports, get, listens, wait_for
from tests.bench.systems.edge import (
    MAX_ONGOING_REQUESTS,
    REQUEST_TIMEOUT_S,
    Route,
    configuration,
    write,
)
from tests.bench.systems.running import Running, Workplace

START_S = 120.0
GRACE_S = 3.0
ALONE = "/echo/alone"
"""Before the echo's path, at the bare chain: a handler without a call."""


@dataclass(frozen=True, slots=True)
class Service:
    """One service of an application."""

    role: str
    name: str
    words: tuple[str, ...]
    """After `python -m`."""
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Chain:
    """An ingress and a child that it calls."""

    route: str
    ingress: Service
    child: Service


_SERVE = ("pierhead", "serve")

_CHAINS: Mapping[tuple[bool, str], Chain] = {
    (True, "echo"): Chain(
        "/echo",
        Service("ingress", "echo", (*_SERVE, "services.echo.app:app")),
        Service("child", "echo-child", (*_SERVE, "services.echo.app:app")),
    ),
    (True, "dlrm"): Chain(
        "/recsys",
        Service("ingress", "recsys", (*_SERVE, "services.recsys.app:app"), replicas=2),
        Service("child", "ranker", (*_SERVE, "services.recsys.app:app")),
    ),
    (False, "echo"): Chain(
        "/echo",
        Service("ingress", "echo", ("tests.bench.bare.ingress",)),
        Service("child", "echo-child", ("tests.bench.bare.child",)),
    ),
}
"""By whether the runtime is in it."""


def chain_of(subject: Subject, name: str) -> Chain:
    """A chain with as many replicas as the subject has."""
    chain = _CHAINS[subject.kind != "bare", name]
    if subject is TRITON:
        chain = replace(chain, child=Service("child", "triton", ()))
    if not subject.replicas:
        return chain
    ingress, child = (replace(service, replicas=subject.replicas) for service in (chain.ingress, chain.child))
    return replace(chain, ingress=ingress, child=child)


@dataclass(frozen=True, slots=True)
class _Ports:
    service: int
    admin: int


@contextlib.contextmanager
def running(work: Workplace, subject: Subject, name: str, path: str) -> Iterator[Running]:
    """Start the chain `name`, child first, and wait until it answers `path` through HAProxy. Raises BenchError."""
    chain = chain_of(subject, name)
    with contextlib.ExitStack() as stack:
        starter = _Starter(work, subject, stack)
        child_addresses = starter.replicas(chain.child, {})
        ingress_addresses = starter.replicas(chain.ingress, {_static_key(chain.child): ",".join(child_addresses)})
        url = f"http://{ingress_addresses[0]}"
        if work.haproxy is not None:
            url = starter.edge(chain, ingress_addresses)
        wait_for(lambda: get(url + path)[0] == 200, f"{subject.key} answers {path}", START_S, starter.kept)
        yield Running(url, starter.kept, ways={"alone": url + ALONE})


def _static_key(service: Service) -> str:
    return f"PIERHEAD_STATIC_{service.name.upper().replace('-', '_')}"


class _Starter:
    """Starts processes and hands their ends to the stack."""

    def __init__(self, work: Workplace, subject: Subject, stack: contextlib.ExitStack) -> None:
        self._work, self._subject, self._stack = work, subject, stack
        self._ports = _Ports(*free_ports(2))
        self._hosts = iter(f"127.0.0.{number}" for number in range(2, 255))
        # The limits know one port: theirs answers /readyz as well.
        self._has_admin_port = subject.kind != "bare"
        self.kept: list[Kept] = []

    def replicas(self, service: Service, env: Mapping[str, str]) -> list[str]:
        """Start a service's replicas and wait until each is ready; their addresses."""
        hosts = [next(self._hosts) for _ in range(service.replicas)]
        for host in hosts:
            self._keep(service.role, [str(self._work.python), "-m", *service.words], self._env(service, host, env))
        for host in hosts:
            wait_for(lambda host=host: self._is_ready(host), f"{service.name} at {host} is ready", START_S, self.kept)  # type: ignore[misc]
        return [f"{host}:{self._ports.service}" for host in hosts]

    def edge(self, chain: Chain, addresses: Sequence[str]) -> str:
        """Start HAProxy in front of the ingress; its URL."""
        (port,) = free_ports(1)
        probe_port = self._ports.admin if self._has_admin_port else self._ports.service
        route = Route(chain.ingress.name, chain.route, self._ports.service, probe_port, addresses)
        text = configuration(route, port, self._work.directory)
        file = write(str(self._work.haproxy), self._work.directory, text)
        self._keep("haproxy", [str(self._work.haproxy), "-W", "-db", "-f", str(file)], {})
        return f"http://127.0.0.1:{port}"

    def _keep(self, role: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        log = self._work.directory / f"{role}-{len(self.kept)}.log"
        kept = Kept(role, command, env, log, GRACE_S)
        self._stack.callback(kept.stop)
        self.kept.append(kept)

    def _env(self, service: Service, host: str, env: Mapping[str, str]) -> dict[str, str]:
        return {
            "PIERHEAD_SERVICE": service.name,
            "PIERHEAD_REPLICA": f"{service.name}-{host}",
            "PIERHEAD_HOST": host,
            "PIERHEAD_PORT": str(self._ports.service),
            "PIERHEAD_ADMIN_PORT": str(self._ports.admin),
            "PIERHEAD_MAX_ONGOING_REQUESTS": str(MAX_ONGOING_REQUESTS),
            "PIERHEAD_REQUEST_TIMEOUT_S": str(REQUEST_TIMEOUT_S),
            "PIERHEAD_RANKER_DEVICE": self._work.device,
            "PIERHEAD_TORCH_THREADS": str(self._work.torch_threads),
            **env,
            **dict(self._subject.env),
        }

    def _is_ready(self, host: str) -> bool:
        if self._has_admin_port:
            return get(f"http://{host}:{self._ports.admin}/readyz", timeout_s=2)[0] == 200
        return listens(host, self._ports.service)
