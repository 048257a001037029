"""`pierhead why SERVICE`: one page that explains a service's state. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ..model.text import age
from . import feeds, rows, tables
from .output import with_members

if TYPE_CHECKING:
    from ..status.records.answers import ActionDocument, EventDocument, LatestTraffic, PlanDocument, StepDocument
    from ..status.records.services import Service

EVENTS_SHOWN = 8
INDENT = 2


@dataclass(frozen=True, slots=True)
class Case:
    """The page's input: the service's row, the plan, the service's events (oldest first), its traffic."""

    row: Service
    plan: PlanDocument
    events: Sequence[EventDocument]
    traffic: LatestTraffic

    @property
    def steps(self) -> list[tuple[ActionDocument | StepDocument, bool]]:
        """The service's actions, and whether each is in progress; then come those of the plan."""
        found: list[tuple[ActionDocument | StepDocument, bool]] = [(step, True) for step in self.plan.in_progress]
        found += [(step, False) for step in self.plan.steps]
        return [(step, now) for step, now in found if step.service == self.row.name]

    def as_json(self) -> dict[str, object]:
        """Return the page's content as data."""
        return {
            "service": self.row,
            "who_decides": self.row.who_decides,
            "obstacles": [obstacle.words for obstacle in self.row.obstacles],
            "steps": [with_members(step, now=now) for step, now in self.steps],
            "traffic": self.traffic,
            "last_failure": feeds.last_failure(self.events),
            "events": self.events[-EVENTS_SHOWN:],
        }


def page(case: Case, width: int) -> Iterator[RenderableType]:
    """Yield the page."""
    row, obstacles_found = case.row, [obstacle.words for obstacle in case.row.obstacles]
    state = row.state
    words = "" if obstacles_found or row.converged else row.summary
    ready = f"{row.ready} of {row.wanted} replicas ready" + (f"; {words}" if words else "")
    yield Text.assemble((row.name, "bold"), " is ", (state, tables.STYLES.get(state, "")), f": {ready}")
    yield from _indented(_facts(case))
    yield from _section("How many", [f"{row.wanted} wanted: {row.who_decides}"])
    yield from _section("What is in the way", obstacles_found)
    yield from _section("Last failure", _failure(case))
    yield from _section("Rollout", _rollout(row))
    yield from _section(
        "Being done, and next", [f"{'now: ' if now else ''}{step.does}: {step.cause}" for step, now in case.steps]
    )
    if row.replicas:
        yield from _heading("Replicas")
        for renderable in tables.replicas([row], width).render(width - INDENT):
            is_gap = isinstance(renderable, Text) and not renderable.plain  # padded, it would vanish
            yield renderable if is_gap else Padding(renderable, (0, 0, 0, INDENT), expand=False)
    lines = [line for event in case.events[-EVENTS_SHOWN:] for line in _event(event)]
    yield from _section(f"Last events (`pierhead events --service {row.name}` has all)", lines)


def _facts(case: Case) -> list[str]:
    row, traffic = case.row, case.traffic
    reached = [row.route] if row.route else []
    reached += [f"gRPC {name}" for name in row.grpc_services]
    measured = f"p50 {rows.seconds(traffic.p50_s)}, p99 {rows.seconds(traffic.p99_s)}"
    load = f"in flight {rows.in_flight(row)}, waiting {rows.waiting(row)}"
    return [
        f"version {rows.version(row)}, image {row.image or '(no longer in the compose files)'}",
        f"from outside: {', '.join(reached) or 'not reachable (no route, no grpc_services)'}",
        f"{load}; in the last 30 s {rows.rate(traffic.rate)} requests/s, {measured}",
    ]


def _failure(case: Case) -> list[str]:
    """The newest failed replica with the end of its log; nothing once the service has recovered."""
    event = feeds.last_failure(case.events)
    is_over = case.row.state == "HEALTHY" and not case.row.failure
    if event is None or is_over:
        return []
    first, *log = event.message.splitlines() or [""]
    ago = age(event.last_at, case.row.at)
    return [f"{ago} ago: {first}", *(f"  | {line}" for line in log)]


def _rollout(row: Service) -> list[str]:
    lines = []
    if row.rollout:
        rollout = row.rollout
        lasting = f" (for {age(rollout.since, row.at)})" if rollout.since else ""
        lines.append(f"{rollout.progress}; {rollout.message}{lasting}")
        lines += _ways_on(row.name, rollout.phase)
    if row.untried and not row.wanted:
        lines.append(f"version {rows.version(row)} was not tried yet: it will be when the service wakes")
    rejected = row.rejected
    if rejected:
        ago = f" {age(rejected.at, row.at)} ago" if rejected.at else ""
        how = "refused" if rejected.is_refused else "rejected"
        lines.append(f"version {rejected.version} was {how}{ago}: {rejected.reason}")
        if not rejected.is_refused:
            lines.append(f"`pierhead deploy {row.name}` tries it again")
    return lines


def _ways_on(name: str, phase: str) -> list[str]:
    """What a user can do about a rollout: abort it unless it is rolled back already, promote it while it is watched."""
    if phase == "ROLLING_BACK":
        return []
    ways = [f"`pierhead abort {name}` ends it"]
    if phase == "BAKING":
        ways.append(f"`pierhead promote {name}` does not wait any longer")
    return ["; ".join(ways)]


def _event(event: EventDocument) -> list[str]:
    first, *rest = feeds.event_line(event).splitlines()
    return [first, *([f"{' ' * 28}({len(rest)} more lines)"] if rest else [])]


def _section(title: str, lines: Sequence[str]) -> Iterator[RenderableType]:
    if lines:
        yield from _heading(title)
        yield from _indented(lines)


def _heading(title: str) -> Iterator[RenderableType]:
    yield Text("")
    yield Text(title, style="bold")


def _indented(lines: Sequence[str]) -> Iterator[RenderableType]:
    for line in lines:
        yield Padding(Text(line), (0, 0, 0, INDENT), expand=False)
