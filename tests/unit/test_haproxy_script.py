"""haproxy/entrypoint.sh, with a stand-in for HAProxy: which file one of many nodes starts with. And Swarm's check."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from controller.routing.haproxy_config import render
from controller.routing.haproxy_text import ServerLine, with_epoch, with_servers
from tests.harness.edge import service
from tests.harness.imports import ROOT

SCRIPT = (ROOT / "haproxy/entrypoint.sh").read_text()
HAPROXY = '#!/bin/sh\nfor file; do :; done\n[ "$1" = -q ] || cp "$file" @@/started\n'
AGENT = "#!/bin/sh\nexec sleep 60\n"
BAKED_IN = "no routes yet\n"
KEPT = with_servers(
    with_epoch(render([service("web")], is_remote=True), 9), [ServerLine("svc_web", "shop-web-1", "10.0.1.9:80", 1)]
)


class ComposeLoader(yaml.SafeLoader):
    """Knows Compose's tags, such as !reset."""


ComposeLoader.add_multi_constructor("!", lambda loader, suffix, node: None)


class Edge:
    """Runs the script, with the volume and what the image has in a directory of the test."""

    def __init__(self, place: Path) -> None:
        self.place, self.volume = place, place / "run"
        for directory in ("run", "bin", "boot", "local/lib/pierhead", "local/etc/haproxy"):
            (place / directory).mkdir(parents=True)
        (place / "local/etc/haproxy/edge.cfg").write_text(BAKED_IN)
        for name, text in {"haproxy": HAPROXY, "python3": AGENT, "entrypoint": SCRIPT}.items():
            file = place / "bin" / name
            for path, own in {"/run/haproxy": "run", "/usr/local": "local", "/proc/sys/kernel/random": "boot"}.items():
                text = text.replace(path, str(place / own))
            file.write_text(text.replace("@@", str(place)))
            file.chmod(0o755)

    def starts(self, service: str, boot: str = "1") -> str:
        """The file that HAProxy starts with, as a task of that service of Swarm's, after that start of the machine."""
        (self.place / "boot" / "boot_id").write_text(f"{boot}\n")
        env = {"PATH": f"{self.place}/bin:{os.environ['PATH']}", "PIERHEAD_SERVICE_ID": service}
        script = str(self.place / "bin" / "entrypoint")
        with subprocess.Popen(["sh", script], env=env, start_new_session=True) as process:
            try:
                assert process.wait(60) == 0
            finally:
                os.killpg(process.pid, signal.SIGKILL)
        return (self.place / "started").read_text()


@pytest.fixture
def edge(tmp_path: Path) -> Edge:
    return Edge(tmp_path)


def test_an_edge_starts_with_the_file_on_its_volume_unless_that_is_of_another_stack(edge: Edge) -> None:
    """After `down` and `up`, or in another Swarm, epochs begin again, and addresses are those of other replicas."""
    assert edge.starts("first") == BAKED_IN
    for name, text in {"haproxy.cfg": KEPT, "keys.map": "secret shop\n"}.items():
        (edge.volume / name).write_text(text)
    assert (edge.starts("first"), (edge.volume / "keys.map").read_text()) == (KEPT, "secret shop\n")
    assert (edge.starts("second"), (edge.volume / "keys.map").read_text()) == (BAKED_IN, "")
    (edge.volume / "haproxy.cfg").write_text(KEPT)
    assert edge.starts("second") == KEPT


def test_a_file_of_a_former_build_stays(edge: Edge) -> None:
    (edge.volume / "haproxy.cfg").write_text(KEPT)
    assert edge.starts("first") == KEPT
    assert edge.starts("second") == BAKED_IN


def test_after_a_start_of_the_machine_requests_wait_until_the_controller_has_set_the_servers(edge: Edge) -> None:
    """Swarm has given replicas other addresses, and those in the file perhaps to replicas of other services."""
    (edge.volume / "haproxy.cfg").write_text(KEPT)
    assert edge.starts("first", "1") == KEPT
    assert edge.starts("first", "2") == with_servers(KEPT, []) != KEPT
    (edge.volume / "haproxy.cfg").write_text(KEPT)
    assert edge.starts("first", "2") == KEPT
    (edge.volume / "haproxy.cfg").unlink()
    assert edge.starts("first", "3") == BAKED_IN


@contextlib.contextmanager
def flooded() -> Iterator[int]:
    """A port at which as many connections wait for its program as may: the kernel does not answer further ones."""
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # more than may wait
            client = ends.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@contextlib.contextmanager
def answering(status: str) -> Iterator[int]:
    """A port at which each request gets this."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client, client.makefile("rb") as lines:
                        while lines.readline().strip():  # bash sends line by line; a close before the last one resets
                            pass
                        client.sendall(f"HTTP/1.0 {status}\r\n\r\n".encode())

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def check(http: int, statistics: int) -> bool:
    """What Swarm finds of a HAProxy with these ports. It allows 3 s; an attempt to connect may take minutes."""
    service = yaml.load((ROOT / "compose/swarm.yaml").read_text(), ComposeLoader)["services"]["haproxy"]  # noqa: S506 - safe
    command = service["healthcheck"]["test"][1:]
    command[-1] = command[-1].replace("$$", "$").replace("8000", str(http)).replace("8404", str(statistics))
    return subprocess.run(command, timeout=60, check=False).returncode == 0


def test_swarm_replaces_a_haproxy_that_hangs_and_not_one_that_is_flooded() -> None:
    with flooded() as full, answering("200 OK") as ok, answering("308 Permanent Redirect") as redirects:
        assert check(ok, full)
        assert check(redirects, full)
        assert check(full, ok)
        assert not check(full, full)
