"""The hour of chance on nodes that only note what is done to them: it ends, whatever goes wrong, and says what did."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.bench import hour_of_chance
from tests.bench.chance_report import Finding, Report
from tests.bench.hour_of_chance import COMMANDS, KILLS, KINDS, Chance
from tests.harness.load import Failure, LoadResult
from tests.harness.swarm_losses import GOSSIP, UNEXPLAINED, Judged


@dataclass
class Noting:
    """A node. What is done to it may fail."""

    name: str
    done: Counter[str]
    fails: set[str]
    ip: str = ""

    def __getattr__(self, name: str) -> Any:
        def note(*_: Any, **__: Any) -> Any:
            self.done[name] += 1
            if name in self.fails:
                raise RuntimeError(f"{name} failed\nbecause the test says so")
            return "\n".join(f"n{number} Ready" for number in range(1, 6)) if name == "cli" else self

        return note


@dataclass
class Stack:
    """A stack on such nodes."""

    done: Counter[str] = field(default_factory=Counter)
    fails: set[str] = field(default_factory=set)
    edges: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes = [Noting(f"n{number}", self.done, self.fails, f"10.0.0.{number}") for number in range(1, 6)]
        self.rig = SimpleNamespace(nodes=nodes, managers=nodes[:3])
        self.managers = nodes[:3]

    def others(self, *nodes: Noting) -> list[Noting]:
        return [node for node in self.rig.nodes if node not in nodes]

    def get(self, node: Noting, path: str) -> Any:
        return SimpleNamespace(status=200)

    def edge_started_at(self, node: Noting) -> float:
        return self.edges.get(node.name, 0.0)

    def orphans(self) -> list[str]:
        self._note("orphans")
        return ["echo-1 on n2"]

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self._note(name)

    def _note(self, name: str) -> str:
        self.done[name] += 1
        if name in self.fails:
            raise AssertionError(f"{name} failed")
        return name


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    drains = replace(KINDS["drain"], begin=_each("drain"), end=_each("activate"))
    at_once = patch.multiple(hour_of_chance, READY_WITHIN_S=0.0, EDGE_WITHIN_S=0.0)
    with patch.dict(KINDS, {"drain": drains}), at_once:
        yield


def _each(name: str) -> Any:
    def call(stack: Any, nodes: Any) -> None:
        for node in nodes:
            getattr(stack, name)(node)

    return call


def chance(seed: int, *fails: str) -> tuple[Chance, Stack]:
    stack: Any = Stack(fails=set(fails))
    return Chance(stack, random.Random(seed)), stack


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_comes_and_at_most_two_nodes_and_one_manager_are_in_trouble(seed: int) -> None:
    made, stack = chance(seed)
    for _ in range(80):
        made.step()
        busy = [node for trouble in made.troubles for node in trouble.nodes]
        assert len(busy) == len({node.name for node in busy}) <= hour_of_chance.MOST_IN_TROUBLE
        assert sum(node in stack.rig.managers for node in busy) <= 1
        assert len(stack.managers) >= 2
    made.close()
    assert not made.findings
    assert made.settled_s is not None
    assert set(made.counts) == {*KINDS, *KILLS, *COMMANDS, *(f"end of {kind}" for kind in KINDS)}
    kinds = [made.counts[kind] for kind in (*KINDS, *KILLS, *COMMANDS)]
    assert max(kinds) - min(kinds) <= 2
    assert all(fault.over_at < float("inf") for fault in made.faults if fault.edge)
    excused = {fault.kind for fault in made.faults if fault.others_for_s > 0}
    assert excused == {*KINDS, KILLS[1]} - {"slow", "drain", "control cut"}


@pytest.mark.parametrize(
    "fails", ["power_off", "power_on", "heal", "restart_engine", "drain", "activate", "roll", "make", "settle", "cli"]
)
def test_what_fails_is_a_finding_and_ends_nothing(fails: str) -> None:
    made, stack = chance(3, fails)
    for _ in range(80):
        made.step()
    made.close()
    assert made.findings
    assert not made.troubles
    assert len(stack.managers) == 3
    assert (made.settled_s is None) == (fails == "settle")
    assert all(fault.over_at < float("inf") for fault in made.faults if fault.edge)
    assert made.plan() == ("make" if fails == "settle" else "")
    assert made.orphans()["n2"] == ["echo-1 on n2"]


def test_a_trouble_is_over_when_the_edge_that_stays_has_begun() -> None:
    made, stack = chance(1)
    made.begin("cut off")
    (trouble,) = made.troubles
    (lost,) = trouble.lost
    made.end(trouble)
    back_at = lost.over_at
    made.look_back()
    assert lost.over_at == back_at
    stack.edges[trouble.nodes[0].name] = back_at + 12.0
    made.look_back()
    assert (lost.over_at, made.counts["late replacement of an edge"]) == (back_at + 12.0, 1)
    stack.edges[trouble.nodes[0].name] = back_at + 20.0
    made.look_back()
    assert lost.over_at == back_at + 12.0


def test_a_node_that_could_not_be_used_again_is_still_in_trouble() -> None:
    made, stack = chance(1, "activate")
    made.begin("drain")
    (trouble,) = made.troubles
    made.end(trouble)
    assert trouble.lost[0].over_at == float("inf")
    stack.fails.clear()
    made.end(trouble)
    assert trouble.lost[0].over_at < float("inf")
    assert not made.troubles


def test_a_node_that_cannot_be_asked_is_not_said_to_be_clean() -> None:
    made, _ = chance(1, "orphans")
    assert all("not known" in left[0] for left in made.orphans().values())


GOOD = Report(
    seed=1,
    minutes=5,
    began_at=1000.0,
    seconds=400.0,
    counts=Counter({"scale": 2, "power off": 1}),
    findings=[],
    load=LoadResult(requests=1000, failed=1, seconds=400.0),
    failures=[Judged(Failure(1100.2, "http://10.0.0.1:8000/echo", "503 b''", 1100.1), GOSSIP, "cut off")],
    gossip_s=90.0,
    settled_s=3.0,
    plan="",
    orphans={"n1": [], "n2": []},
)


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, None),
        ({"findings": [Finding(7.0, "scale", "RuntimeError: no leader", True)]}, None),
        ({"failures": [replace(GOOD.failures[0], of=UNEXPLAINED)]}, "failures that no fault explains"),
        ({"failures": []}, "failures that no fault explains"),
        ({"load": LoadResult()}, "requests were answered"),
        ({"settled_s": None, "plan": "create echo-2"}, "final plan"),
        ({"orphans": {"n1": ["echo-1 on n1"]}}, "orphans"),
    ],
)
def test_a_run_is_good_or_says_what_is_not(changes: dict[str, Any], broken: str | None) -> None:
    report = replace(GOOD, **changes)
    if broken == "requests were answered":
        report = replace(report, failures=[])
    assert [line.what for line in report.targets() if not line.met] == ([broken] if broken else [])
    assert report.is_good == (broken is None)
    facts = {"began": "2026-11-25", "machine": _MACHINE, "command": "x", "versions": {}, "uncommitted": False}
    assert "## Steps" in report.page(facts).markdown()


def test_the_closing_lines() -> None:
    assert str(GOOD).splitlines() == [
        "seed 1, 5 minutes, 400 s with the end of all troubles",
        "steps: 1 power off, 2 scale",
        "requests: 1000 requests in 400.0 s (2/s), 1 failed, p50 0.0 ms, p99 0.0 ms, max 0.0 ms",
        "failed at the edge of a lost node: 0",
        "failed begun on a lost node or replica: 0",
        "failed in a gossip window: 1 (1 cut off)",
        "failed unexplained: 0",
        "a gossip window was open for 90 s (22 %)",
        "commands refused while nodes were in trouble: 0",
        "findings: none",
        "final plan empty: yes, 3.0 s after the last trouble",
        "orphans on n1: none",
        "orphans on n2: none",
    ]


_MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "memory_gb": 24.0,
    "gpu": "",
    "virtual": True,
    "system": "Debian",
    "kernel": "6.1",
}
