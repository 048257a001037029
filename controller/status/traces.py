"""Joins what replicas keep into one trace for each request. Pure; nothing that a replica tells is trusted."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..model.text import told
from ..observe.traces import KeptByReplica
from .records.traces import SpanEvent, TracePart, TraceSpan, WholeTrace

MOST_TRACES = 200
MOST_OF_ONE = 128
"""Traces of one replica that are read, and spans of one request at a replica."""
MOST_EVENTS = 32
MOST_ATTRIBUTES = 16
LATEST = 2.0**40
"""A later time, in seconds since 1970, is none."""

_ID = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}|")


def joined(
    kept: Iterable[KeptByReplica], *, service: str = "", trace: str = "", limit: int = 50
) -> tuple[WholeTrace, ...]:
    """The newest traces first: of all services or of one, or one alone by its id or its request's id."""
    parts: dict[str, list[TracePart]] = defaultdict(list)
    for replica in kept:
        for told_trace in replica.traces[:MOST_OF_ONE]:
            if (part := _part(replica, told_trace)) is not None:
                parts[part.trace].append(part)
    whole = [_whole(each) for each in parts.values()]
    chosen = [
        each
        for each in whole
        if (not service or any(part.service == service for part in each.parts))
        and (not trace or trace == each.trace or any(trace == part.request for part in each.parts))
    ]
    chosen.sort(key=lambda each: -each.began)
    return tuple(chosen[:limit])


def _whole(parts: Sequence[TracePart]) -> WholeTrace:
    """A trace of its parts; the first part is that of the request that came from outside."""
    spans = {part.span for part in parts} | {span.span for part in parts for span in part.spans}
    ordered = sorted(parts, key=lambda part: (_outer(part).parent in spans, part.began))
    first, outer = ordered[0], _outer(ordered[0])
    return WholeTrace(
        first.trace, first.request, first.service, first.name, first.status, outer.began, outer.seconds, tuple(ordered)
    )


def _outer(part: TracePart) -> TracePart | TraceSpan:
    """What a request has come in by: HAProxy's span, or the replica's own."""
    return next((span for span in part.spans if span.kind == "proxy" and span.span == part.parent), part)


def _part(replica: KeptByReplica, found: Any) -> TracePart | None:
    """What one replica tells of one request; None for what is no trace."""
    try:
        trace, span = _id(found["trace"]), _id(found["span"])
        if len(trace) != 32 or len(span) != 16:
            return None
        return TracePart(
            trace=trace,
            span=span,
            parent=_id(found["parent"]),
            request=told(str(found["request"])),
            service=replica.service,
            replica=replica.replica,
            why=told(str(found["why"])),
            name=told(str(found["name"])),
            status=told(str(found["status"])),
            began=_number(found["began"]),
            seconds=_number(found["seconds"]),
            spans=tuple(_span(each) for each in _list(found["spans"])[:MOST_OF_ONE]),
            left_out=int(_number(found["left_out"])),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _span(found: Mapping[str, Any]) -> TraceSpan:
    attributes = found["attributes"]
    if not isinstance(attributes, Mapping):
        raise TypeError
    return TraceSpan(
        span=_id(found["span"]),
        parent=_id(found["parent"]),
        kind=told(str(found["kind"])),
        name=told(str(found["name"])),
        status=told(str(found["status"])),
        began=_number(found["began"]),
        seconds=_number(found["seconds"]),
        attributes={told(str(key)): told(str(value)) for key, value in [*attributes.items()][:MOST_ATTRIBUTES]},
        events=tuple(
            SpanEvent(_number(each["at"]), told(str(each["name"])), told(str(each["detail"])))
            for each in _list(found["events"])[:MOST_EVENTS]
        ),
        links=tuple(_id(each) for each in _list(found["links"])[:MOST_OF_ONE]),
    )


def _id(found: object) -> str:
    if not isinstance(found, str) or not _ID.fullmatch(found):
        raise ValueError
    return found


def _number(found: object) -> float:
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found <= LATEST:
        raise ValueError
    return float(found)


def _list(found: object) -> list[Any]:
    if not isinstance(found, list):
        raise TypeError
    return found
