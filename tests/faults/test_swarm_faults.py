"""The failure table on a Swarm of five nodes, three of them managers, under a load on every edge that retries nothing.

What people do (scale, roll out, drain) costs no request. A fault costs those that had begun on what was lost, and stops
nothing that is well: a replica that was not on the node has the same task before and after. `-s` prints the figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterator
from functools import partial

import pytest

from tests.harness import swarm_rig
from tests.harness.load import Load
from tests.harness.swarm_rig import CONTROL, GOSSIP, OVERLAY, Node
from tests.harness.swarm_stack import Lost, SwarmStack, unexplained
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(1200)]

ROUNDS = int(os.environ.get("PIERHEAD_TEST_ROUNDS", "1"))
"""How often what people do is done."""
LOAD_S = 900.0
REPLACED_WITHIN_S = 20.0
CONTROL_WITHIN_S = 30.0
CONVERGES_WITHIN_S = 30.0
"""After the managers answer; where only the gossip was cut, it is the engines' own exchanges that take longer."""
LOST_WITHIN_S = 40.0
"""Until Swarm must have noted that a node is lost."""
CUT_S = 25.0
"""Longer than Swarm waits before it takes a node for lost."""


@pytest.fixture(scope="module")
def stack() -> Iterator[SwarmStack]:
    SwarmStack.build()
    if reason := swarm_rig.missing():
        pytest.skip(reason)
    with SwarmStack.running() as running:
        yield running


@pytest.fixture(autouse=True)
def quiet(stack: SwarmStack) -> Iterator[None]:
    """Nothing is to do before a test, nor after it, and nothing runs that should not."""
    stack.settle()
    yield
    stack.managers = list(stack.rig.managers)
    stack.settle()
    eventually(lambda: not stack.orphans(), "nothing runs that should not", 60.0, every_s=1.0)


def judge(stack: SwarmStack, load: Load, *faults: Lost) -> None:
    """No request failed but those that had begun on what was lost."""
    print(load.result, sorted(load.result.kinds()))
    assert load.result.requests
    left = unexplained(load.result.failures, faults)
    assert not left, f"{len(left)} of {load.result.failed} failures: {left[:10]}\n{stack.story()}"


def stayed(stack: SwarmStack, before: dict[str, str], lost: Container[str]) -> None:
    """Every replica but those is in the same task as before."""
    after = stack.started()
    changed = {name for name in before if name not in lost and after.get(name) != before[name]}
    assert not changed, f"replicas that were well were replaced: {changed}\n{stack.story()}"


def busiest(stack: SwarmStack) -> Node:
    """The worker with most replicas."""
    return max(stack.rig.nodes[3:], key=lambda node: len(away(stack, node)))


def away(stack: SwarmStack, node: Node) -> set[str]:
    """The replicas that are on a node."""
    return set(stack.tasks_of(node))


def test_scaling_and_rolling_out_cost_no_request(stack: SwarmStack) -> None:
    with stack.load(LOAD_S) as load:
        for n in range(ROUNDS):
            for count in ("6", "3", "auto"):
                stack.make("control", "scale", "faulty", count)
                stack.make("control", "scale", "echo", count)
                stack.settle()
            stack.roll(f"good{n}")
            stack.settle()
            stack.roll(f"bad{n}", breaks="crash")
            stack.settle()
            assert stack.get(stack.rig.nodes[4], "/faulty").body == f"good{n}".encode()
    judge(stack, load)


def test_draining_a_node_costs_no_request_at_other_edges(stack: SwarmStack) -> None:
    """Swarm ends the edge of a node that is drained, too."""
    drained = stack.rig.nodes[2:4]
    with stack.load(LOAD_S, nodes=stack.others(*drained)) as load:
        for node in drained * ROUNDS:
            stack.drain(node)
            assert away(stack, node) == set()
            stack.activate(node)
            stack.settle()
    judge(stack, load)


@pytest.mark.parametrize("which", ["a worker", "the leader, with the controller"])
def test_a_node_loses_its_power(stack: SwarmStack, which: str) -> None:
    leads = "leader" in which
    node = leader_that_acts(stack) if leads else busiest(stack)
    stack.managers = [one for one in stack.rig.managers if one is not node]
    there, before = away(stack, node), stack.started()
    with stack.load(LOAD_S) as load:
        time_of = time.time()
        node.power_off()
        lost = Lost("power off", node.ip, time_of)
        eventually(lambda: stack.managers[0].cli("node", "ls"), "a manager leads", LOST_WITHIN_S)
        if leads:
            eventually(lambda: stack.make("control", "plan"), "the controller is back", CONTROL_WITHIN_S)
            print(f"control back after {time.time() - time_of:.1f} s")
        else:
            within = REPLACED_WITHIN_S
            eventually(lambda: len(stack.started()) == len(before) and elsewhere(stack, node), "replaced", within)
            print(f"replaced after {time.time() - time_of:.1f} s")
        stack.settle()
        stayed(stack, before, there)
        node.power_on()
        lost.over_at = time.time()
        eventually(lambda: edge_answers(stack, node), f"the edge of {node.name} answers", 60.0)
        lost.over_at = time.time()
        stack.settle()
    judge(stack, load, lost)


ONLY_GOSSIP, ALL = "the gossip of a worker", "a worker, from all others"
OF_GOSSIP = (ONLY_GOSSIP, ALL)
CUTS: dict[str, Callable[[SwarmStack, Node], None]] = {
    "the overlay of a worker": lambda stack, node: node.cut(OVERLAY),
    ONLY_GOSSIP: lambda stack, node: node.cut(GOSSIP),
    "the control plane of a worker": lambda stack, node: node.cut(CONTROL),
    ALL: lambda stack, node: node.cut(peers=stack.others(node)),
}


@pytest.mark.parametrize("what", CUTS)
def test_a_partition_stops_nothing_that_is_well(stack: SwarmStack, what: str) -> None:
    node = busiest(stack)
    there, before = away(stack, node), stack.started()
    assert there
    with stack.load(LOAD_S) as load:
        lost = Lost(what, node.ip, time.time())
        CUTS[what](stack, node)
        time.sleep(CUT_S)  # how long the fault lasts
        assert away(stack, node) == there, "what runs there goes on"
        node.heal()
        healed_at = time.time()
        if what in OF_GOSSIP:
            lost.gossips_at = healed_at
        eventually(lambda: set(stack.rig.states().values()) == {"ready"}, "all nodes are ready", 60.0)
        stack.settle()
        lost.over_at = time.time()
    print(f"{what}: nothing to do {lost.over_at - healed_at:.1f} s after it was healed")
    stayed(stack, before, there)
    judge(stack, load, lost)
    assert what == ONLY_GOSSIP or lost.over_at - healed_at <= CONVERGES_WITHIN_S


def test_a_minority_of_the_nodes_is_cut_off_and_a_manager_returns(stack: SwarmStack) -> None:
    """One manager and one worker, from the other three: no quorum on their side, and their replicas go on there."""
    minority = [stack.rig.managers[2], stack.rig.nodes[4]]
    majority = [node for node in stack.rig.nodes if node not in minority]
    stack.managers = stack.rig.managers[:2]
    there, before = {name for node in minority for name in away(stack, node)}, stack.started()
    with stack.load(LOAD_S) as load:
        lost = [Lost("minority", node.ip, time.time()) for node in minority]
        for node in minority:
            node.cut(peers=majority)
        time.sleep(CUT_S)  # how long the fault lasts
        for node in minority:
            node.heal()
        for one in lost:
            one.gossips_at = time.time()
        eventually(lambda: set(stack.rig.states().values()) == {"ready"}, "all nodes are ready", 60.0)
        took_s = stack.settle()
        print(f"nothing to do {took_s:.1f} s after all nodes were ready")
        for one in lost:
            one.over_at = time.time()
    stayed(stack, before, there)
    judge(stack, load, *lost)
    assert took_s <= CONVERGES_WITHIN_S


def test_a_slow_node_and_an_engine_that_restarts(stack: SwarmStack) -> None:
    slow, restarted = stack.rig.nodes[3], stack.rig.nodes[4]
    with stack.load(LOAD_S) as load:
        slow.slow_down(0.1)
        time.sleep(CUT_S)  # how long the fault lasts
        slow.speed_up()
        stack.settle()
        lost = Lost("restart", restarted.ip, time.time(), others_for_s=30.0)
        restarted.restart_engine()
        eventually(lambda: edge_answers(stack, restarted), "its edge answers", 60.0)
        lost.over_at = time.time()
        stack.settle()
    judge(stack, load, lost)


def leader_that_acts(stack: SwarmStack) -> Node:
    """The manager that leads and has the controller that acts: leaders are demoted for a moment until one has it."""
    for _ in range(10):
        leader = stack.leader()
        if leader is stack.acting():
            return leader
        others = stack.managers = [node for node in stack.rig.managers if node is not leader]
        others[0].cli("node", "demote", leader.name)
        eventually(stack.leader, "another one leads", LOST_WITHIN_S)
        eventually(partial(others[0].cli, "node", "promote", leader.name), "it is a manager again", 30.0)
        stack.managers = list(stack.rig.managers)
        stack.settle()
    raise AssertionError("no leader has the controller that acts")


def elsewhere(stack: SwarmStack, node: Node) -> bool:
    """Whether no task is listed as running on a node any more."""
    told = stack.managers[0].cli("node", "ps", "--filter", "desired-state=running", "--format", "{{.Name}}", node.name)
    return not told


def edge_answers(stack: SwarmStack, node: Node) -> bool:
    return stack.get(node, "/faulty").status == 200
