"""What one process does for one request: its own span, and those of the calls and batches inside it. Pure.

Every request has a `RequestTrace`, and nearly all of them are forgotten at their end. So making one is cheap: ids are
made when something asks for them, times are those of `time.monotonic()`, and nothing is formatted before it is kept.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

Kind = Literal["proxy", "server", "client", "batch", "engine", "user"]

MAX_SPANS = 64
"""Spans of one request in one process; those after them are counted."""

MAX_EVENTS = 8
"""Events of one span; those after them are left out."""

MAX_TEXT = 200
"""Characters of a name, a detail or an attribute."""

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
"""W3C Trace Context, https://www.w3.org/TR/trace-context/#traceparent-header, of this version or a later one."""


class TraceEvent(NamedTuple):
    """Something that happened at one moment of a span."""

    at: float
    """In `time.monotonic()` seconds."""
    name: str
    detail: str = ""


class RequestSpan:
    """One piece of the work for a request, from `began` to `ended`, in `time.monotonic()` seconds."""

    __slots__ = ("_span_id", "attributes", "began", "ended", "events", "kind", "members", "name", "parent_id", "status")

    def __init__(self, kind: Kind, name: str, began: float, parent_id: str = "", span_id: str = "") -> None:
        self.kind = kind
        self.name = name
        self.began = began
        self.ended: float | None = None
        """None = it had not ended when the request did."""
        self.parent_id = parent_id
        """"" = the span of the request in this process."""
        self._span_id = span_id
        self.status = ""
        """"OK", or what it ended with in its place."""
        self.attributes: dict[str, str | int | float | bool] | None = None
        self.events: list[TraceEvent] | None = None
        self.members: Sequence[RequestTrace] = ()
        """Of a batch: the requests in it. Each has this span in its trace."""

    @property
    def span_id(self) -> str:
        """16 hex digits."""
        if not self._span_id:
            self._span_id = _id(64)
        return self._span_id

    def event(self, at: float, name: str, detail: str = "") -> None:
        """Add an event."""
        if self.events is None:
            self.events = []
        if len(self.events) < MAX_EVENTS:
            self.events.append(TraceEvent(at, name, detail[:MAX_TEXT]))

    def end(self, at: float, status: str = "OK", **attributes: str | float | bool) -> None:
        """End it; the first end counts."""
        if self.ended is None:
            self.ended, self.status = at, status
            if attributes:
                self.attributes = {**(self.attributes or {}), **attributes}


class RequestTrace:
    """The part of a request's trace that this process has."""

    __slots__ = ("_span_id", "_trace_id", "has_ended", "lasts", "left_out", "parent_id", "sampled", "spans", "start")

    def __init__(self, traceparent: str | None, sampled: bool) -> None:
        """`traceparent`: a valid one, of the caller; None = the trace begins here."""
        self._trace_id = "" if traceparent is None else traceparent[3:35]
        self.parent_id = "" if traceparent is None else traceparent[36:52]
        self._span_id = ""
        self.sampled = sampled
        self.spans: list[RequestSpan] = []
        self.left_out = 0
        """Spans above MAX_SPANS."""
        self.start: str | None = None
        """When HAProxy had the request, by its header x-request-start; None = it did not come from there."""
        self.lasts = False
        """Whether the request is a long-lived connection, which is not slow because it lasts."""
        self.has_ended = False
        """Work that outlives its request adds nothing to its trace."""

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        if not self._trace_id:
            self._trace_id = _id(128)
        return self._trace_id

    @property
    def span_id(self) -> str:
        """Of the request's own span in this process: 16 hex digits."""
        if not self._span_id:
            self._span_id = _id(64)
        return self._span_id

    def traceparent(self, span_id: str = "") -> str:
        """The W3C trace context for a callee. `span_id`: of the span that calls; "" = the request's own."""
        return f"00-{self.trace_id}-{span_id or self.span_id}-{'01' if self.sampled else '00'}"

    def span(self, kind: Kind, name: str, began: float) -> RequestSpan:
        """Begin a span inside the request's."""
        span = RequestSpan(kind, name, began, current_user_span(self))
        self.add(span)
        return span

    def add(self, span: RequestSpan) -> None:
        """Add a span, unless there are too many."""
        if self.has_ended:
            return
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self.left_out += 1

    def end(self) -> None:
        """The request has ended. What is kept of it was copied."""
        self.has_ended = True
        self.spans = []


class TraceSampler(NamedTuple):
    """OpenTelemetry's samplers, by their standard words."""

    ratio: float = 0.0
    """Share of the requests whose trace begins here."""
    follows: bool = True
    """Whether a caller's decision counts for its requests."""

    def begin(self, traceparent: str | None) -> RequestTrace:
        """The trace of a request that arrives."""
        if traceparent is not None and not _TRACEPARENT.fullmatch(traceparent):
            traceparent = None
        trace = RequestTrace(traceparent, sampled=False)
        if traceparent is not None and self.follows:
            trace.sampled = bool(int(traceparent[53:55], 16) & 1)
        elif self.ratio > 0:
            # As in OpenTelemetry's TraceIdRatioBased, so that all parts decide alike.
            trace.sampled = self.ratio >= 1 or int(trace.trace_id[16:], 16) < self.ratio * 2**64
        return trace


def _id(bits: int) -> str:
    return f"{random.getrandbits(bits) or 1:0{bits // 4}x}"  # an id of zeros alone is none


def _no_user_span(trace: RequestTrace) -> str:
    return ""


current_user_span: Callable[[RequestTrace], str] = _no_user_span
"""The id of the user's own span, in this trace, that the running code is in; "" = none. See `export`."""


def use_user_spans(current: Callable[[RequestTrace], str]) -> None:
    """Let `current` say which of the user's own spans the running code is in."""
    global current_user_span  # noqa: PLW0603 - spans are made without any other argument
    current_user_span = current
