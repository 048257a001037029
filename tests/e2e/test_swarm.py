"""A stack on a Swarm of three nodes: `make up` and `make down`, typed on the first one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.harness import swarm_rig
from tests.harness.stack import Answer, request
from tests.harness.swarm_rig import Node, SwarmRig
from tests.harness.waiting import eventually

TAG = os.environ.get("PIERHEAD_TAG", "latest")
NAMES = ("haproxy-node", "controller", "prometheus", "registry", "echo", "echo-child")
IMAGES = [f"pierhead/{name}:{TAG}" for name in NAMES]
PROJECT = "rig"

pytestmark = [pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(900)]
VARIABLES = {
    "PIERHEAD_ENGINE": "swarm",
    "PIERHEAD_REGISTRY": "here",
    "PIERHEAD_TAG": TAG,
    "PIERHEAD_BUILD": "0",
    "COMPOSE_PROJECT_NAME": PROJECT,
    "COMPOSE_FILE": "compose/compose.yaml:compose/apps/echo.yaml",
    "COMPOSE_PROFILES": "",
}


@pytest.fixture(scope="module")
def rig() -> Iterator[SwarmRig]:
    swarm_rig.build()
    if reason := swarm_rig.missing():
        pytest.skip(reason)
    files = {"COMPOSE_FILE": "compose/swarm.yaml", "COMPOSE_PROFILES": "registry", "PIERHEAD_TAG": TAG}
    build = ["docker", "compose", "build", "--quiet", "haproxy", "registry"]
    subprocess.run(build, cwd=swarm_rig.ROOT, env={**os.environ, **files}, check=True, timeout=600)
    with SwarmRig(nodes=3, managers=1).running([], only_first=IMAGES) as running:
        yield running


def make(node: Node, script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """What `make` does for a target."""
    return node.run(f"compose/machine/{script}.sh", *arguments, **VARIABLES, **more)


def asked(node: Node, path: str) -> Answer:
    """What a client gets at a node."""
    return request(f"http://{node.ip}:8000{path}")


def left(node: Node) -> list[str]:
    """What a node has of the stack."""
    mine = [f"label=com.docker.stack.namespace={PROJECT}", f"label=pierhead.project={PROJECT}"]
    found = [node.cli("ps", "--all", "--quiet", "--filter", one) for one in mine]
    found += [node.cli("network", "ls", "--quiet", "--filter", mine[0])]
    if node.name == "n1":
        found += [node.cli(kind, "ls", "--quiet") for kind in ("service", "config", "secret")]
    return [line for lines in found for line in lines.split()]


def test_up_answers_at_every_node_and_down_leaves_nothing(rig: SwarmRig) -> None:
    first = rig.nodes[0]
    done = make(first, "up")
    assert done.returncode == 0, done.stdout + done.stderr
    for node in rig.nodes:
        eventually(lambda node=node: asked(node, "/echo?message=hi").status == 200, f"{node.name} answers")  # type: ignore[misc]
    done = make(first, "control", "scale", "echo", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    done = make(first, "down")
    assert done.returncode == 0, done.stdout + done.stderr
    for node in rig.nodes:
        eventually(lambda node=node: left(node) == [], f"{node.name} has nothing of it")  # type: ignore[misc]
