"""Bare machines become a Swarm by the commands that a user types, on real engines; what is refused changes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from controller.engines.docker import open_client
from controller.errors import EngineUnreachable
from controller.swarm.up.facts import gather
from controller.swarm.up.preflight import check
from tests.harness import swarm_rig
from tests.harness.swarm_rig import Node, SwarmRig
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def rig() -> Iterator[SwarmRig]:
    try:
        open_client().close()
    except EngineUnreachable as error:
        pytest.skip(str(error))
    swarm_rig.build()
    with SwarmRig(nodes=3, gpus=0).machines() as running:
        yield running


def typed(node: Node, *words: str) -> str:
    """What it prints; it must work."""
    began = time.monotonic()
    done = node.run("./pierhead", "node", *words)
    print(f"{node.name}: node {words[0]} took {time.monotonic() - began:.1f} s")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(node: Node, *words: str) -> str:
    """The one sentence of it, and what to do. The first command of all starts the engine, and says so."""
    done = node.run("./pierhead", "node", *words)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def test_three_bare_machines_become_a_swarm(rig: SwarmRig) -> None:
    first, second, third = rig.nodes
    printed = typed(first, "init", "--registry", f"{first.ip}:5000")
    join = printed.splitlines()[-1].split()
    assert join[:3] == ["./pierhead", "node", "join"]
    _, _, _, address, token, *options = join
    assert (address, options) == (f"{first.ip}:2377", ["--registry", f"{first.ip}:5000"])

    stranger = token.split("-")
    stranger[2] = "0" + stranger[2][1:][::-1]
    for words, says in (
        ((f"{rig.subnet}.250", token), f"the manager does not answer at {rig.subnet}.250, port 2377."),
        ((address, f"{token[:-3]}000"), "does not take this token"),
        ((address, "-".join(stranger)), "the token is of another Swarm"),
    ):
        assert says in refused(second, "join", *words)
        assert second.cli("info", "--format", "{{.Swarm.LocalNodeState}}") == "inactive"

    assert "is a worker of the Swarm" in typed(second, *join[2:], "--gpus", "GPU-a,GPU-b")
    for_managers = typed(first, "token", "--manager").split()
    assert "is a manager of the Swarm" in typed(third, *for_managers[2:])
    eventually(lambda: rig.states() == dict.fromkeys(("n1", "n2", "n3"), "ready"), "all are ready", 30)

    settings = json.loads((second.directory / "daemon.json").read_text())
    assert settings["node-generic-resources"] == ["NVIDIA-GPU=GPU-a", "NVIDIA-GPU=GPU-b"]
    assert (settings["live-restore"], settings["insecure-registries"]) == (False, [f"{first.ip}:5000"])
    assert settings["exec-opts"] == ["native.cgroupdriver=cgroupfs"], "another setting stays"
    assert typed(second, *join[2:]).splitlines() == [f"This machine, n2, is a worker of the Swarm at {address}."]

    assert "no manager of a Swarm" in refused(second, "token")
    assert "in a Swarm already" in refused(second, "init")
    with first.client() as client:
        facts = gather(client, "shop", (18000,), lambda: f"{first.ip}:5000", is_own=True)
    found = check(facts)
    assert found.problems == ()
    assert [one.partition(" (")[0] for one in found.warnings] == ["the Swarm has 2 managers"]
    (gpus,) = (
        node["Description"]["Resources"]["GenericResources"]
        for node in facts.nodes
        if "GenericResources" in node["Description"]["Resources"]
    )
    assert {one["NamedResourceSpec"]["Value"] for one in gpus} == {"GPU-a", "GPU-b"}


def test_without_a_quorum_each_command_says_so(rig: SwarmRig) -> None:
    """After the test above, in which two of the machines have become managers."""
    first, second, third = rig.nodes
    join = typed(first, "token").split()[2:]
    third.power_off()
    eventually(lambda: "no quorum" in first.run("./pierhead", "node", "token").stderr, "a token is refused", 60)
    with first.client() as client:
        (problem,) = check(gather(client, "shop", (18000,), str, is_own=False)).problems
    assert "more than half of its managers must be up" in problem
    second.cli("swarm", "leave")
    assert "its Swarm has no quorum" in refused(second, *join)
    assert second.cli("info", "--format", "{{.Swarm.LocalNodeState}}") == "inactive"
