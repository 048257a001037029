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


_NOT_SAMPLED = "00"
_NO_SPANS: list[RequestSpan] = []
"""Of a request that has ended: nothing is added to it."""


class TraceEvent(NamedTuple):
    """Something that happened at one moment of a span."""

    at: float
    """In `time.monotonic()` seconds."""
    name: str
    detail: str = ""


class RequestSpan:
    """One piece of the work for a request, from `began` to `ended`, in `time.monotonic()` seconds."""

    # Class attributes: few spans change them, so making one need not set them.
    ended: float | None = None
    """None = it had not ended when the request did."""
    parent_id = ""
    """"" = the span of the request in this process."""
    status = ""
    """"OK", or what it ended with in its place."""
    attributes: dict[str, str | int | float | bool] | None = None
    _called: tuple[str, str] | None = None
    """Of a call: service and replica."""
    events: list[TraceEvent] | None = None
    members: Sequence[RequestTrace] = ()
    """Of a batch: the requests in it. Each has this span in its trace."""
    _span_id = ""

    def __init__(self, kind: Kind, name: str, began: float, parent_id: str = "", span_id: str = "") -> None:
        self.kind = kind
        self.name = name
        self.began = began
        if parent_id:
            self.parent_id = parent_id
        if span_id:
            self._span_id = span_id

    @property
    def span_id(self) -> str:
        """16 hex digits."""
        if not self._span_id:
            self._span_id = _new_span_id()
        return self._span_id

    @property
    def facts(self) -> dict[str, str | int | float | bool]:
        """Its attributes; of a call, what it reached."""
        if self._called is not None:
            service, replica = self._called
            return {"service": service, "replica": replica} if replica else {"service": service}
        return self.attributes or {}

    def event(self, at: float, name: str, detail: str = "") -> None:
        """Add an event."""
        if self.events is None:
            self.events = []
        if len(self.events) < MAX_EVENTS:
            self.events.append(TraceEvent(at, name, detail[:MAX_TEXT]))

    def end_call(self, at: float, status: str, service: str, replica: str) -> None:
        """End that of a call. `replica`: "" = the call reached none."""
        if self.ended is None:
            self.ended, self.status, self._called = at, status, (service, replica)

    def end(self, at: float, status: str = "OK", **attributes: str | int | float | bool) -> None:
        """End it; the first end counts."""
        if self.ended is None:
            self.ended, self.status = at, status
            if attributes:
                self.attributes = attributes


class RequestTrace:
    """The part of a request's trace that this process has. What its caller said is read when something asks for it."""

    # Class attributes: few requests change them, so making one need not set them.
    start: str | None = None
    """When HAProxy had the request, by its header x-request-start; None = it did not come from there."""
    left_out = 0
    """Spans above MAX_SPANS."""
    lasts = False
    """Whether the request is a long-lived connection, which is not slow because it lasts."""
    has_ended = False
    """Work that outlives its request adds nothing to its trace."""
    _trace_id = ""
    _parent_id = ""
    _span_id = ""

    def __init__(self, given: str | None, sampled: bool | None = None, sampler: TraceSampler | None = None) -> None:
        """`given`: the W3C trace context of the caller, which may be none; None = the trace begins here. `sampled`:
        None = the sampler decides.
        """
        self._given = given
        self._sampled = sampled
        self._sampler = sampler
        self.spans: list[RequestSpan] = []

    @property
    def sampled(self) -> bool:
        """Whether it is in the sample."""
        if self._sampled is None:
            self._sampled = self._sampler is not None and self._sampler.takes(self)
        return self._sampled

    @property
    def given_flags(self) -> str:
        """The flags of the caller's context, two hex digits; "" = there is none."""
        return (self._given or "")[53:55] if self.parent_id else ""

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        if not self._trace_id:
            self._read()
        return self._trace_id

    @property
    def parent_id(self) -> str:
        """Of the caller's span: 16 hex digits, "" = the trace begins here."""
        if not self._trace_id:
            self._read()
        return self._parent_id

    def _read(self) -> None:
        given = self._given
        if given is not None and _TRACEPARENT.fullmatch(given):
            self._trace_id, self._parent_id = given[3:35], given[36:52]
        else:
            self._trace_id = _new_trace_id()

    @property
    def span_id(self) -> str:
        """Of the request's own span in this process: 16 hex digits."""
        if not self._span_id:
            self._span_id = _new_span_id()
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
        spans = self.spans  # before the question: a thread may add one while the request ends
        if self.has_ended:
            return
        if len(spans) < MAX_SPANS:
            spans.append(span)
        else:
            self.left_out += 1

    def end(self) -> None:
        """The request has ended. What is kept of it has the list of its spans."""
        self.has_ended = True
        self.spans = _NO_SPANS


class TraceSampler(NamedTuple):
    """OpenTelemetry's samplers, by their standard words."""

    ratio: float = 0.0
    """Share of the requests whose trace begins here."""
    follows: bool = True
    """Whether a caller's decision counts for its requests."""

    def begin(self, traceparent: str | None) -> RequestTrace:
        """The trace of a request that arrives."""
        followed = traceparent if self.follows else None
        # Of nearly all requests it is known now; the others' contexts are read later.
        is_outside = not self.ratio and (followed is None or followed[53:55] == _NOT_SAMPLED)
        return RequestTrace(traceparent, False if is_outside else None, self)

    def takes(self, trace: RequestTrace) -> bool:
        """Whether a request is in the sample."""
        if self.follows and (flags := trace.given_flags):
            return bool(int(flags, 16) & 1)
        # As in OpenTelemetry's TraceIdRatioBased, so that all parts decide alike.
        return self.ratio >= 1 or int(trace.trace_id[16:], 16) < self.ratio * 2**64


def _new_trace_id() -> str:
    return (random.getrandbits(128) or 1).to_bytes(16).hex()  # an id of zeros alone is none


def _new_span_id() -> str:
    return (random.getrandbits(64) or 1).to_bytes(8).hex()


def _no_user_span(trace: RequestTrace) -> str:
    return ""


current_user_span: Callable[[RequestTrace], str] = _no_user_span
"""The id of the user's own span, in this trace, that the running code is in; "" = none. See `export`."""


def use_user_spans(current: Callable[[RequestTrace], str]) -> None:
    """Let `current` say which of the user's own spans the running code is in."""
    global current_user_span  # noqa: PLW0603 - spans are made without any other argument
    current_user_span = current
