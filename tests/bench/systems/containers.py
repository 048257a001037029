"""Our services as users run them: a stack of its own as `make up` starts it, with controller and Prometheus.

`bare`: the same chain with nothing of ours, in containers, too. The images are those of PIERHEAD_TAG
(tests/bench/prepare.py builds them).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import yaml
from docker.models.containers import Container

from tests.bench.cases import TRITON, Subject
from tests.bench.processes import ROOT, BenchError, Member, free_ports, get, members_of
from tests.bench.systems.ours import ALONE, Chain, Service, chain_of
from tests.bench.systems.running import Running, Workplace, own_role
from tests.harness import certificates
from tests.harness.stack import Stack, address_of
from tests.harness.waiting import eventually

PROJECT = "pierhead-bench"
BARE_FILE = "tests/bench/bare/compose.yaml"
START_S = 180.0
HAPROXY_PORT = 8000

ENGINE = {
    "dockerd": "dockerd",
    "containerd": "containerd",
    "containerd-shim": "containerd",
    "docker-proxy": "docker-proxy",
}
"""The engine's processes, by the first 15 characters of their names, and their roles."""


@contextlib.contextmanager
def running(work: Workplace, subject: Subject, name: str, path: str) -> Iterator[Running]:
    """Start a stack with the chain `name` alone and wait until it answers `path`. Raises BenchError."""
    chain = chain_of(subject, name)
    app = "triton" if subject is TRITON else "recsys" if name == "dlrm" else "echo"
    app_file = ROOT / "compose" / "apps" / f"{app}.yaml"
    file = ROOT / ".state" / "bench" / "override.yaml"  # within the clone: the controller reads it, too
    file.parent.mkdir(parents=True, exist_ok=True)
    services = yaml.safe_load(app_file.read_text())["services"]
    file.write_text(yaml.safe_dump(override(chain, subject, services)))
    files = [str(each.relative_to(ROOT)) for each in (app_file, file)]
    if work.device == "cuda" and name == "dlrm":
        files.append(f"compose/gpu-{app}.yaml")
    words = {"PIERHEAD_BIND": "0.0.0.0", **dict(subject.stack)}
    if subject.has_tls:
        words |= _with_tls(file.parent)
        files.append("compose/tls.yaml")
    stack = Stack(PROJECT, files, words)
    at = f"https://127.0.0.1:{words['PIERHEAD_HTTPS_PORT']}" if subject.has_tls else stack.url("")
    try:
        with _as_bench_errors():
            stack.down()  # of a run that was killed
            stack.up()
            stack.wait_settled(START_S, **{each.name: each.replicas for each in (chain.ingress, chain.child)})
            headers = _with_key(stack) if subject.has_key else {}
            eventually(lambda: get(f"{at}{path}", headers=headers)[0] == 200, f"{subject.key} answers {path}", START_S)
            found = _running(work, stack, chain)
        yield replace(found, url=at, headers=headers)
    finally:
        with _as_bench_errors():
            stack.down()
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def bare(work: Workplace, subject: Subject, name: str, path: str) -> Iterator[Running]:
    """Start the echo's chain with nothing of ours and wait until it answers `path`. Raises BenchError."""
    stack = Stack(f"{PROJECT}-bare", [], {"COMPOSE_FILE": BARE_FILE})
    try:
        with _as_bench_errors():
            stack.down()  # of a run that was killed
            stack.up()
            eventually(lambda: get(stack.url(path))[0] == 200, f"{subject.key} answers {path}", START_S)
            containers = {role: [stack.container(role)] for role in ("haproxy", "ingress", "child")}
            found = _observed(stack, containers, {"alone": stack.url(ALONE)})
        yield found
    finally:
        with _as_bench_errors():
            stack.down()


def override(chain: Chain, subject: Subject, services: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A Compose file that gives each service the chain's number of replicas and the variant's settings.

    `services`: as the application's own file has them. Compose replaces x-serve blocks as a whole, so they are whole.
    """

    def block(service: Service) -> dict[str, Any]:
        written = {key: value for key, value in services[service.name]["x-serve"].items() if key != "autoscale"}
        return {
            **written,
            "replicas": service.replicas,
            **({"auth": "key"} if subject.has_key and service is chain.ingress else {}),
        }

    return {
        "services": {
            service.name: {"x-serve": block(service), "environment": dict(subject.env)}
            for service in (chain.ingress, chain.child)
        }
    }


def _with_tls(directory: Path) -> dict[str, str]:
    """Words of .env for HTTPS with a certificate of its own."""
    certificates.write(directory / "tls" / "bench.pem", *certificates.made("localhost", now=time.time()))
    port = str(free_ports(1)[0])
    return {"PIERHEAD_TLS": "files", "PIERHEAD_TLS_DIR": str(directory / "tls"), "PIERHEAD_HTTPS_PORT": port}


def _with_key(stack: Stack) -> dict[str, str]:
    """The header of a client, with a limit that it does not reach."""
    done = stack.pierhead("keys", "create", "bench", "--per-minute", "100000000")
    assert done.returncode == 0, done.stderr
    return {"x-api-key": done.stdout.strip()}


def _running(work: Workplace, stack: Stack, chain: Chain) -> Running:
    haproxy, ingresses = stack.container("haproxy"), stack.replicas(chain.ingress.name)
    port = stack.ports["PIERHEAD_HTTP_PORT"]
    ways = {
        "address": f"http://{address_of(haproxy)}:{HAPROXY_PORT}",
    }
    if work.seen_from_elsewhere:
        ways["remote"] = f"http://{work.seen_from_elsewhere}:{port}"
    containers = {
        "haproxy": [haproxy],
        "controller": [stack.container("controller")],
        "prometheus": [stack.container("prometheus")],
        "ingress": list(ingresses.values()),
        "child": list(stack.replicas(chain.child.name).values()),
    }
    return _observed(stack, containers, ways)


def _observed(stack: Stack, containers: Mapping[str, Sequence[Container]], ways: Mapping[str, str]) -> Running:
    # Asked now: the engine's own work for these answers is not to be measured.
    roots = [
        (role, psutil.Process(int(each.attrs["State"]["Pid"]))) for role, found in containers.items() for each in found
    ]
    engine = engine_processes()
    return Running(
        stack.url(""),
        [],
        ways=ways,
        way_in=way_in(any(role == "docker-proxy" for role, _ in engine)),
        extra=lambda: [*engine, *roots, *members_of(roots, own_role)],
    )


def engine_processes() -> list[Member]:
    """The engine's processes with their roles."""
    return [
        (ENGINE[name], process)
        for process in psutil.process_iter(["name"])
        if (name := str(process.info["name"])[:15]) in ENGINE
    ]


def way_in(proxied: bool) -> str:
    """How requests reach HAProxy, in words."""
    local = (
        "docker-proxy, a process of the engine's" if proxied else 'iptables (the engine has "userland-proxy": false)'
    )
    return f"connections of this machine to 127.0.0.1 come by {local}, those of another network namespace by iptables"


@contextlib.contextmanager
def _as_bench_errors() -> Iterator[None]:
    """The test harness says what is wrong with assertions."""
    try:
        yield
    except (AssertionError, OSError, psutil.NoSuchProcess) as error:
        raise BenchError(f"the stack of MODE=containers: {error}") from error
