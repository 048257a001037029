"""The documents about traces of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .document import Document


@dataclass(frozen=True, slots=True)
class SpanEvent(Document):
    """Something that happened at one moment of a span."""

    at: float
    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class TraceSpan(Document):
    """A piece of the work for a request at one replica."""

    span: str
    parent: str
    """The id of the span that it belongs to."""
    kind: str
    """proxy: HAProxy, with the wait before the replica had the request; client: a call of another service; batch;
    engine; user: a span of the service's own code."""
    name: str
    status: str
    """OK, or what it ended with in its place; "not ended" where the request ended first. HAProxy's is the request's."""
    began: float
    seconds: float
    attributes: Mapping[str, str]
    events: tuple[SpanEvent, ...]
    links: tuple[str, ...]
    """Ids of the traces of other requests that shared the work."""


@dataclass(frozen=True, slots=True)
class TracePart(Document):
    """What one replica did for a request."""

    trace: str
    span: str
    parent: str
    """The id of the span that called it, of HAProxy or of a service; "" where nothing of the stack or its client said
    so."""
    request: str
    service: str
    replica: str
    why: str
    """Why it is kept: failed, slow or sampled."""
    name: str
    """The method, or the route."""
    status: str
    """The HTTP status, or the name of the gRPC status."""
    began: float
    seconds: float
    spans: tuple[TraceSpan, ...]
    left_out: int
    """Spans above those that a replica keeps."""


@dataclass(frozen=True, slots=True)
class WholeTrace(Document):
    """A request through the stack, as far as its replicas keep it. The first part has the request from outside."""

    trace: str
    request: str
    service: str
    name: str
    status: str
    began: float
    seconds: float
    parts: tuple[TracePart, ...]


@dataclass(frozen=True, slots=True)
class Traces(Document):
    """The newest traces."""

    at: float
    traces: tuple[WholeTrace, ...]
    silent: tuple[str, ...]
    """Replicas that did not say which they keep."""
