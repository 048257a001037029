"""What is measured, as processes of this host: replicas with the mock engine, Discovery, gateway, HAProxy; the peer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from pierhead.llm.v1.llm_pb2 import Operation
from pierhead.llm.v1.llm_pb2_grpc import LLMServerStub

from tests.bench.cases import Subject
from tests.bench.llm.cases import MODEL, VLLM_ENGINE, VLLM_MODEL
from tests.bench.processes import ROOT, BenchError, Kept, free_ports, get, wait_for
from tests.bench.systems import peer
from tests.bench.systems.edge import Route, configuration, write
from tests.bench.systems.running import Running, Workplace

SERVICE = "llm"
START_S = 120.0
VLLM_START_S = 600.0
GRACE_S = 3.0
MAX_ONGOING_REQUESTS = 4096
PEER = Subject("peer", "Ray Serve LLM", "peer")


@dataclass(frozen=True)
class Replicas:
    """LLM servers that are ready, each at an address of its own within 127.0.0.0/8."""

    kept: Sequence[Kept]
    addresses: Sequence[str]
    """unix:<path> of each one's gRPC, as on the stack."""
    pages: Sequence[str]
    """URL of each one's metrics."""

    def reset_caches(self) -> None:
        """Have all of them forget what they read."""
        asyncio.run(_reset(self.addresses))


async def _reset(addresses: Sequence[str]) -> None:
    for address in addresses:
        async with grpc.aio.insecure_channel(address) as channel:
            operation = Operation(reset_prefix_cache=Operation.ResetPrefixCache())
            await LLMServerStub(channel).Operate(operation, timeout=10)


@dataclass
class Site:
    """Starts processes; what it started ends with the stack."""

    work: Workplace
    stack: contextlib.ExitStack
    hosts: Iterator[str] = field(default_factory=lambda: iter(f"127.0.0.{number}" for number in range(2, 255)))
    shares_memory: bool = False
    """Whether x-serve.shared_memory is set, as behind HAProxy on the stack: replicas write their streams to it."""

    def keep(self, role: str, command: Sequence[str], env: Mapping[str, str], name: str = "") -> Kept:
        kept = Kept(role, command, env, self.work.directory / f"{name or role}.log", GRACE_S)
        self.stack.callback(kept.stop)
        return kept

    def replicas(self, count: int, engine: Mapping[str, Any]) -> Replicas:
        """Start LLM servers and wait until each has generated a token. Raises BenchError."""
        config = {"engine": "mock", "model_loading": {"model_id": MODEL}, "engine_kwargs": dict(engine)}
        return self.servers(count, config, self.work.python, {}, START_S)

    def servers(
        self, count: int, config: Mapping[str, Any], python: Path, variables: Mapping[str, str], within_s: float
    ) -> Replicas:
        """The same with an engine of any kind. Raises BenchError."""
        port, admin = free_ports(2)
        hosts = [next(self.hosts) for _ in range(count)]
        env = {**variables, "PIERHEAD_LLM_CONFIG": json.dumps(config)}
        command = [str(python), "-m", "pierhead.llm.server"]
        kept = [
            self.keep("replica", command, {**env, **self._env(SERVICE, host, port, admin)}, f"replica-{host}")
            for host in hosts
        ]
        for host in hosts:
            _wait_until_ready(f"{host}:{admin}", kept, within_s)
        return Replicas(
            kept,
            [f"unix:{self._socket(SERVICE, host)}" for host in hosts],
            [f"http://{host}:{admin}/metrics" for host in hosts],
        )

    def gateway(self, addresses: Sequence[str], policy: str, model: str = MODEL) -> tuple[str, str, list[Kept]]:
        """Start Discovery and a gateway for replicas that run; where it listens, its admin port, its processes."""
        discovery_port, port, admin = free_ports(3)
        host = next(self.hosts)
        told = [
            str(self.work.python), "-m", "tests.bench.llm.discovery", *addresses, "--port", str(discovery_port),
            "--service", SERVICE, "--policy", policy, "--max-ongoing-requests", str(MAX_ONGOING_REQUESTS),
        ]  # fmt: skip
        discovery = self.keep("discovery", told, {}, f"discovery-{host}")
        env = {
            **self._env("llm-gateway", host, port, admin),
            "PIERHEAD_DISCOVERY": f"127.0.0.1:{discovery_port}",
            "PIERHEAD_LLM_MODELS": json.dumps({model: SERVICE}),
        }
        gateway = self.keep("gateway", [str(self.work.python), "-m", "pierhead.llm.gateway"], env, f"gateway-{host}")
        kept = [gateway, discovery]
        _wait_until_ready(f"{host}:{admin}", kept)
        wait_for(lambda: model.encode() in get(f"http://{host}:{port}/v1/models")[1], "the gateway", START_S, kept)
        return f"{host}:{port}", str(admin), kept

    def haproxy(self, address: str, admin_port: str) -> tuple[str, Kept]:
        """Start HAProxy in front of a gateway; where it listens. There must be one: `work.haproxy`."""
        (port,) = free_ports(1)
        route = Route("llm-gateway", "/", int(address.rpartition(":")[2]), int(admin_port), [address])
        text = configuration(route, port, self.work.directory)
        socket = self._socket("llm-gateway", address.partition(":")[0])
        if Path(socket).exists():  # as on the stack
            text = text.replace(f" {address} id ", f" unix@{socket} id ")
            text = text.replace(f" port {admin_port} ", f" addr unix@{socket}.admin ")
        file = write(str(self.work.haproxy), self.work.directory, text)
        kept = self.keep("haproxy", [str(self.work.haproxy), "-W", "-db", "-f", str(file)], {})
        url = f"127.0.0.1:{port}"
        wait_for(lambda: get(f"http://{url}/v1/models")[0] == 200, "HAProxy has the gateway", START_S, [kept])
        return url, kept

    def _socket(self, service: str, host: str) -> str:
        return str(self.work.directory / f"{service}-{host}.socket")

    def _env(self, service: str, host: str, port: int, admin: int) -> dict[str, str]:
        memory = {
            "PIERHEAD_SHARED_MEMORY_BYTES": str(1 << 20), "PIERHEAD_SHARED_MEMORY_DIR": str(self.work.directory)
        }  # fmt: skip
        return (memory if self.shares_memory else {}) | {
            "PIERHEAD_SERVICE": service,
            "PIERHEAD_REPLICA": f"{service}-{host}",
            "PIERHEAD_HOST": host,
            "PIERHEAD_PORT": str(port),
            "PIERHEAD_ADMIN_PORT": str(admin),
            "PIERHEAD_SOCKET": self._socket(service, host),
            "PIERHEAD_ADMIN_SOCKET": f"{self._socket(service, host)}.admin",
            "PIERHEAD_MAX_ONGOING_REQUESTS": str(MAX_ONGOING_REQUESTS),
            "PIERHEAD_REQUEST_TIMEOUT_S": "120",
        }


@contextlib.contextmanager
def site(work: Workplace) -> Iterator[Site]:
    """A place to start processes in; at its end all of them end."""
    with contextlib.ExitStack() as stack:
        yield Site(work, stack)


@contextlib.contextmanager
def ours(work: Workplace, subject: str, engine: Mapping[str, Any]) -> Iterator[Running]:
    """One replica: alone (`floor`), behind a gateway, or behind HAProxy as well (`relayed`: without shared memory).

    Raises BenchError.
    """
    with site(work) as here:
        here.shares_memory = subject == "haproxy"
        replicas = here.replicas(1, engine)
        kept = [*replicas.kept]
        url = f"lane://{replicas.addresses[0]}"
        if subject != "floor":
            address, admin, more = here.gateway(replicas.addresses, "power_of_two")
            kept += more
            if subject in ("haproxy", "relayed"):
                address, haproxy = here.haproxy(address, admin)
                kept.append(haproxy)
            url = f"http://{address}"
        yield Running(url, kept)


@contextlib.contextmanager
def bare(work: Workplace, engine: Mapping[str, Any]) -> Iterator[Running]:
    """HAProxy, and the same packages with nothing of ours; `engine` is not asked for. Raises BenchError."""
    with site(work) as here:
        python = str(work.python)
        engine_port, port = free_ports(2)
        host = next(here.hosts)
        env = {"PIERHEAD_HOST": host, "PIERHEAD_PORT": str(engine_port)}
        replica = here.keep("replica", [python, "-m", "tests.bench.bare.llm_engine"], env)
        env = {"PIERHEAD_HOST": host, "PIERHEAD_PORT": str(port), "BARE_ENGINE": f"{host}:{engine_port}"}
        gateway = here.keep("gateway", [python, "-m", "tests.bench.bare.llm_gateway"], env)
        wait_for(lambda: get(f"http://{host}:{port}/readyz")[0] == 200, "the bare gateway", START_S, [replica, gateway])
        address, haproxy = here.haproxy(f"{host}:{port}", str(port))
        yield Running(f"http://{address}", [replica, gateway, haproxy])


@contextlib.contextmanager
def theirs(work: Workplace, engine: Mapping[str, Any]) -> Iterator[Running]:
    """Ray Serve LLM with the same engine. Raises BenchError."""
    config = {"engine": "mock", "model_loading": {"model_id": MODEL}, "engine_kwargs": dict(engine)}
    env = {
        "PEER_LLM_CONFIG": json.dumps(config),
        "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
        "RAYLLM_VLLM_ENGINE_CLS": "tests.bench.peer.llm_engine.MockedEngine",
        "PYTHONPATH": f"{ROOT / 'services' / 'runtime'}:{ROOT}",
    }
    subject = Subject(PEER.key, PEER.label, PEER.kind, env=tuple(env.items()))
    with peer.running(work, subject, "llm", "/v1/models") as running:
        yield running


def start_of(subject: str) -> Callable[[Workplace, Mapping[str, Any]], AbstractContextManager[Running]]:
    """What runs one of cases.SUBJECTS, given a workplace and the engine's arguments."""
    others = {"peer": theirs, "bare": bare}
    return others.get(subject) or (lambda work, engine: ours(work, subject, engine))


@dataclass(frozen=True)
class VLLM:
    """Where vLLM and its model are; `python -m tests.environments.vllm` makes them."""

    state: Path

    @classmethod
    def here(cls) -> VLLM:
        """This machine's. Raises BenchError where there is none."""
        found = cls(Path(os.environ.get("PIERHEAD_VLLM_STATE") or ROOT / ".state").resolve())
        if not (found.python.exists() and found.model.exists()):
            raise BenchError(
                f"no vLLM in {found.state}: run `python -m tests.environments.vllm`, or name another directory in "
                "PIERHEAD_VLLM_STATE"
            )
        return found

    @property
    def python(self) -> Path:
        """The interpreter that has it."""
        return self.state / "vllm" / "bin" / "python"

    @property
    def model(self) -> Path:
        """A directory."""
        return self.state / "models" / VLLM_MODEL

    @property
    def env(self) -> dict[str, str]:
        """Of both ways. How its threads are bound is left to vLLM: on two cores, the model has one of them."""
        path = f"{ROOT / 'services' / 'runtime'}:{ROOT}"
        return {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": path}


@contextlib.contextmanager
def both_vllms(work: Workplace) -> Iterator[dict[str, Running]]:
    """The same vLLM twice, by its way (cases.WAYS): both are loaded, and one generates. Raises BenchError."""
    vllm = VLLM.here()
    with site(work) as here:
        here.shares_memory = work.haproxy is not None
        config = {
            "engine": "vllm", "model_loading": {"model_id": VLLM_MODEL, "model_source": str(vllm.model)},
            "engine_kwargs": dict(VLLM_ENGINE),
        }  # fmt: skip
        replicas = here.servers(1, config, vllm.python, vllm.env, VLLM_START_S)
        address, admin, kept = here.gateway(replicas.addresses, "power_of_two", VLLM_MODEL)
        if work.haproxy is not None:
            address, haproxy = here.haproxy(address, admin)
            kept.append(haproxy)
        (port,) = free_ports(1)
        alone = here.keep("replica", vllm_serve(vllm, port), vllm.env, "vllm-serve")
        wait_for(lambda: get(f"http://127.0.0.1:{port}/health")[0] == 200, "vllm serve", VLLM_START_S, [alone])
        yield {
            "ours": Running(f"http://{address}", [*kept, *replicas.kept], _vllm_role),
            "alone": Running(f"http://127.0.0.1:{port}", [alone], _vllm_role),
        }


def vllm_serve(vllm: VLLM, port: int) -> list[str]:
    """Its command, with the arguments that our service has."""
    from pierhead.llm.server.engines.vllm.start import arguments

    command = [str(vllm.python), "-m", "vllm.entrypoints.cli.main", "serve", str(vllm.model), "--host", "127.0.0.1"]
    return [*command, "--port", str(port), "--served-model-name", VLLM_MODEL, *arguments(VLLM_ENGINE.items())]


def _vllm_role(role: str, process: psutil.Process) -> str:
    """The model's own processes apart from the one that takes requests."""
    return "engine" if process.name().startswith("VLLM::") else role


def _wait_until_ready(admin: str, kept: Sequence[Kept], within_s: float = START_S) -> None:
    wait_for(lambda: get(f"http://{admin}/readyz", timeout_s=2)[0] == 200, f"{admin} is ready", within_s, kept)
