"""Faults by chance on a Swarm of five nodes under load: `python -m tests.bench.hour_of_chance --minutes 60 --seed 1`.

Half a day's faults in an hour: power goes off and comes back, ports and nodes are cut off, nodes are slow, drained and
used again, engines restart, services are scaled and rolled out, to good versions and to bad ones. At most two nodes are
in trouble at a time, and one manager of three. A load on every edge retries nothing. The last lines say how often each
thing happened, which requests were lost and whether they had begun on what was lost, whether nothing is left to do, and
what runs anywhere that should not. Needs the images (`make build`), as the tests of the stack do.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.harness.load import Failure
from tests.harness.swarm_rig import CONTROL, GOSSIP, OVERLAY, Node
from tests.harness.swarm_stack import CLEAN_AFTER_S, Lost, SwarmStack, unexplained
from tests.harness.waiting import eventually

EDGE_WITHIN_S = 90.0
SERVED = ("echo", "faulty")
BETWEEN_S = (3.0, 20.0)
MOST_IN_TROUBLE = 2


@dataclass
class Trouble:
    """What is wrong with a node, and how it ends."""

    node: Node
    lost: Lost
    end: Callable[[], None]


@dataclass
class Chance:
    """What has happened, and what may happen next."""

    stack: SwarmStack
    dice: random.Random
    began: float = field(default_factory=time.monotonic)
    troubles: list[Trouble] = field(default_factory=list)
    faults: list[Lost] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Commands that failed: without a quorum, or without a controller, some do."""
    versions: int = 0

    def step(self) -> None:
        """One thing, by chance."""
        quiet = [node for node in self.stack.rig.nodes if node not in [one.node for one in self.troubles]]
        managers = [one.node for one in self.troubles if one.node in self.stack.rig.managers]
        free = [node for node in quiet if not managers or node not in self.stack.rig.managers]
        can_begin = len(self.troubles) < MOST_IN_TROUBLE and free
        kinds = [*(BEGINS if can_begin else ()), *(["end"] * 4 if self.troubles else ()), "scale", "roll", "roll badly"]
        kind = self.dice.choice(kinds)
        if kind in BEGINS:
            self.begin(kind, self.dice.choice(free))
        elif kind == "end":
            self.end(self.dice.choice(self.troubles))
        else:
            self.note(kind)
            self.ask(kind, self.scale if kind == "scale" else lambda: self.roll(is_bad=kind == "roll badly"))

    def begin(self, kind: str, node: Node) -> None:
        """Something goes wrong with a node."""
        self.note(kind, node)
        lost = Lost(kind, node.ip, time.time(), others_for_s=AT_OTHER_EDGES_S.get(kind, CLEAN_AFTER_S))
        self.stack.managers = [one for one in self.stack.managers if one is not node] or self.stack.managers
        end = BEGINS[kind](self.stack, node)
        if kind != "slow":
            self.faults.append(lost)
        self.troubles.append(Trouble(node, lost, end))

    def end(self, trouble: Trouble) -> None:
        """It is over, the managers know it, and the node's edge answers."""
        self.note(f"end of {trouble.lost.kind}", trouble.node)
        self.troubles.remove(trouble)
        trouble.end()
        if trouble.lost.kind in ("gossip cut", "cut off"):
            trouble.lost.gossips_at = time.time()
        eventually(lambda: self.is_ready(trouble.node), f"the managers know that {trouble.node.name} is back", 180.0)
        served = [f"/{name}" for name in SERVED]
        paths = [f"{path}?message=hi" for path in served]
        for path in paths:
            look = lambda path=path: self.stack.get(trouble.node, path).status == 200  # noqa: E731
            eventually(look, f"{trouble.node.name} answers {path}", EDGE_WITHIN_S)
        trouble.lost.over_at = time.time()
        self.stack.managers = [one for one in self.stack.rig.managers if one not in [t.node for t in self.troubles]]

    def is_ready(self, node: Node) -> bool:
        """Whether the managers hear of it. Swarm ends the edge of a node that it took for lost only then."""
        told = self.stack.managers[0].cli("node", "ls", "--format", "{{.Hostname}} {{.Status}}")
        return f"{node.name} Ready" in told.splitlines()

    def scale(self) -> None:
        """Another number of replicas of a service."""
        self.stack.make("control", "scale", self.dice.choice(SERVED), str(self.dice.randint(2, 7)))

    def roll(self, *, is_bad: bool) -> None:
        """Another version of the service that can have a bad one."""
        self.versions += 1
        self.stack.roll(f"v{self.versions}", self.dice.choice(["crash", "unready"]) if is_bad else "")

    def ask(self, kind: str, call: Callable[[], None]) -> None:
        """Give a command; it may fail in times of trouble, and says why."""
        try:
            call()
        except AssertionError as error:
            self.refused[kind] += 1
            print(f"    refused: {str(error).strip().splitlines()[-1]}")

    def note(self, what: str, node: Node | None = None) -> None:
        """Count it, and say it."""
        self.counts[what] += 1
        print(f"{time.monotonic() - self.began:7.1f} s  {what}{f' {node.name}' if node else ''}", flush=True)


def power_off(stack: SwarmStack, node: Node) -> Callable[[], None]:
    node.power_off()
    return node.power_on


def cut(*ports: int) -> Callable[[SwarmStack, Node], Callable[[], None]]:
    def begin(stack: SwarmStack, node: Node) -> Callable[[], None]:
        node.cut(*ports, peers=() if ports else stack.others(node))
        return node.heal

    return begin


def slow(stack: SwarmStack, node: Node) -> Callable[[], None]:
    node.slow_down(0.2)
    return node.speed_up


def drain(stack: SwarmStack, node: Node) -> Callable[[], None]:
    stack.drain(node)
    return lambda: stack.activate(node)


def restart(stack: SwarmStack, node: Node) -> Callable[[], None]:
    node.restart_engine()
    return lambda: None


BEGINS: dict[str, Callable[[SwarmStack, Node], Callable[[], None]]] = {
    "power off": power_off,
    "overlay cut": cut(OVERLAY),
    "gossip cut": cut(GOSSIP),
    "control cut": cut(CONTROL),
    "cut off": cut(),
    "slow": slow,
    "drain": drain,
    "restart": restart,
}
NEVER_S = -60.0
AT_OTHER_EDGES_S = {"restart": 30.0, "drain": NEVER_S, "control cut": NEVER_S}
"""For how long requests may be lost at other edges. Swarm itself ends the edge of a node that is drained, and of one
that comes back after it was down. A slow node costs no request."""


def main() -> int:
    """Run from the command line; 0 = nothing was lost that had not begun on what was, and nothing is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    SwarmStack.build()
    with SwarmStack.running() as stack:
        stack.settle()
        chance = Chance(stack, random.Random(options.seed))
        print(f"seed {options.seed}", flush=True)
        with stack.load(60 * options.minutes + 1800.0) as load:
            while time.monotonic() < chance.began + 60 * options.minutes:
                chance.step()
                time.sleep(chance.dice.uniform(*BETWEEN_S))
            for trouble in list(chance.troubles):
                chance.end(trouble)
            stack.roll("the last one")
            took_s = stack.settle(within_s=600.0)
        return told(chance, load.result.failures, str(load.result), took_s)


def told(chance: Chance, failures: list[Failure], summary: str, took_s: float) -> int:
    """The closing lines; the exit code."""
    outside = unexplained(failures, chance.faults)
    kinds = Counter(next(f.kind for f in chance.faults if f.explains(one)) for one in failures if one not in outside)
    orphans = chance.stack.orphans()
    print("\nwhat happened: " + ", ".join(f"{count} {what}" for what, count in sorted(chance.counts.items())))
    print("commands refused: " + (", ".join(f"{n} {what}" for what, n in chance.refused.items()) or "none"))
    print(summary)
    print(f"lost, begun on what was lost: {sum(kinds.values())} {dict(kinds)}")
    print(f"lost otherwise: {len(outside)}")
    for one in outside[:40]:
        print(f"    {one.begun_at - (time.time() - time.monotonic()) - chance.began:.1f} s {one.url}: {one.what[:160]}")
    print(f"final plan empty: yes, {took_s:.1f} s after the last trouble")
    print(f"orphans: {', '.join(orphans) or 'none'}")
    return 1 if outside or orphans else 0


if __name__ == "__main__":
    sys.exit(main())
