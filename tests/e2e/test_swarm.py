"""What only a Swarm has to get right of `make up` and `make down`; the rest is in test_both_engines.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.swarm_rig import SwarmRig
from tests.harness.swarm_stack import IMAGES, SwarmStack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(900)]

KILLED_UP = """
setsid ./pierhead up &
until docker service inspect nodes_registry >/dev/null 2>&1; do kill -0 $! || exit; sleep 0.1; done
kill -KILL -- -$!
"""
BROKEN = "compose/compose.yaml:README.md"


@pytest.fixture(scope="module")
def stack() -> Iterator[SwarmStack]:
    """Three nodes, and nothing of the stack."""
    SwarmStack.build()
    with SwarmRig(nodes=3).running([], only_first=IMAGES) as rig:
        yield SwarmStack(rig)


def test_down_after_an_up_that_was_killed(stack: SwarmStack) -> None:
    """Its files have become invalid, too."""
    stack.type("bash", "-c", KILLED_UP)
    assert stack.left() != []
    stack.make("down", "--volumes", COMPOSE_FILE=BROKEN)
    programs = stack.rig.nodes[0].cli("ps", "--no-trunc", "--format", "{{.Command}}")
    assert "controller.swarm.up up" not in programs, "it would start more"
    eventually(stack.is_gone, "no node has anything of it")
    assert stack.run("down").returncode == 0, "there is nothing to do"


def test_another_clones_stack_is_left_alone(stack: SwarmStack) -> None:
    first, labels = stack.rig.nodes[0], ("com.docker.stack.namespace=nodes", "pierhead.clone=/elsewhere")
    theirs = ("--label", labels[0], "--label", labels[1], "--name", "nodes_web")
    first.cli("service", "create", "--detach", *theirs, IMAGES[-1], "sleep", "1h")
    for script in ("up", "down"):
        refused = stack.run(script)
        assert refused.returncode != 0
        assert "runs on this Swarm from another directory: /elsewhere" in refused.stderr
    assert first.cli("service", "ls", "--format", "{{.Name}}") == "nodes_web"
    stack.make("down", "--volumes", "--force")
    eventually(stack.is_gone, "no node has anything of it")
