"""A stack on a Swarm of three nodes: `make up`, `deploy`, `down`, typed on the first one."""

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
VARIABLES = {
    "PIERHEAD_ENGINE": "swarm",
    "PIERHEAD_REGISTRY": "here",
    "PIERHEAD_TAG": TAG,
    "PIERHEAD_BUILD": "0",
    "COMPOSE_PROJECT_NAME": PROJECT,
    "COMPOSE_FILE": "compose/compose.yaml:compose/apps/echo.yaml:tests/e2e/apps/notes.yaml",
    "COMPOSE_PROFILES": "",
}

pytestmark = [pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def rig() -> Iterator[SwarmRig]:
    """Three nodes. Only the first one has the images: the others pull them."""
    swarm_rig.build()
    if reason := swarm_rig.missing():
        pytest.skip(reason)
    files = {"COMPOSE_FILE": "compose/swarm.yaml", "COMPOSE_PROFILES": "registry", "PIERHEAD_TAG": TAG}
    build = ["docker", "compose", "build", "--quiet", "haproxy", "registry"]
    subprocess.run(build, cwd=swarm_rig.ROOT, env={**os.environ, **files}, check=True, timeout=600)
    with SwarmRig(nodes=3, managers=1).running([], only_first=IMAGES) as running:
        yield running


@pytest.fixture
def first(rig: SwarmRig) -> Iterator[Node]:
    """The node on which commands are typed; no stack is left there."""
    yield rig.nodes[0]
    if left(rig):
        done = run(rig.nodes[0], "down", "1", "1")
        assert done.returncode == 0, done.stdout + done.stderr


def run(node: Node, script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """What `make` does for a target."""
    return node.run(f"compose/machine/{script}.sh", *arguments, **{**VARIABLES, **more})


def succeed(node: Node, script: str, *arguments: str) -> str:
    done = run(node, script, *arguments)
    print(done.stdout, done.stderr)  # the times of the steps
    assert done.returncode == 0
    return done.stdout


def asked(node: Node, path: str, port: int = 8000) -> Answer:
    """What a client gets at a node."""
    return request(f"http://{node.ip}:{port}{path}")


def tasks(node: Node) -> list[str]:
    """The containers that run for the stack's own services."""
    return sorted(node.cli("service", "ps", "--quiet", *node.cli("stack", "services", "-q", PROJECT).split()).split())


def nothing_is_left(rig: SwarmRig) -> bool:
    found = left(rig)
    assert not found, found
    return True


def left(rig: SwarmRig) -> list[str]:
    """What the nodes have of the stack."""
    stack, replicas = f"label=com.docker.stack.namespace={PROJECT}", f"label=pierhead.project={PROJECT}"
    found = [rig.nodes[0].cli(kind, "ls", "--quiet") for kind in ("service", "config", "secret")]
    for node in rig.nodes:
        found += [
            node.cli("ps", "--all", "--filter", one, "--format", "{{.Names}} {{.Status}}") for one in (stack, replicas)
        ]
        found += [node.cli(kind, "ls", "--filter", stack, "--format", "{{.Name}}") for kind in ("network", "volume")]
    return [line for lines in found for line in lines.split("\n") if line]


def test_every_node_answers_a_deployment_rolls_out_and_down_leaves_nothing(rig: SwarmRig, first: Node) -> None:
    succeed(first, "up")
    for node in rig.nodes:
        assert asked(node, "/echo?message=hi").json == {"response": "Echo: hi"}, node.name
    text = (swarm_rig.ROOT / "tests/e2e/apps/notes.txt").read_bytes()
    eventually(lambda: asked(rig.nodes[1], "/notes.txt", 7777).body == text, "the service without x-serve has its file")

    before = tasks(first)
    assert "echo: 4 of 4 ready" in succeed(first, "control", "scale", "echo", "4")
    succeed(first, "up")
    assert tasks(first) == before, "a second up starts nothing anew"

    newer = f"FROM pierhead/echo:{TAG}\nLABEL newer=yes\n"
    first.run("sh", "-c", f"printf '{newer}' | docker build --quiet --tag pierhead/echo:{TAG} -").check_returncode()
    assert "version" in succeed(first, "control", "deploy", "echo")
    for node in rig.nodes:
        assert asked(node, "/echo?message=hi").status == 200, node.name

    succeed(first, "down", "1")
    eventually(lambda: nothing_is_left(rig), "no node has anything of it")


def test_an_up_that_was_killed_and_another_clones_stack(rig: SwarmRig, first: Node) -> None:
    killed = first.run("timeout", "--signal", "KILL", "6", "compose/machine/up.sh", **VARIABLES)
    assert killed.returncode != 0
    assert left(rig) != []
    first.cli("service", "update", "--quiet", "--label-add", "pierhead.clone=/elsewhere", f"{PROJECT}_registry")
    for script in ("up", "down"):
        refused = run(first, script)
        assert refused.returncode != 0
        assert "runs on this Swarm from another clone: /elsewhere" in refused.stderr
    broken = {**VARIABLES, "COMPOSE_FILE": "compose/compose.yaml:README.md"}
    done = first.run("compose/machine/down.sh", "1", "1", **broken)
    assert done.returncode == 0, done.stdout + done.stderr
    eventually(lambda: nothing_is_left(rig), "no node has anything of it")
    assert run(first, "down").returncode == 0, "there is nothing to do"
