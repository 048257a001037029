"""From three bare machines to the first answer, six GPUs on three nodes, and a fourth machine for the seventh replica.

The tests are one story, in this order, with the commands of docs/how-to/many-machines.md. `-s` prints them with their
times. The images were built before, and are on the first machine alone; GPUs are invented.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import pytest

from tests.harness.stack import ROOT
from tests.harness.swarm_rig import Node, SwarmRig
from tests.harness.swarm_stack import IMAGES, PATHS, SwarmStack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(900)]

T = TypeVar("T")
GPUS_OF_A_NODE = 2
SERVICE = "pinned"
"""Each of its replicas asks for a GPU."""


@pytest.fixture(scope="module")
def story() -> Iterator[tuple[SwarmStack, Node]]:
    """The stack that will run on the first three machines, and the fourth machine."""
    SwarmStack.build()
    with SwarmRig(nodes=4, managers=3, gpus=0).machines() as rig:
        fourth = rig.nodes.pop()
        yield SwarmStack(rig), fourth


def timed(what: str, do: Callable[[], T]) -> T:
    began = time.monotonic()
    done = do()
    print(f"{time.monotonic() - began:6.1f} s  {what}")
    return done


def typed(stack: SwarmStack, node: Node, *words: str) -> str:
    """What `pierhead node ...` prints on a machine; it must work."""
    words = ("./pierhead", "node", *words)
    done = timed(f"{node.name}: {' '.join(words)}", lambda: node.run(*words, **stack.variables))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def gpus_of(node: Node) -> list[str]:
    return [f"GPU-{node.name}-{number}" for number in range(1, GPUS_OF_A_NODE + 1)]


def join(stack: SwarmStack, node: Node, *role: str) -> None:
    """As the command says that the first machine prints."""
    words = typed(stack, stack.rig.nodes[0], "token", *role).split()
    assert words[:3] == ["./pierhead", "node", "join"]
    typed(stack, node, *words[2:], "--gpus", ",".join(gpus_of(node)))


def curl(node: Node) -> str:
    """The status of the first request through a node's edge."""
    url = f"http://{node.ip}:8000{PATHS[0]}"
    words = ["curl", "--silent", "--max-time", "10", "--output", "/dev/null", "--write-out", "%{http_code}", url]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False).stdout


def answers(node: Node) -> bool:
    return curl(node) == "200"


def placed(stack: SwarmStack) -> dict[str, tuple[str, ...]]:
    """The GPUs of the replicas that run, by node."""
    running = [one for one in stack.services()[SERVICE]["replicas"] if one["state"] == "RUNNING"]
    nodes = sorted({one["node"] for one in running})
    return {node: tuple(sorted(gpu for one in running if one["node"] == node for gpu in one["gpus"])) for node in nodes}


def test_from_three_bare_machines_to_the_first_answer(story: tuple[SwarmStack, Node]) -> None:
    stack, _ = story
    first, *others = stack.rig.nodes
    began = time.monotonic()
    typed(stack, first, "init", "--gpus", ",".join(gpus_of(first)))
    timed("the images come to the first machine (a build, without this test)", lambda: first.load(IMAGES))
    for node in others:
        join(stack, node, "--manager")
    timed("make up", lambda: stack.make("up"))
    for node in stack.rig.nodes:
        timed(f"curl {node.name}:8000{PATHS[0]}", partial(eventually, partial(answers, node), "it answers"))
    print(f"{time.monotonic() - began:6.1f} s  from bare machines until each edge has answered")
    assert stack.rig.states() == {node.name: "ready" for node in stack.rig.nodes}


def message_of_pending(stack: SwarmStack, words: str) -> str:
    """Of the one replica that waits for a node. Raises AssertionError without those words in it."""
    replicas = stack.services()[SERVICE]["replicas"]
    messages = [one["message"] for one in replicas if one["state"] == "PENDING"]
    assert len(messages) == 1, replicas
    assert words in messages[0], messages
    return str(messages[0])


def test_six_replicas_have_the_six_gpus_and_the_seventh_says_what_it_lacks(story: tuple[SwarmStack, Node]) -> None:
    stack, _ = story
    timed(f"make scale SERVICE={SERVICE} N=6", lambda: stack.make("scale", SERVICE, "6"))
    assert placed(stack) == {node.name: tuple(gpus_of(node)) for node in stack.rig.nodes}
    print("\n".join(f"    {node}: {', '.join(gpus)}" for node, gpus in placed(stack).items()))
    stack.make("scale", SERVICE, "7", "--no-wait")
    no_room = "it asks for 1 GPU and 0 of 6 are free: 6 held by pinned"
    print(f"    {eventually(partial(message_of_pending, stack, no_room), no_room)}")
    assert no_room in " ".join(stack.make("why", SERVICE).split())
    assert sum(len(gpus) for gpus in placed(stack).values()) == 6


def test_a_fourth_machine_joins_and_takes_the_seventh(story: tuple[SwarmStack, Node]) -> None:
    stack, fourth = story
    before = stack.started()
    began = time.monotonic()
    join(stack, fourth)
    stack.rig.nodes.append(fourth)
    eventually(lambda: fourth.name in placed(stack), "the seventh replica runs there", 120.0)
    print(f"{time.monotonic() - began:6.1f} s  until the seventh replica runs on {fourth.name}")
    assert len(placed(stack)[fourth.name]) == 1
    assert set(placed(stack)[fourth.name]) < set(gpus_of(fourth))
    eventually(lambda: all(stack.get(fourth, path).status == 200 for path in PATHS), "its edge answers")
    assert answers(fourth)
    print(f"{time.monotonic() - began:6.1f} s  until its edge answers")
    stack.settle()
    after = stack.started()
    assert {name: after.get(name) for name in before} == before, "nothing else was moved"
