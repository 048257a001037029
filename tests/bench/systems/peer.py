"""Ray Serve on this host: with every flag that its makers name for throughput and HAProxy in front, or as it comes."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.bench.cases import Subject
from tests.bench.processes import ROOT, Kept, free_ports, get, wait_for
from tests.bench.systems.running import Running, Workplace

START_S = 180.0

FLAGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_HAPROXY_TCP_NODELAY": "1",
}


@contextlib.contextmanager
def running(work: Workplace, subject: Subject, name: str, path: str) -> Iterator[Running]:
    """Start Ray with the application `name` and wait until it answers `path`. Raises BenchError."""
    directory = work.directory / "r"  # short: sockets below it may have paths of 97 bytes
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "h").mkdir(parents=True)
    http, *others = free_ports(5)
    command = [str(work.peer_python), "-m", "tests.bench.peer.launch", name, "--port", str(http)]
    command += ["--directory", str(directory)]
    env = {**_places(directory / "h", others), **_application(work, subject), **dict(subject.env)}
    if subject.kind == "peer":
        env |= FLAGS
    # Nothing of it needs a graceful end: every process of its tree is killed.
    kept = Kept("peer", command, env, work.directory / "peer.log", grace_s=0)
    try:
        url = f"http://127.0.0.1:{http}"
        wait_for(
            lambda: "\nready" in kept.log.read_text(errors="replace"), "the peer's application runs", START_S, [kept]
        )
        wait_for(lambda: get(url + path)[0] == 200, f"the peer answers {path}", START_S, [kept])
        remote = {"remote": f"http://{work.seen_from_elsewhere}:{http}"} if work.seen_from_elsewhere else {}
        yield Running(url, [kept], classify, ways=remote)
    finally:
        kept.stop()
        shutil.rmtree(directory, ignore_errors=True)


def classify(role: str, process: psutil.Process) -> str:
    """The replicas and HAProxy in our words; "ray": controller, raylet, and without HAProxy its Python proxy."""
    if process.name() == "haproxy":
        return "haproxy"
    title = " ".join(process.cmdline()[:1])
    if title.startswith("ray::ServeReplica"):
        return "ingress" if "Ingress" in title else "child"
    return "ray"


def _places(directory: Path, ports: list[int]) -> dict[str, str]:
    """Files and ports of its own: a bench must not meet a Ray or a stack that runs on the same machine."""
    stats, metrics, fallback_http, fallback_grpc = map(str, ports)
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{directory}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{directory}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{directory}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{directory}/server-state",
        "RAY_SERVE_HAPROXY_STATS_PORT": stats,
        "RAY_SERVE_HAPROXY_METRICS_PORT": metrics,
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": fallback_http,
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": fallback_grpc,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": "",
    }


def _application(work: Workplace, subject: Subject) -> dict[str, str]:
    return {
        "PEER_REPLICAS": str(subject.replicas or 1),
        "PYTHONPATH": str(ROOT),
        "PEER_DEVICE": work.device,
        "PEER_TORCH_THREADS": str(work.torch_threads),
    }
