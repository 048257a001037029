"""haproxy/keepalived on three nodes: one address, which a node with a working edge always has."""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import haproxy_container, swarm_rig
from tests.harness.haproxy_container import docker
from tests.harness.swarm_rig import Node, SwarmRig
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.long]

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "haproxy" / "keepalived"
IMAGE = "pierhead-test/keepalived-node"
HEALTHY, UNHEALTHY = "status 200 content-type", "status 503 content-type"


class Requests:
    """One after the other, each on a connection of its own, until it is left and one more is answered."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._seen: list[tuple[float, float, bool]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Requests:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        left = time.monotonic()
        try:
            eventually(lambda: any(began > left and ok for began, _, ok in self._seen), "the address answers", 30)
        finally:
            self._over.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            connection = http.client.HTTPConnection(self._address, 8000, timeout=0.5)
            try:
                connection.request("GET", "/-/routes")
                is_answered = connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                is_answered = False
            connection.close()
            self._seen.append((began, time.monotonic(), is_answered))
            self._over.wait(0.02)

    def away_s(self) -> float:
        """The longest time between two answers."""
        answers = [(began, ended) for began, ended, is_answered in self._seen if is_answered]
        return max(later[1] - earlier[0] for earlier, later in itertools.pairwise(answers))


def execute(node: Node, *command: str) -> str:
    return docker("exec", node.container, *command)


class Address:
    def __init__(self, rig: SwarmRig) -> None:
        self.rig, self.ip = rig, f"{rig.subnet}.10"

    def keep(self, node: Node) -> None:
        """Start keepalived with the recipe."""
        text = (RECIPE / "keepalived.conf").read_text().replace("192.0.2.", f"{self.rig.subnet}.")
        (node.directory / "keepalived.conf").write_text(text.replace("preempt_delay 30", "preempt_delay 3"))
        execute(node, "mkdir", "-p", "/etc/keepalived")
        docker("cp", str(RECIPE / "check-edge.sh"), f"{node.container}:/etc/keepalived/")
        execute(node, "cp", "/rig/keepalived.conf", "/etc/keepalived/")
        command = "exec keepalived --dont-fork --log-console --log-detail >>/rig/keepalived.log 2>&1"
        docker("exec", "--detach", node.container, "sh", "-c", command)

    def holders(self) -> list[str]:
        up = [
            node for node in self.rig.nodes if docker("inspect", "-f", "{{.State.Running}}", node.container) == "true"
        ]
        return [node.name for node in up if execute(node, "ip", "-4", "-o", "address", "show", "to", self.ip)]

    def wait_until_at(self, name: str) -> None:
        eventually(lambda: self.holders() == [name], f"{name} has the address", 90)


@pytest.fixture(scope="module")
def address(docker_client: object) -> Iterator[Address]:
    haproxy = haproxy_container.build()
    swarm_rig.build_or_skip()
    swarm_rig.build(IMAGE, ROOT / "tests" / "harness" / "keepalived_node", "--build-arg", f"NODE={swarm_rig.IMAGE}")
    try:
        with SwarmRig(nodes=3, managers=3, image=IMAGE).running([haproxy]) as rig:
            port = "mode=host,target=8000,published=8000"
            rig.nodes[0].cli("service", "create", "--mode", "global", "--publish", port, "--name", "edge", haproxy)
            made = Address(rig)
            for node in rig.nodes:
                made.keep(node)
            yield made
    finally:
        docker("image", "rm", "--force", haproxy)


def edge(node: Node) -> str:
    return eventually(lambda: node.cli("ps", "--quiet", "--filter", "name=edge"), f"{node.name} has an edge")


def answer(node: Node, status: str) -> None:
    """Let a node's edge call itself healthy, or say that it reaches no replica."""
    change = f"sed -i 's/status ... content-type\\(.*-.healthz\\)/{status}\\1/' /run/haproxy/haproxy.cfg"
    master = "$(grep -lx haproxy /proc/[0-9]*/comm | sort -V | head -1 | cut -d/ -f3)"
    node.cli("exec", edge(node), "sh", "-c", f"{change}; kill -USR2 {master}")


def test_the_address_is_always_at_a_node_whose_edge_works(address: Address) -> None:
    first = address.rig.nodes[0]
    address.wait_until_at("n1")

    def power_on() -> None:
        first.power_on()
        address.keep(first)

    failures: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "its HAProxy is killed": (lambda: first.cli("kill", edge(first)), lambda: "Swarm starts it again"),
        "its HAProxy hangs": (lambda: first.cli("pause", edge(first)), lambda: first.cli("unpause", edge(first))),
        "its HAProxy reaches no replica": (lambda: answer(first, UNHEALTHY), lambda: answer(first, HEALTHY)),
        "it is powered off": (first.power_off, power_on),
    }
    for what, (begin, end) in failures.items():
        with Requests(address.ip) as requests:
            begin()
            address.wait_until_at("n2")
        with Requests(address.ip) as after:
            end()
            address.wait_until_at("n1")
        print(f"{what}: no answer for {requests.away_s():.1f} s; on the way back {after.away_s():.2f} s")


def test_the_address_stays_where_no_edge_reaches_a_replica(address: Address) -> None:
    nodes = address.rig.nodes

    def may_have_it(node: Node) -> bool:
        check = ["/etc/keepalived/check-edge.sh", *(one.ip for one in nodes)]
        return node.run(*check).returncode == 0

    answer(nodes[0], UNHEALTHY)
    eventually(lambda: not may_have_it(nodes[0]), "another edge is better")
    for node in nodes[1:]:
        answer(node, UNHEALTHY)
    eventually(lambda: all(map(may_have_it, nodes)), "every edge is as good as the others")
