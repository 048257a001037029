"""Keeps the last traces of a replica's requests that failed, were slow or are in the sample, for `GET /traces`."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pierhead.settings import Settings
from pierhead.trace import MAX_TEXT, RequestSpan, RequestTrace, TraceSampler

if TYPE_CHECKING:
    from pierhead.tracing.export import TraceExport

Why = Literal["failed", "slow", "sampled"]

MOST_KEPT = 32
"""Requests for each reason."""

MOST_LINKS = 16
"""Other requests of a batch that its span names."""

MOST_BYTES = 2 * 1024 * 1024
"""Of the page; the older requests are left out above it."""

FAILURES = frozenset({"UNKNOWN", "INTERNAL", "DATA_LOSS", "UNIMPLEMENTED", "DEADLINE_EXCEEDED", "UNAVAILABLE"})
"""gRPC statuses that are not the caller's fault; HTTP's are those from 500 on."""


LONGEST_WAIT_S = 86_400.0
"""Longer waits do not count: another program wrote the header, or a clock is wrong."""


class KeptTrace(NamedTuple):
    """The trace of one request in this process, at the request's end."""

    why: Why
    trace: RequestTrace
    spans: list[RequestSpan]
    links: Mapping[RequestSpan, list[tuple[str, str]]]
    """By the span of a batch: trace ids and span ids of the other requests in it."""
    method: str
    status: str
    request_id: str
    began: float
    """In seconds since 1970, by this machine's clock when the request ended."""
    seconds: float
    offset: float
    """What to add to `time.monotonic()` for seconds since 1970."""
    proxy: RequestSpan | None = None
    """From the moment when HAProxy had the request until the request's end; None = it did not come from there."""

    @property
    def failed(self) -> bool:
        """Whether it is not its caller's fault."""
        return is_failure(self.status)

    @property
    def parent_id(self) -> str:
        """The span that the request's own one belongs to; "" = none."""
        return self.trace.parent_id if self.proxy is None else self.proxy.span_id


class TraceKeeper:
    """The last traces of one replica."""

    def __init__(
        self,
        settings: Settings,
        sampler: TraceSampler,
        export: TraceExport | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`export`: what sends kept traces to a collector."""
        self._sampler = sampler
        self.begin: Callable[[str | None], RequestTrace] = sampler.begin if export is None else self._begin
        self._slow_s = settings.slow_request_s
        self._shares_clock = bool(settings.socket)
        """With HAProxy, which is on this machine. Elsewhere a wrong clock would make every request slow."""
        self._names = {"service": settings.service, "replica": settings.replica}
        self._export = export
        self._clock = clock
        self._kept: dict[Why, deque[KeptTrace]] = {
            "failed": deque(maxlen=MOST_KEPT), "slow": deque(maxlen=MOST_KEPT), "sampled": deque(maxlen=MOST_KEPT),
        }  # fmt: skip

    def _begin(self, traceparent: str | None) -> RequestTrace:
        trace = self._sampler.begin(traceparent)
        if self._export is not None:
            self._export.enter(trace)
        return trace

    def finished(self, trace: RequestTrace, method: str, status: str, seconds: float, request_id: str) -> None:
        """Keep a request's trace, or forget it."""
        now = self._clock()
        waited: float | None = None
        why: Why | None = None
        if trace.start is not None:
            waited = _waited(trace.start, now - seconds)
        lasted = seconds + waited if waited is not None and self._shares_clock else seconds
        if is_failure(status):
            why = "failed"
        elif lasted >= self._slow_s and not trace.lasts:
            why = "slow"
        elif trace.sampled:
            why = "sampled"
        if why is not None:
            began, offset, links = now - seconds, now - time.monotonic(), _links(trace)
            proxy = None
            if waited is not None:
                proxy = RequestSpan("proxy", "HAProxy", began - waited - offset, trace.parent_id)
                proxy.end(now - offset, status, waited_s=round(waited, 6))
            kept = KeptTrace(why, trace, trace.spans, links, method, status, request_id, began, seconds, offset, proxy)
            self._kept[why].append(kept)
            if self._export is not None:
                self._export.send(kept)
        trace.end()

    def page(self) -> bytes:
        """The content of /traces as JSON: {"traces": [...]}, the last one first."""
        kept = sorted((each for some in self._kept.values() for each in some), key=lambda each: -each.began)
        written: list[str] = []
        size = 0
        for each in kept:
            text = json.dumps({**self._names, **_document(each)})
            size += len(text)
            if size > MOST_BYTES:
                break
            written.append(text)
        return f'{{"traces": [{", ".join(written)}]}}'.encode()


def _waited(start: str, began: float) -> float | None:
    """Seconds that a request was in HAProxy before it was here; None where the header does not say. The clock of
    HAProxy's machine may be another one: a little less than nothing is nothing.
    """
    digits = start[2:]
    if len(digits) != 16 or not (digits.isascii() and digits.isdecimal()):
        return None
    waited = began - int(digits) / 1e6
    return max(0.0, waited) if -0.1 <= waited <= LONGEST_WAIT_S else None


def is_failure(status: str) -> bool:
    """Whether an HTTP status or the name of a gRPC one is not the caller's fault."""
    return status in FAILURES or (len(status) == 3 and status.startswith("5"))


def _links(trace: RequestTrace) -> dict[RequestSpan, list[tuple[str, str]]]:
    """As texts: a trace that is kept must not keep the traces of other requests in memory, and these others still."""
    return {
        span: [(other.trace_id, other.span_id) for other in span.members[: MOST_LINKS + 1] if other is not trace]
        for span in trace.spans
        if span.members
    }


def _document(kept: KeptTrace) -> Mapping[str, Any]:
    trace = kept.trace
    return {
        "trace": trace.trace_id,
        "span": trace.span_id,
        "parent": kept.parent_id,
        "request": kept.request_id,
        "why": kept.why,
        "name": kept.method[:MAX_TEXT],
        "status": kept.status,
        "began": round(kept.began, 6),
        "seconds": round(kept.seconds, 6),
        "spans": [
            *([] if kept.proxy is None else [_span(kept.proxy, kept, trace.parent_id)]),
            *(_span(each, kept, each.parent_id or trace.span_id) for each in kept.spans),
        ],
        "left_out": trace.left_out,
    }


def _span(span: RequestSpan, kept: KeptTrace, parent: str) -> Mapping[str, Any]:
    began = span.began + kept.offset
    ended = kept.began + kept.seconds if span.ended is None else span.ended + kept.offset
    return {
        "span": span.span_id,
        "parent": parent,
        "kind": span.kind,
        "name": span.name[:MAX_TEXT],
        "status": span.status or "not ended",
        "began": round(began, 6),
        "seconds": round(max(0.0, ended - began), 6),
        "attributes": span.facts,
        "events": [
            {"at": round(at + kept.offset, 6), "name": name, "detail": detail} for at, name, detail in span.events or ()
        ],
        "links": [trace_id for trace_id, _ in kept.links.get(span, ())],
    }
