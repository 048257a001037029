"""What a page shows of the stack, in parts: each is sent again when it has changed. Pure.

| part | value |
|---|---|
| stack | StackPart: the stack without its services |
| plan | PlanDocument |
| service/<name> | Service |
| event/<number> | EventDocument: of the newest EVENTS |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..model.actions import Action
from ..storage.rows import StoredEvent
from . import documents
from .records.answers import LivePart, PartValue, StackPart
from .records.document import as_json
from .view import View

EVENTS = 200
"""More are at /api/v1/events."""


@dataclass(frozen=True, slots=True)
class SentPart:
    """One part, and the event of a stream (`data: ...`) that has it."""

    value: PartValue | None
    text: str

    @classmethod
    def of(cls, name: str, value: PartValue | None) -> SentPart:
        """The part with this value; None = there is none any more."""
        return cls(value, f"data: {json.dumps(LivePart(name, value), default=as_json)}\n\n")


class LiveParts:
    """The parts as they are now. What has not changed keeps its text, which is made once for all pages."""

    def __init__(self, grafana_port: int | None = None) -> None:
        self._grafana_port = grafana_port
        self._view: View | None = None
        self._rows: Mapping[str, PartValue] = {}
        self._parts: Mapping[str, SentPart] = {}

    def now(self, view: View, in_progress: tuple[Action, ...], events: Iterable[StoredEvent]) -> Mapping[str, SentPart]:
        """The parts by their names."""
        if view is not self._view:
            self._view = view
            # The time of the look changes with each look.
            rows = {f"service/{row.name}": replace(row, at=0.0) for row in view.services}
            self._rows = {"stack": _stack(view, self._grafana_port), **rows}
        values: dict[str, PartValue] = {
            **self._rows,
            "plan": documents.plan_document(view, in_progress),
            **{f"event/{one.seq}": documents.event_document(one) for one in events},
        }
        known = self._parts
        self._parts = {
            name: known[name] if name in known and known[name].value == value else SentPart.of(name, value)
            for name, value in values.items()
        }
        return self._parts


def changes(sent: Mapping[str, SentPart], now: Mapping[str, SentPart]) -> Iterator[str]:
    """The events of the stream for a page that has these parts. Events that have become old are left out."""
    yield from (part.text for name, part in now.items() if sent.get(name) is not part)
    gone = (name for name in sent.keys() - now.keys() if not name.startswith("event/"))
    yield from (SentPart.of(name, None).text for name in sorted(gone))


def _stack(view: View, grafana_port: int | None) -> StackPart:
    return StackPart(
        project=view.project,
        machine=documents.machine_document(view),
        gpus=view.gpus,
        nodes=view.nodes,
        gpu_memory_problem=view.gpu_memory_problem,
        spec_problems=view.spec_problems,
        notices=view.notices,
        settled=view.desired is not None,
        engine_reachable=view.engine_reachable,
        haproxy_reachable=view.haproxy_reachable,
        grafana_port=grafana_port,
    )
