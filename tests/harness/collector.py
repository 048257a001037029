"""A collector of traces for tests: it takes OTLP over HTTP, at an address that containers reach."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.harness.http_answers import sends

Spans = list[tuple[Mapping[str, str], Span]]
"""The resource's attributes, and the span."""


def spans_of(request: ExportTraceServiceRequest) -> Spans:
    """What one message has."""
    found: Spans = []
    for resource_spans in request.resource_spans:
        resource = {each.key: each.value.string_value for each in resource_spans.resource.attributes}
        found += [(resource, span) for scope in resource_spans.scope_spans for span in scope.spans]
    return found


@dataclass
class Collector:
    """What the collector has received."""

    url: str
    spans: Spans = field(default_factory=list)

    def services_of(self, trace_id: bytes) -> set[str]:
        """The services that have sent spans of a trace."""
        return {resource["service.name"] for resource, span in self.spans if span.trace_id == trace_id}

    def names_of(self, trace_id: bytes) -> set[str]:
        """The names of the spans of a trace."""
        return {span.name for _, span in self.spans if span.trace_id == trace_id}


@contextlib.contextmanager
def collecting(address: str) -> Iterator[Collector]:
    """It listens at this address of the machine, at a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            found.spans += spans_of(ExportTraceServiceRequest.FromString(body))
            sends(self, 200, b"")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class calls it so
            pass

    server = ThreadingHTTPServer((address, 0), Handler)
    found = Collector(f"http://{address}:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
