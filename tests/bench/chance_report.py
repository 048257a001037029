"""The closing lines of the hour of chance, and the page that is made of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.bench.record import Page, Table
from tests.bench.targets import Line
from tests.harness.load import LoadResult
from tests.harness.swarm_losses import (
    BEFORE_S,
    BEGUN,
    CLASSES,
    CLEAN_AFTER_S,
    EDGE,
    GOSSIP,
    GOSSIP_S,
    UNEXPLAINED,
    Judged,
)

SHOWN = 40
"""Of the unexplained failures, this many are listed one by one."""


@dataclass(frozen=True)
class Finding:
    """A step that went wrong."""

    at_s: float
    what: str
    text: str
    is_excused: bool
    """A command that was refused while nodes were in trouble, or just after."""

    def __str__(self) -> str:
        return f"{'refused' if self.is_excused else 'FINDING'} at {self.at_s:.1f} s: {self.what}: {self.text}"


@dataclass(frozen=True)
class Report:
    """What a run found."""

    seed: int
    minutes: float
    began_at: float
    seconds: float
    counts: Counter[str]
    findings: Sequence[Finding]
    load: LoadResult
    failures: Sequence[Judged]
    gossip_s: float
    """For how long some gossip window was open."""
    settled_s: float | None
    """From the end of the last trouble until nothing was left to do; None: something was."""
    plan: str
    """What was left to do."""
    orphans: Mapping[str, Sequence[str]]
    """By node."""

    @property
    def is_good(self) -> bool:
        """Whether every loss is explained, nothing is left to do, and nothing runs that should not."""
        return all(line.met for line in self.targets())

    def of(self, name: str) -> list[Judged]:
        """The failures of a class."""
        return [one for one in self.failures if one.of == name]

    def targets(self) -> Iterator[Line]:
        """What is promised."""
        answered, lost = self.load.requests - self.load.failed, len(self.of(UNEXPLAINED))
        untold = self.load.failed - len(self.failures)
        yield Line("requests were answered", "> 0", str(answered), answered > 0)
        found = f"{lost}{f', and {untold} that were not kept' if untold else ''}"
        yield Line("failures that no fault explains", "0", found, not lost and not untold)
        settled = f"empty, {self.settled_s:.1f} s after the last trouble" if self.settled_s is not None else self.plan
        yield Line("final plan", "empty", settled.replace("\n", "; "), self.settled_s is not None)
        left = [one for ones in self.orphans.values() for one in ones]
        yield Line("orphans", "none", "; ".join(left) or "none", not left)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The closing lines."""
        excused = [one for one in self.findings if one.is_excused]
        findings = [one for one in self.findings if not one.is_excused]
        yield f"seed {self.seed}, {self.minutes:g} minutes, {self.seconds:.0f} s with the end of all troubles"
        yield "steps: " + ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        yield f"requests: {self.load}"
        for name in CLASSES:
            kinds = Counter(one.kind for one in self.of(name) if one.kind)
            told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            yield f"failed {name}: {len(self.of(name))}{f' ({told})' if told else ''}"
        yield f"a gossip window was open for {self.gossip_s:.0f} s ({100 * self.gossip_s / max(self.seconds, 1):.0f} %)"
        for one in self.of(UNEXPLAINED)[:SHOWN]:
            failure = one.failure
            times = f"{failure.begun_at - self.began_at:.1f} to {failure.at - self.began_at:.1f} s"
            yield f"    {times} {failure.url}: {failure.what[:160]}"
        yield f"commands refused while nodes were in trouble: {len(excused)}"
        yield from (f"    {one}" for one in excused)
        yield f"findings: {len(findings) or 'none'}"
        yield from (f"    {one}" for one in findings)
        is_empty = self.settled_s is not None
        settled = f"yes, {self.settled_s:.1f} s after the last trouble" if is_empty else f"no: {self.plan}"
        yield f"final plan empty: {settled}"
        for node, left in self.orphans.items():
            yield f"orphans on {node}: {', '.join(left) or 'none'}"

    def page(self, facts: Mapping[str, Any]) -> Page:
        """What people read."""
        kinds = Counter((one.of, one.kind) for one in self.failures)
        lost = [[name, kind or "-", str(kinds[name, kind])] for name, kind in sorted(kinds, key=_place)]
        findings = [
            [f"{one.at_s:.0f} s", one.what, one.text.replace("|", "/"), "yes" if one.is_excused else "no"]
            for one in self.findings
        ]
        steps = [[what, str(count)] for what, count in sorted(self.counts.items())]
        requests = [
            ["requests", str(self.load.requests)],
            ["failed", str(self.load.failed)],
            *([name, str(len(self.of(name)))] for name in CLASSES),
            ["seconds in which a gossip window was open", f"{self.gossip_s:.0f} of {self.seconds:.0f}"],
            ["p50, p99, longest", f"{self.load.p50_ms:.1f}, {self.load.p99_ms:.1f}, {self.load.max_ms:.0f} ms"],
        ]
        return Page(
            title=f"{self.minutes:g} minutes of faults by chance on a Swarm of {len(self.orphans)} nodes",
            run=facts,
            lines=list(self.targets()),
            tables=[
                Table("Requests", ["", ""], requests),
                Table("Failures, by fault", ["class", "fault", "requests"], lost),
                Table("Steps", ["", "times"], steps),
                Table("What went wrong in steps", ["at", "step", "what was said", "nodes were in trouble"], findings),
            ],
            how=HOW,
            figures={"failures": [asdict(one) for one in self.failures], "seed": self.seed, "steps": dict(self.counts)},
        )


def _place(key: tuple[str, str]) -> tuple[int, str]:
    return CLASSES.index(key[0]), key[1]


HOW = f"""\
- Nodes are Docker Engines in privileged containers of one machine, three of them managers. Clients are processes that
  open a new connection for each request, at every edge, and retry nothing.
- "{EDGE}": sent to the edge of a node in trouble, from {BEFORE_S:g} s before the fault until {CLEAN_AFTER_S:g} s
  after its edge answered again.
- "{BEGUN}": sent to any other edge, from {BEFORE_S:g} s before the fault until {CLEAN_AFTER_S:g} s after it.
- "{GOSSIP}": sent to any other edge, and answered with an error or not at all, within {GOSSIP_S:g} s after an engine
  that was cut off from the gossip has returned to it. In that time Docker's overlay networks may miss nodes that are
  well (moby/moby#53141).
- A drain, a slow node, a cut of the control plane, scaling, rolling and the kill of the controller excuse nothing at
  other edges.
"""
