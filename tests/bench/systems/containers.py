"""Our services as users run them: a stack of its own on this machine's Docker Engine, with controller and Prometheus.

HAProxy is addressed by its container's address: a published port that is reached over loopback passes Docker's
user-space proxy. The images (tag "bench") are built by compose/machine/bench.sh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import yaml

from tests.bench.cases import APPS, Subject
from tests.bench.processes import ROOT, BenchError, Member, get
from tests.bench.systems.ours import CHAINS, Chain
from tests.bench.systems.running import Running, Workplace
from tests.harness.stack import Stack
from tests.harness.waiting import eventually

PROJECT = "pierhead-bench"
TAG = "bench"
START_S = 180.0
HAPROXY_PORT, INGRESS_PORT, GRPC_PORT = 8000, 8080, 50051

X_SERVE = {
    "PIERHEAD_RUN_USER_CODE_IN_SEPARATE_THREAD": "run_user_code_in_separate_thread",
}
"""Variables that the controller sets from x-serve keys; the others are set as any user sets them."""

ENGINE_PROCESSES = {"dockerd", "containerd", "containerd-shim-runc-v2", "containerd-shim"}


@contextlib.contextmanager
def running(work: Workplace, subject: Subject, app: str) -> Iterator[Running]:
    """Start a stack with the application alone and wait until it answers. Raises BenchError."""
    chain = CHAINS[subject.kind, app]
    app_file = ROOT / "compose" / "apps" / ("recsys.yaml" if app == "dlrm" else "echo.yaml")
    file = ROOT / ".state" / "bench" / "override.yaml"  # within the clone: the controller reads it, too
    file.parent.mkdir(parents=True, exist_ok=True)
    services = yaml.safe_load(app_file.read_text())["services"]
    file.write_text(yaml.safe_dump(override(chain, subject, services)))
    files = [str(each.relative_to(ROOT)) for each in (app_file, file)]
    if work.device == "cuda":
        files.append("compose/gpu-recsys.yaml")
    env = {"PIERHEAD_TAG": TAG, "PIERHEAD_TORCH_THREADS": str(work.torch_threads)}
    stack = Stack(PROJECT, files, env)
    try:
        with _as_bench_errors():
            stack.down()  # of a run that was killed
            stack.up()
            url = _wait_until_it_answers(stack, chain, subject, APPS[app].path.replace("{user_id}", "1"))
            child = f"{_address(stack, chain.child.name)}:{GRPC_PORT}" if chain.child else ""
        yield Running(url, [], grpc_address=child, extra=lambda: members(stack, chain))
    finally:
        with _as_bench_errors():
            stack.down()
        file.unlink(missing_ok=True)


def override(chain: Chain, subject: Subject, services: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A Compose file that gives each service the chain's number of replicas and the variant's settings.

    `services`: as the application's own file has them. Compose replaces x-serve blocks as a whole, so they are whole.
    """
    changed: dict[str, Any] = {}
    for service in (chain.ingress, chain.child):
        if service is None:
            continue
        serve = {**services[service.name]["x-serve"], "replicas": service.replicas}
        environment: dict[str, str] = {}
        for name, value in subject.env_of(service.role).items():
            if name in X_SERVE:
                serve[X_SERVE[name]] = yaml.safe_load(value)  # a number or a truth, as it would stand in the file
            else:
                environment[name] = value
        changed[service.name] = {"x-serve": serve, **({"environment": environment} if environment else {})}
    return {"services": changed}


def _wait_until_it_answers(stack: Stack, chain: Chain, subject: Subject, path: str) -> str:
    wanted = {service.name: service.replicas for service in (chain.ingress, chain.child) if service}
    stack.wait_settled(START_S, **wanted)
    if subject.haproxy:
        url = f"http://{_ip(stack.container('haproxy').attrs)}:{HAPROXY_PORT}"
    else:
        url = f"http://{_address(stack, chain.ingress.name)}:{INGRESS_PORT}"
    eventually(lambda: get(url + path)[0] == 200, f"{subject.key} answers {path}", START_S)
    return url


def _address(stack: Stack, service: str) -> str:
    """The address of a service's first replica."""
    replicas = stack.replicas(service)
    return _ip(replicas[min(replicas)].attrs)


def _ip(attrs: Mapping[str, Any]) -> str:
    networks = attrs["NetworkSettings"]["Networks"].values()
    return next(str(network["IPAddress"]) for network in networks if network["IPAddress"])


def members(stack: Stack, chain: Chain) -> list[Member]:
    """The processes of every container by role; "rest" is the controller, Prometheus and the engine itself."""
    roots = {
        "haproxy": [stack.container("haproxy")],
        "rest": [stack.container("controller"), stack.container("prometheus")],
    }
    for service in (chain.ingress, chain.child):
        if service is not None:
            roots[service.role] = list(stack.replicas(service.name).values())
    found = [
        (role, process) for role, containers in roots.items() for each in containers for process in _tree(each.attrs)
    ]
    engine = [process for process in psutil.process_iter(["name"]) if process.info["name"] in ENGINE_PROCESSES]
    return found + [("rest", process) for process in engine]


def _tree(attrs: Mapping[str, Any]) -> list[psutil.Process]:
    try:
        root = psutil.Process(int(attrs["State"]["Pid"]))
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def _as_bench_errors() -> Iterator[None]:
    """The test harness says what is wrong with assertions."""
    try:
        yield
    except (AssertionError, OSError) as error:
        raise BenchError(f"the stack of MODE=containers: {error}") from error
