"""A real HAProxy for tests: the image built from haproxy/, its run directory on this host, on a network of its own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from tests.harness.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
IMAGE = f"pierhead-test/haproxy:{os.getpid()}"
"""A name of this process alone: it is removed at the end, and another test run may need its own."""
LABELS = {"pierhead.test": "haproxy"}


def docker(*arguments: str) -> str:
    """Run one docker command; its output, or an error with what it said."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"docker {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def build(image: str = IMAGE, *options: str) -> str:
    """Build the image (a cached build takes a second) and give its name."""
    where = ("-t", image, "-f", str(ROOT / "haproxy/Dockerfile"), *options, str(ROOT))
    docker("build", "--network", "host", "--label", "pierhead.test=haproxy", *where)
    return image


@functools.cache
def own_network() -> Network:
    """A network of this process alone: Docker gives a killed container's address to the next one that starts."""
    network = Network(docker_network_kw={"labels": LABELS}).create()
    atexit.register(network.remove)
    return network


class HAProxyContainer(DockerContainer):
    """It runs in a `with` block. `ip` is its address, `gateway` this host's as it sees it."""

    def __init__(self, run_dir: Path, image: str = IMAGE, **options: Any) -> None:
        """`options`: more of docker's `containers.create`."""
        super().__init__(image, network=own_network(), volumes=[(str(run_dir), "/run/haproxy", "rw")])
        self.with_kwargs(restart_policy={"Name": "always"}, labels=LABELS, **options)
        self.run_dir = run_dir
        self.ip = self.gateway = ""

    def start(self) -> Self:
        """Also wait until it answers."""
        super().start()
        network = self._state()["NetworkSettings"]["Networks"][own_network().name]
        self.ip, self.gateway = network["IPAddress"], network["Gateway"]
        self.wait_until_up()
        return self

    def wait_until_up(self) -> None:
        """Wait until both sockets are there."""
        sockets = [self.run_dir / name for name in ("admin.sock", "master.sock")]
        eventually(lambda: all(map(_answers, sockets)), "HAProxy answers on its sockets")

    def kill_and_wait(self) -> None:
        """Kill its master, as a crash would, and wait until Docker has started it again."""
        before = self._state()["State"]
        os.kill(before["Pid"], signal.SIGKILL)
        eventually(lambda: self._state()["State"]["StartedAt"] != before["StartedAt"], "Docker starts HAProxy again")
        self.wait_until_up()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """In the block none of its processes runs, and the kernel continues to accept connections for them."""
        self.get_wrapped_container().pause()
        try:
            yield
        finally:
            self.get_wrapped_container().unpause()

    def end(self) -> int:
        """`docker stop` with 20 s of grace; its exit status, which is 137 where the grace was not enough."""
        self.get_wrapped_container().stop(timeout=20)
        return int(self._state()["State"]["ExitCode"])

    def log_lines(self) -> list[dict[str, object]]:
        """The access log: every line of its standard output must be JSON, but for what leaving workers say."""
        lines = self.get_logs()[0].decode().splitlines()
        return [json.loads(line) for line in lines if not re.fullmatch(r"Proxy \S+ stopped \(.*\)\.", line)]

    def _state(self) -> dict[str, Any]:
        self.reload()
        return self.get_wrapped_container().attrs


def _answers(path: Path) -> bool:
    """It connects and answers: the master replaces its socket once, right after its start."""
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):  # not there yet: the caller looks again
        client.settimeout(1)
        client.connect(str(path))
        client.sendall(b"help\n")
        client.shutdown(socket.SHUT_WR)
        return bool(client.recv(1))
    return False
