"""Traces to a collector, by OpenTelemetry's SDK (`pierhead[otel]`) and its standard variables.

The SDK has the queue, the thread that sends, and users' own spans. It is imported where a collector is named, and by
nothing else in the runtime.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pierhead.errors import SettingsError
from pierhead.request import current_request
from pierhead.settings import Settings
from pierhead.tracing.trace import RequestSpan, RequestTrace, use_user_spans

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.trace import SpanContext, Status

    from pierhead.tracing.keeper import KeptTrace

FLUSH_S = 2.0
"""How long the end of a process waits for its last traces to reach the collector."""

NO_SDK = (
    "OTEL_EXPORTER_OTLP_ENDPOINT: traces are to be exported, and OpenTelemetry's SDK is not installed: install "
    "pierhead[otel] in the service's image, or set OTEL_SDK_DISABLED=true for the service"
)


class TraceExport:
    """Sends a replica's kept traces to the collector, and makes users' own spans their requests' own."""

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError where the SDK is not installed, or cannot use one of its variables."""
        try:
            from opentelemetry.sdk.resources import Resource
        except ImportError:
            raise SettingsError(NO_SDK) from None
        names = {
            "service.name": settings.service,
            "service.instance.id": settings.replica,
            "service.version": settings.version,
            "service.namespace": settings.project,
        }
        self._resource = Resource.create({name: value for name, value in names.items() if value})
        self._queue = _queue(settings, self._resource)

    def enter(self, trace: RequestTrace) -> None:
        """Make spans that the running code begins from now on the request's. Call it in the request's own context."""
        from opentelemetry.context import attach
        from opentelemetry.trace import NonRecordingSpan, set_span_in_context

        attach(set_span_in_context(NonRecordingSpan(_context(trace, trace.span_id, sampled=trace.sampled))))

    def send(self, kept: KeptTrace) -> None:
        """Queue a trace's spans; the SDK drops those for which its queue has no room."""
        for span in self._spans(kept):
            self._queue.on_end(span)

    def _spans(self, kept: KeptTrace) -> Iterator[ReadableSpan]:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import Link, SpanKind

        trace, ended = kept.trace, kept.began + kept.seconds
        yield ReadableSpan(
            kept.method,
            _context(trace, trace.span_id),
            _context(trace, trace.parent_id) if trace.parent_id else None,
            self._resource,
            {**_named(kept.method, kept.status), "pierhead.request_id": kept.request_id, "pierhead.kept": kept.why},
            kind=SpanKind.SERVER,
            status=_status(kept.failed),
            start_time=_ns(kept.began),
            end_time=_ns(ended),
        )
        for span in trace.spans:
            if span.kind == "user":
                continue  # the SDK itself sends it
            yield ReadableSpan(
                span.name,
                _context(trace, span.span_id),
                _context(trace, span.parent_id or trace.span_id),
                self._resource,
                {**_named(span.name, span.status), **(span.attributes or {})},
                [Event(name, {"detail": detail}, _ns(at + kept.offset)) for at, name, detail in span.events or ()],
                [Link(_context(other, other.span_id)) for other in span.links if other is not trace],
                SpanKind.CLIENT if span.kind == "client" else SpanKind.INTERNAL,
                status=_status(span.status not in ("OK", "")),
                start_time=_ns(span.began + kept.offset),
                end_time=_ns(ended if span.ended is None else span.ended + kept.offset),
            )


_made: dict[tuple[str, str], TraceExport] = {}


def exporter(settings: Settings) -> TraceExport | None:
    """What sends a replica's traces to the collector that its environment names; None where it names none.

    Raises SettingsError; see TraceExport.
    """
    if settings.traces is None or not (settings.trace_collector or settings.trace_exporter):
        return None
    key = settings.service, settings.replica  # a process may have several
    if key not in _made:
        _made[key] = TraceExport(settings)
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

    queue = SynchronousMultiSpanProcessor()
    for each in _processors(settings):
        queue.add_span_processor(each)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(_user_spans())
    provider.add_span_processor(queue)
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # the user has set none
        trace.set_tracer_provider(provider)
    use_user_spans(_current_user_span)
    atexit.register(_flush, provider)
    return queue


def _processors(settings: Settings) -> list[SpanProcessor]:
    """Those of the collector, and those that the service has made itself. Raises SettingsError."""
    found: list[SpanProcessor] = []
    try:
        if settings.trace_collector:
            found.append(_to_collector(settings.trace_protocol))
        if settings.trace_exporter:
            module, _, function = settings.trace_exporter.partition(":")
            found += getattr(import_module(module), function)()
    except Exception as error:
        name = "PIERHEAD_TRACE_EXPORTER" if settings.trace_exporter else "OTEL_EXPORTER_OTLP_..."
        raise SettingsError(f"{name}: traces cannot be exported: {type(error).__name__}: {error}") from error
    return found


def _to_collector(protocol: str) -> SpanProcessor:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return BatchSpanProcessor(GrpcExporter())
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return BatchSpanProcessor(HttpExporter())


def _flush(provider: Any) -> None:
    """Send what is queued; a collector that is away does not delay the process's end."""
    sending = threading.Thread(target=provider.shutdown, daemon=True)
    sending.start()
    sending.join(FLUSH_S)


def _user_spans() -> SpanProcessor:
    from opentelemetry.sdk.trace import SpanProcessor

    class UserSpans(SpanProcessor):
        """Adds the spans that users' code makes to their requests' traces."""

        def on_end(self, span: ReadableSpan) -> None:
            request, context = current_request(), span.get_span_context()
            if request is None or request.trace is None or context is None:
                return
            if request.trace.trace_id != f"{context.trace_id:032x}" or span.start_time is None:
                return
            request.trace.add(_of_user(span, context))

    return UserSpans()


def _of_user(span: ReadableSpan, context: SpanContext) -> RequestSpan:
    offset = time.time() - time.monotonic()
    parent = f"{span.parent.span_id:016x}" if span.parent is not None else ""
    made = RequestSpan("user", span.name, (span.start_time or 0) / 1e9 - offset, parent, f"{context.span_id:016x}")
    made.attributes = {
        key: value for key, value in (span.attributes or {}).items() if isinstance(value, str | int | float | bool)
    }
    made.end((span.end_time or 0) / 1e9 - offset, "OK" if span.status.is_ok else "ERROR")
    return made


def _current_user_span() -> str:
    from opentelemetry.trace import get_current_span

    context = get_current_span().get_span_context()
    return f"{context.span_id:016x}" if context.is_valid else ""


def _context(trace: RequestTrace, span_id: str, *, sampled: bool = True) -> SpanContext:
    """`sampled`: True for all that is exported, or the SDK would drop it."""
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(int(trace.trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(sampled)))


def _status(failed: bool) -> Status:
    from opentelemetry.trace import Status, StatusCode

    return Status(StatusCode.ERROR) if failed else Status()


def _named(name: str, status: str) -> dict[str, str | int]:
    """OpenTelemetry's names for a method and a status: https://opentelemetry.io/docs/specs/semconv/"""
    method, space, route = name.partition(" ")
    if space and status.isdecimal():
        return {"http.request.method": method, "http.route": route, "http.response.status_code": int(status)}
    service, slash, method = name.rpartition("/")
    if slash:
        return {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method, "pierhead.status": status}
    return {"pierhead.status": status}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
