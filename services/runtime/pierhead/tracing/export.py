"""Traces to a collector, by OpenTelemetry's SDK (`pierhead[otel]`) and its standard variables.

The SDK has the queue, the thread that sends, and users' own spans. It is imported where traces are exported, and by
nothing else in the runtime. What is wrong with it is logged: a service serves without its traces, too.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import grpc

from pierhead.request import current_request
from pierhead.settings import Settings
from pierhead.trace import MAX_TEXT, RequestSpan, RequestTrace, use_user_spans

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.trace import SpanContext, Status

    from pierhead.tracing.keeper import KeptTrace

logger = logging.getLogger("pierhead")

FLUSH_S = 2.0
"""How long the end of a process waits for its last traces to reach the collector."""

MAX_ATTRIBUTES: Final = 16
"""Of a user's span, as the replica keeps it."""

NO_SDK: Final = (
    "traces are not exported: OpenTelemetry's SDK is not installed. Install pierhead[otel] in the service's image, or "
    "set OTEL_SDK_DISABLED=true for the service"
)


class TraceExport:
    """Sends a replica's kept traces to the collector, and makes users' own spans their requests' own."""

    def __init__(self, settings: Settings) -> None:
        """Raises ImportError where the SDK is not installed, and what the SDK raises for its variables."""
        from opentelemetry.context import attach
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.trace import NonRecordingSpan, set_span_in_context

        names = {
            "service.name": settings.service,
            "service.instance.id": settings.replica,
            "service.version": settings.version,
            "service.namespace": settings.project,
        }
        self._resource = Resource.create({name: value for name, value in names.items() if value})
        self._queue = _queue(settings, self._resource)
        self._attach, self._span, self._in_context = attach, NonRecordingSpan, set_span_in_context
        self._failed = False

    def enter(self, trace: RequestTrace) -> None:
        """Make spans that the running code begins from now on the request's. Call it in the request's own context."""
        own = _context(trace.trace_id, trace.span_id, is_remote=False, sampled=trace.sampled)
        self._attach(self._in_context(self._span(own)))

    def send(self, kept: KeptTrace) -> None:
        """Queue a trace's spans; the SDK drops those for which its queue has no room. A failure is logged once."""
        try:
            for span in self._spans(kept):
                self._queue.on_end(span)
        except Exception:
            if not self._failed:
                self._failed = True
                logger.exception("a trace could not be exported; further failures are not logged")

    def _spans(self, kept: KeptTrace) -> Iterator[ReadableSpan]:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import Link, SpanKind

        trace, proxy, ended = kept.trace, kept.proxy, kept.began + kept.seconds
        if proxy is not None:
            yield ReadableSpan(
                proxy.name,
                _context(trace.trace_id, proxy.span_id, is_remote=False),
                _context(trace.trace_id, proxy.parent_id) if proxy.parent_id else None,
                self._resource,
                {**proxy.facts, "pierhead.request_id": kept.request_id},
                kind=SpanKind.INTERNAL,  # collectors count requests by their SERVER spans
                status=_status(kept.failed),
                start_time=_ns(proxy.began + kept.offset),
                end_time=_ns(ended),
            )
        yield ReadableSpan(
            kept.method,
            _context(trace.trace_id, trace.span_id, is_remote=False),
            _context(trace.trace_id, kept.parent_id) if kept.parent_id else None,
            self._resource,
            {**_named(kept.method, kept.status), "pierhead.request_id": kept.request_id, "pierhead.kept": kept.why},
            kind=SpanKind.SERVER,
            status=_status(kept.failed),
            start_time=_ns(kept.began),
            end_time=_ns(ended),
        )
        for span in kept.spans:
            if span.kind == "user":
                continue  # the SDK itself sends it
            yield ReadableSpan(
                span.name,
                _context(trace.trace_id, span.span_id, is_remote=False),
                _context(trace.trace_id, span.parent_id or trace.span_id, is_remote=False),
                self._resource,
                {**_named(span.name, span.status), **span.facts},
                [Event(name, {"detail": detail}, _ns(at + kept.offset)) for at, name, detail in span.events or ()],
                [Link(_context(*other)) for other in kept.links.get(span, ())],
                SpanKind.CLIENT if span.kind == "client" else SpanKind.INTERNAL,
                status=_status(span.status not in ("OK", "")),
                start_time=_ns(span.began + kept.offset),
                end_time=_ns(ended if span.ended is None else span.ended + kept.offset),
            )


_made: dict[tuple[str, str], TraceExport | None] = {}


def exporter(settings: Settings) -> TraceExport | None:
    """What sends a replica's traces to where its environment says. None where it says nothing, and where that cannot be
    done, which is logged.
    """
    if settings.traces is None or not (settings.trace_collector or settings.trace_exporter):
        return None
    key = settings.service, settings.replica  # a process may have several
    if key not in _made:
        try:
            _made[key] = TraceExport(settings)
        except Exception as error:  # users' code among them
            no_sdk = isinstance(error, ImportError) and str(error.name).startswith("opentelemetry")
            why = NO_SDK if no_sdk else f"traces are not exported: {type(error).__name__}: {error}"
            logger.warning("%s", why)
            _made[key] = None
    return _made[key]


_queues: list[SpanProcessor] = []


def _queue(settings: Settings, resource: Resource) -> SpanProcessor:
    """The queue of this process, with its thread that sends. `resource`: of users' own spans, which it also gets."""
    if not _queues:
        _queues.append(_new_queue(settings, resource))
    return _queues[0]


def _new_queue(settings: Settings, resource: Resource) -> SpanProcessor:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor, TracerProvider

    queue = SynchronousMultiSpanProcessor()  # type: ignore[no-untyped-call]
    for each in _processors(settings):
        queue.add_span_processor(each)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(_user_spans())
    provider.add_span_processor(queue)
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # the user has set none
        trace.set_tracer_provider(provider)
    use_user_spans(_current_user_span)
    _flush_at_exit(provider)
    return queue


def _processors(settings: Settings) -> list[SpanProcessor]:
    """Those of the collector, and those that the service has made itself. Raises TypeError for what is none."""
    from opentelemetry.sdk.trace import SpanProcessor

    found: list[SpanProcessor] = []
    if settings.trace_collector:
        found.append(_to_collector(settings.trace_protocol))
    if settings.trace_exporter:
        module, _, function = settings.trace_exporter.partition(":")
        made = list(getattr(import_module(module), function)())
        if not all(isinstance(each, SpanProcessor) for each in made):
            raise TypeError(f"{settings.trace_exporter}: expected a list of OpenTelemetry's span processors")
        found += made
    return found


def _to_collector(protocol: str) -> SpanProcessor:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return BatchSpanProcessor(GrpcExporter())
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return BatchSpanProcessor(HttpExporter())


def _flush_at_exit(provider: TracerProvider) -> None:
    """Send what is queued when the process ends; a collector that is away does not delay that for long."""
    ends = threading.Event()

    def flush() -> None:
        ends.wait()
        provider.shutdown()

    flushing = threading.Thread(target=flush, name="last traces", daemon=True)
    flushing.start()  # now: some versions of Python start no thread while they end

    def at_exit() -> None:
        ends.set()
        flushing.join(FLUSH_S)

    atexit.register(at_exit)


def _user_spans() -> SpanProcessor:
    from opentelemetry.sdk.trace import SpanProcessor

    class UserSpans(SpanProcessor):
        """Adds the spans that users' code makes to their requests' traces."""

        def on_end(self, span: ReadableSpan) -> None:
            request, context = current_request(), span.get_span_context()
            if request is None or request.trace is None or context is None:
                return
            if request.trace.trace_id == f"{context.trace_id:032x}":
                request.trace.add(_of_user(span, context))

    return UserSpans()


def _of_user(span: ReadableSpan, context: SpanContext) -> RequestSpan:
    offset = time.time() - time.monotonic()
    parent = f"{span.parent.span_id:016x}" if span.parent is not None else ""
    made = RequestSpan("user", span.name, (span.start_time or 0) / 1e9 - offset, parent, f"{context.span_id:016x}")
    some = [*(span.attributes or {}).items()][:MAX_ATTRIBUTES]
    made.attributes = {key[:MAX_TEXT]: str(value)[:MAX_TEXT] for key, value in some}
    made.end((span.end_time or 0) / 1e9 - offset, "OK" if span.status.is_ok else "failed")
    return made


def _current_user_span(trace: RequestTrace) -> str:
    from opentelemetry.trace import get_current_span

    span = get_current_span()
    context = span.get_span_context()
    is_own = span.is_recording() and f"{context.trace_id:032x}" == trace.trace_id
    return f"{context.span_id:016x}" if is_own else ""


def _context(trace_id: str, span_id: str, *, is_remote: bool = True, sampled: bool = True) -> SpanContext:
    """`sampled`: True for all that is exported, or the SDK would drop it."""
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(int(sampled)))


def _status(failed: bool) -> Status:
    from opentelemetry.trace import Status, StatusCode

    return Status(StatusCode.ERROR) if failed else Status()


def _named(name: str, status: str) -> dict[str, Any]:
    """OpenTelemetry's names for a method and a status: https://opentelemetry.io/docs/specs/semconv/"""
    method, space, route = name.partition(" ")
    if space and status.isdecimal():
        return {"http.request.method": method, "http.route": route, "http.response.status_code": int(status)}
    service, slash, method = name.rpartition("/")
    named: dict[str, Any] = {"pierhead.status": status}
    if slash:
        named |= {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        if status in grpc.StatusCode.__members__:
            named["rpc.grpc.status_code"] = grpc.StatusCode[status].value[0]
    return named


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
