"""A real HAProxy for tests: the image built from haproxy/, its run directory on this host, on a network of its own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.harness.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
IMAGE = f"pierhead-test/haproxy:{os.getpid()}"
"""A name of this process alone: it is removed at the end, and another test run may need its own."""
LABEL = "pierhead.test=haproxy"


def docker(*arguments: str, check: bool = True, with_errors: bool = False) -> str:
    """Run one docker command; its output (and what it wrote to standard error), or an error with what it said."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=300, check=False)
    if check and done.returncode:
        raise RuntimeError(f"docker {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return (done.stdout + (done.stderr if with_errors else "")).strip()


def build(image: str = IMAGE, *options: str) -> str:
    """Build the image (a cached build takes a second) and give its name."""
    file = str(ROOT / "haproxy/Dockerfile")
    docker("build", "--network", "host", "--label", LABEL, "-t", image, "-f", file, *options, str(ROOT))
    return image


@functools.cache
def own_network() -> str:
    """A network of this process alone: Docker gives a killed container's address to the next one that starts."""
    name = f"pierhead-test-haproxy-{os.getpid()}"
    docker("network", "create", "--label", LABEL, name)
    atexit.register(docker, "network", "rm", name, check=False)
    return name


class HAProxyContainer:
    """One running container; `ip` is its address, `gateway` this host's as it sees it."""

    def __init__(self, run_dir: Path, image: str = IMAGE, *options: str) -> None:
        """`options`: more of `docker run`."""
        self._image, self._options = image, options
        self.name = f"pierhead-test-haproxy-{secrets.token_hex(3)}"
        self.run_dir = run_dir
        self.ip = self.gateway = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[HAProxyContainer]:
        """Start it, wait until it answers, remove it at the end."""
        mount = f"{self.run_dir}:/run/haproxy"
        names = ("--name", self.name, "--label", LABEL, "--volume", mount, "--network", own_network())
        docker("run", "--detach", "--restart=always", *names, *self._options, self._image)
        try:
            network = json.loads(self._inspect("{{json .NetworkSettings.Networks}}"))[own_network()]
            self.ip, self.gateway = network["IPAddress"], network["Gateway"]
            self.wait_until_up()
            yield self
        finally:
            docker("rm", "--force", "--volumes", self.name, check=False)

    def wait_until_up(self) -> None:
        """Wait until both sockets are there."""
        sockets = [self.run_dir / name for name in ("admin.sock", "master.sock")]
        eventually(lambda: all(map(_answers, sockets)), "HAProxy answers on its sockets")

    def kill_and_wait(self) -> None:
        """Kill its master, as a crash would, and wait until Docker has started it again."""
        started = self._inspect("{{.State.StartedAt}}")
        os.kill(int(self._inspect("{{.State.Pid}}")), signal.SIGKILL)
        eventually(lambda: self._inspect("{{.State.StartedAt}}") != started, "Docker starts HAProxy again")
        self.wait_until_up()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Meanwhile none of its processes runs, and the kernel goes on accepting connections for them."""
        docker("pause", self.name)
        try:
            yield
        finally:
            docker("unpause", self.name)

    def stop(self) -> int:
        """`docker stop` with 20 s of grace; its exit status, which is 137 where the grace was not enough."""
        docker("stop", "--time", "20", self.name)
        return int(self._inspect("{{.State.ExitCode}}"))

    def log_lines(self) -> list[dict[str, object]]:
        """The access log: every line of its standard output must be JSON, but for what leaving workers say."""
        done = subprocess.run(["docker", "logs", self.name], capture_output=True, text=True, timeout=60, check=True)
        lines = done.stdout.splitlines()
        return [json.loads(line) for line in lines if not re.fullmatch(r"Proxy \S+ stopped \(.*\)\.", line)]

    def _inspect(self, template: str) -> str:
        return docker("inspect", "-f", template, self.name)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):  # not there yet: the caller looks again
        client.settimeout(1)
        client.connect(str(path))
        return True
    return False
