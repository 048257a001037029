"""Faults by chance on a Swarm of five nodes under load: `python -m tests.bench.hour_of_chance --minutes 60 --seed 1`.

Half a day's faults in an hour: power goes off and comes back, ports and nodes are cut off, alone and two together,
nodes are slow, drained and used again, engines restart, the controller and replicas are killed, services are scaled and
rolled out, to good versions and to bad ones. At most two nodes are in trouble at a time, and one manager of three. Each
kind comes once before any comes again, so a run of five minutes sees most of them. Clients at every edge retry nothing.

Nothing that goes wrong ends the run: it is a finding, and the closing lines come in any case. They say how often each
thing happened, which requests were lost and why, whether nothing is left to do, and what runs anywhere that should not.
`--out DIRECTORY` writes them as a page. Needs the images (`make build`), as the tests of the stack do.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.bench.chance_report import Finding, Report
from tests.bench.record import run_facts
from tests.harness.swarm_losses import (
    CLEAN_AFTER_S,
    GOSSIP_NOTICED_S,
    NEVER_S,
    UNEXPLAINED,
    Lost,
    gossip_s,
    judged,
)
from tests.harness.swarm_rig import CONTROL, GOSSIP, OVERLAY, Node
from tests.harness.swarm_stack import SwarmStack
from tests.harness.waiting import eventually

READY_WITHIN_S, EDGE_WITHIN_S = 180.0, 90.0
SETTLES_WITHIN_S = 600.0
TROUBLED_FOR_S = 60.0
"""After the end of a trouble, commands may still be refused: a manager that returns may cost Swarm its leader."""
SERVED = ("echo", "faulty")
BETWEEN_S = (2.0, 12.0)
MOST_IN_TROUBLE = 2
TRIES = 3
REPLACED_LATE_S = 45.0
"""A manager that returns may cost Swarm its leader. The next one takes nodes for lost that do not reach it within 15 s,
and their edges are then replaced, though they had answered again before."""
ENDS = 0.4
"""How likely a step ends a trouble, where there is one."""

Nodes = Sequence[Node]


@dataclass(frozen=True)
class Kind:
    """A way in which nodes get into trouble. `end` may be called more than once, and where `begin` has failed."""

    begin: Callable[[SwarmStack, Nodes], None]
    end: Callable[[SwarmStack, Nodes], None]
    others_for_s: float = CLEAN_AFTER_S
    """For how long requests may be lost at other edges, once it has begun."""
    is_of_gossip: bool = False
    nodes: int = 1


def cut(*ports: int) -> Callable[[SwarmStack, Nodes], None]:
    def begin(stack: SwarmStack, nodes: Nodes) -> None:
        for node in nodes:
            node.cut(*ports, peers=() if ports else stack.others(*nodes))

    return begin


def each(do: Callable[[SwarmStack, Node], None]) -> Callable[[SwarmStack, Nodes], None]:
    def to_all(stack: SwarmStack, nodes: Nodes) -> None:
        for node in nodes:
            do(stack, node)

    return to_all


heal = each(lambda stack, node: node.heal())
KINDS = {
    "power off": Kind(each(lambda stack, node: node.power_off()), each(lambda stack, node: node.power_on())),
    "overlay cut": Kind(cut(OVERLAY), heal),
    "gossip cut": Kind(cut(GOSSIP), heal, GOSSIP_NOTICED_S + CLEAN_AFTER_S, is_of_gossip=True),
    "control cut": Kind(cut(CONTROL), heal, NEVER_S),
    "cut off": Kind(cut(), heal, is_of_gossip=True),
    "two cut off together": Kind(cut(), heal, is_of_gossip=True, nodes=2),
    "slow": Kind(each(lambda stack, node: node.slow_down(0.2)), each(lambda stack, node: node.speed_up())),
    "drain": Kind(each(SwarmStack.drain), each(SwarmStack.activate), NEVER_S),
    "restart": Kind(each(lambda stack, node: node.restart_engine()), each(lambda stack, node: node.wait_until_up())),
}
"""Swarm itself ends the edge of a node that is drained, and of one that comes back after it was down. A slow node costs
no request."""
COMMANDS = ("scale", "roll", "roll badly")
KILLS = ("kill of the controller", "kill of a replica")
REFUSABLE = (*COMMANDS, *KILLS, "drain", "end of drain", "the last roll")
"""What needs a leader and a controller: it may be refused while other nodes are in trouble."""


@dataclass
class Trouble:
    """What is wrong with nodes."""

    kind: str
    nodes: Nodes
    lost: list[Lost]
    tries: int = 0


@dataclass
class Chance:
    """What has happened, and what may happen next."""

    stack: SwarmStack
    dice: random.Random
    began_at: float = field(default_factory=time.time)
    troubles: list[Trouble] = field(default_factory=list)
    faults: list[Lost] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    settled_s: float | None = None
    versions: int = 0
    _back: list[tuple[Node, Lost]] = field(default_factory=list)
    """Nodes that are well again, and what they had."""
    _bag: list[str] = field(default_factory=list)
    _troubled_at: float = 0.0

    def run(self, seconds: float) -> None:
        """Steps, until so many seconds are over."""
        while time.time() < self.began_at + seconds:
            self.step()
            self.attempt("a look back", self.look_back)
            time.sleep(self.dice.uniform(*BETWEEN_S))  # what happens by chance happens at times of chance

    def close(self) -> None:
        """Every trouble ends, and then nothing shall be left to do."""
        for _ in range(TRIES):
            for trouble in list(self.troubles):
                self.end(trouble)
        self.attempt("a look back", self.look_back)
        self.stack.managers = list(self.stack.rig.managers)
        began = time.monotonic()
        for _ in range(TRIES):
            if self.attempt("the last roll", lambda: self.stack.roll("the last one")):
                break
        if self.attempt("nothing is left to do", lambda: self.stack.settle(within_s=SETTLES_WITHIN_S)):
            self.settled_s = time.monotonic() - began
        self.attempt("a look back", self.look_back)

    def step(self) -> None:
        """One thing, by chance."""
        kind = "" if self.troubles and self.dice.random() < ENDS else self._next()
        if kind in KINDS:
            self.begin(kind)
        elif kind in KILLS:
            self.kill(kind)
        elif kind:
            self.note(kind)
            self.attempt(kind, self.scale if kind == "scale" else lambda: self.roll(is_bad=kind == "roll badly"))
        else:
            self.end(self.dice.choice(self.troubles))

    def begin(self, kind: str) -> None:
        """Something goes wrong with nodes."""
        how, nodes = KINDS[kind], self._chosen(KINDS[kind].nodes)
        self.note(kind, *nodes)
        now = time.time()
        lost = [Lost(kind, node.ip, now, others_for_s=how.others_for_s) for node in nodes]
        if kind != "slow":
            self.faults += lost
        self.troubles.append(Trouble(kind, nodes, lost))
        self._leave_out()
        self.attempt(kind, lambda: how.begin(self.stack, nodes))
        for one in lost:
            one.others_for_s += time.time() - now

    def end(self, trouble: Trouble) -> None:
        """It is over, the managers know it, and the edges answer. One that does not end is tried again later."""
        what = f"end of {trouble.kind}"
        self.note(what, *trouble.nodes)
        has_ended = self.attempt(what, lambda: KINDS[trouble.kind].end(self.stack, trouble.nodes))
        is_over = has_ended and self.attempt(what, lambda: self._see_over(trouble))
        trouble.tries += 1
        if has_ended or trouble.tries >= TRIES:
            for lost in trouble.lost:
                lost.over_at = min(lost.over_at, time.time())  # an edge that is not back by now has no excuse any more
        if is_over:
            self._back += zip(trouble.nodes, trouble.lost, strict=True)
        if is_over or trouble.tries >= TRIES:
            self.troubles.remove(trouble)
        self._troubled_at = time.time()
        self._leave_out()

    def look_back(self) -> None:
        """Where Swarm has replaced the edge of a node that was well again, its trouble was over only then."""
        for one in [one for one in self._back if one[0] in self._quiet()]:
            node, lost = one
            started_at = self.stack.edge_started_at(node)
            if lost.over_at < started_at <= lost.over_at + REPLACED_LATE_S:
                self.note("late replacement of an edge", node)
                lost.over_at = started_at
                self._back.remove(one)
            elif time.time() > lost.over_at + REPLACED_LATE_S:
                self._back.remove(one)

    def kill(self, kind: str) -> None:
        """A process ends at once, and its node is well."""
        self.note(kind)
        if kind == "kill of the controller":
            self.attempt(kind, self.stack.kill_controller)
            return
        lost = Lost(kind, "", time.time())
        self.faults.append(lost)
        self.attempt(kind, lambda: self.stack.kill_replica(self.dice.choice(self._quiet())))
        lost.others_for_s += time.time() - lost.begun_at

    def scale(self) -> None:
        """Another number of replicas of a service."""
        service, number = self.dice.choice(SERVED), self.dice.randint(2, 7)
        waits = ["--no-wait"] if self.dice.random() < 0.5 else ["--timeout", "240"]
        self.stack.make("scale", service, str(number), *waits)

    def roll(self, *, is_bad: bool) -> None:
        """Another version of the service that can have a bad one. Half of the time the next event comes during it."""
        self.versions += 1
        breaks = self.dice.choice(["crash", "unready"]) if is_bad else ""
        self.stack.roll(f"v{self.versions}", breaks, waits=self.dice.random() < 0.5)

    def attempt(self, what: str, call: Callable[[], object]) -> bool:
        """Do it; whatever goes wrong is a finding."""
        try:
            call()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            is_excused = what in REFUSABLE and self._in_trouble(but=what.removeprefix("end of "))
            self.find(what, f"{type(error).__name__}: {lines[-1]}", is_excused=is_excused)
            return False
        return True

    def find(self, what: str, text: str, *, is_excused: bool = False) -> None:
        """Note what went wrong, and say it."""
        self.findings.append(Finding(time.time() - self.began_at, what, text[:400], is_excused))
        print(f"    {self.findings[-1]}", flush=True)

    def note(self, what: str, *nodes: Node) -> None:
        """Count it, and say it."""
        self.counts[what] += 1
        named = " ".join(node.name for node in nodes)
        print(f"{time.time() - self.began_at:7.1f} s  {what} {named}".rstrip(), flush=True)

    def orphans(self) -> dict[str, list[str]]:
        """By node: what runs there and should not. A node that cannot be asked has its error there."""
        nodes = self.stack.rig.nodes
        try:
            found = self.stack.orphans()
        except Exception as error:
            return {node.name: [f"not known: {type(error).__name__}: {error}"[:200]] for node in nodes}
        return {node.name: [one for one in found if one.endswith(f" on {node.name}")] for node in nodes}

    def plan(self) -> str:
        """What is left to do; "" = nothing."""
        if self.settled_s is not None:
            return ""
        try:
            return self.stack.make("plan").strip() or "replicas are missing"
        except Exception as error:
            return f"not known: {type(error).__name__}: {error}"[:400]

    def _see_over(self, trouble: Trouble) -> None:
        if KINDS[trouble.kind].is_of_gossip:
            for lost in trouble.lost:
                lost.gossips_at = min(lost.gossips_at, time.time())
        for node in trouble.nodes:
            back = f"the managers know that {node.name} is back"
            eventually(lambda node=node: self._is_ready(node), back, READY_WITHIN_S)  # type: ignore[misc]
            eventually(partial(self.stack.edge_stays, node), f"{node.name} has the edge that stays", EDGE_WITHIN_S)
            for path in (f"/{name}?message=hi" for name in SERVED):
                look = lambda node=node, path=path: self.stack.get(node, path).status == 200  # noqa: E731
                eventually(look, f"{node.name} answers {path}", EDGE_WITHIN_S)

    def _is_ready(self, node: Node) -> bool:
        """Whether the managers hear of it. Swarm ends the edge of a node that it took for lost only then."""
        told = self.stack.managers[0].cli("node", "ls", "--format", "{{.Hostname}} {{.Status}}")
        return f"{node.name} Ready" in told.splitlines()

    def _next(self) -> str:
        """The next kind that can happen now; "" where none can."""
        for _ in range(2):
            found = next((kind for kind in self._bag if self._can(kind)), "")
            if found:
                self._bag.remove(found)
                return found
            if self._bag and self.troubles:
                return ""
            self._bag = [*KINDS, *KILLS, *COMMANDS]
            self.dice.shuffle(self._bag)
        return ""

    def _can(self, kind: str) -> bool:
        busy = len(self.stack.rig.nodes) - len(self._quiet())
        return kind not in KINDS or busy + KINDS[kind].nodes <= MOST_IN_TROUBLE

    def _chosen(self, count: int) -> list[Node]:
        """Nodes by chance, with at most one manager among all that are in trouble."""
        chosen: list[Node] = []
        managers = self.stack.rig.managers
        while len(chosen) < count:
            free = [node for node in self._quiet() if node not in chosen]
            has_manager = any(node in managers and node not in free for node in self.stack.rig.nodes)
            chosen.append(self.dice.choice([node for node in free if not has_manager or node not in managers]))
        return chosen

    def _quiet(self) -> list[Node]:
        return self.stack.others(*(node for trouble in self.troubles for node in trouble.nodes))

    def _leave_out(self) -> None:
        """Commands are typed on managers that are well."""
        self.stack.managers = [node for node in self._quiet() if node in self.stack.rig.managers]

    def _in_trouble(self, but: str) -> bool:
        others = [trouble for trouble in self.troubles if trouble.kind != but]
        return bool(others) or time.time() - self._troubled_at < TROUBLED_FOR_S


def main() -> int:
    """Run from the command line; 0 = all losses are explained, nothing is left to do, nothing runs that should not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--out", type=Path, help="the directory of a page with the closing lines")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    SwarmStack.build()
    with SwarmStack.running() as stack:
        stack.settle()
        facts = run_facts(
            f"python -m tests.bench.hour_of_chance --minutes {options.minutes:g} --seed {options.seed}",
            docker=stack.rig.nodes[0].cli("version", "--format", "{{.Server.Version}}"),
        )
        print(f"seed {options.seed}", flush=True)
        report = played(stack, options.minutes, options.seed)
        if options.out:
            report.page(facts).write(options.out)
    return 0 if report.is_good else 1


def played(stack: SwarmStack, minutes: float, seed: int) -> Report:
    """The run; its closing lines are printed, however it ends."""
    chance = Chance(stack, random.Random(seed))
    clients = stack.load(limit_s=60 * minutes + 7200.0)
    try:
        with clients:
            try:
                chance.run(60 * minutes)
            except KeyboardInterrupt:
                chance.find("the run", "interrupted")
            chance.close()
    except Exception as error:
        chance.find("the load", f"{type(error).__name__}: {error}")
    finally:
        now = time.time()
        report = Report(
            seed=seed,
            minutes=minutes,
            began_at=chance.began_at,
            seconds=now - chance.began_at,
            counts=chance.counts,
            findings=chance.findings,
            load=clients.result,
            failures=judged(clients.result.failures, chance.faults),
            gossip_s=gossip_s(chance.faults, now),
            settled_s=chance.settled_s,
            plan=chance.plan(),
            orphans=chance.orphans(),
        )
        print(f"\n{report}", flush=True)
        for line in stack.lines_of_edges(one.failure for one in report.of(UNEXPLAINED)):
            print(line)
    return report


if __name__ == "__main__":
    sys.exit(main())
