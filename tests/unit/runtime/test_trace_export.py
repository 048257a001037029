"""Traces at a collector: a replica in a process of its own, with OpenTelemetry's SDK, and a receiver of OTLP."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from pierhead import Settings
from pierhead.errors import SettingsError
from pierhead.trace import TraceSampler
from pierhead.tracing import export

from tests.harness.collector import Spans, spans_of
from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, until

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

SHOP = """
from aiohttp import web
from opentelemetry import trace
from pierhead import serve

async def buy(request):
    with trace.get_tracer("shop").start_as_current_span("price") as span:
        span.set_attribute("items", 3)
        with trace.get_tracer("shop").start_as_current_span("discount"):
            pass
    return web.Response()

async def fail(request):
    with trace.get_tracer("shop").start_as_current_span("price"):
        raise ValueError("boom")

app = web.Application()
app.router.add_get("/buy", buy)
app.router.add_get("/fail", fail)
serve(app)
"""


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector for OTLP over HTTP and gRPC."""

    def __init__(self) -> None:
        self.spans: Spans = []
        self.status = 200
        self.asked = 0
        self.urls: dict[str, str] = {}

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        self.spans += spans_of(request)

    async def post(self, request: web.Request) -> web.Response:
        self.asked += 1
        body = await request.read()
        if request.headers.get("content-encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        if self.status == 200:
            self.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
        return web.Response(status=self.status)

    async def Export(self, request: Any, context: Any) -> Any:
        self.asked += 1
        self.take(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> trace_pb2.Span:
        (found,) = [span for _, span in self.spans if span.name == name]
        return found


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/v1/traces", receiver.post)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    receiver.urls = {"http/protobuf": f"http://127.0.0.1:{runner.addresses[0][1]}", "grpc": f"http://127.0.0.1:{port}"}
    yield receiver
    await server.stop(None)
    await runner.cleanup()


async def start(cluster: Cluster, port: int, url: str, source: str = "", **more: str) -> asyncio.subprocess.Process:
    environ = {
        "PIERHEAD_SERVICE": "shop",
        "PIERHEAD_REPLICA": "shop-1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_RESOURCE_ATTRIBUTES": "team=sales",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    return await cluster.process(source or SHOP, port, **(environ | more))


async def get(port: int, path: str, traceparent: str = "", more: Mapping[str, str] = MappingProxyType({})) -> int:
    headers = {"x-request-id": "mine", **more} | ({"traceparent": traceparent} if traceparent else {})
    async with ClientSession() as client, client.get(f"http://127.0.0.1:{port}{path}", headers=headers) as response:
        return response.status


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_a_request_and_the_users_own_spans_arrive(
    cluster: Cluster, free_port: int, receiver: Receiver, protocol: str
) -> None:
    await start(cluster, free_port, receiver.urls[protocol], OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
    assert await get(free_port, "/buy", f"00-{TRACE}-{CALLER}-01") == 200
    await until(lambda: len(receiver.spans) >= 3, "they have arrived")
    request, price, discount = (receiver.named(name) for name in ("GET /buy", "price", "discount"))
    assert {span.trace_id.hex() for span in (request, price, discount)} == {TRACE}
    assert [span.parent_span_id for span in (request, price, discount)] == [
        bytes.fromhex(CALLER), request.span_id, price.span_id,
    ]  # fmt: skip
    assert request.kind == trace_pb2.Span.SPAN_KIND_SERVER
    assert request.start_time_unix_nano <= price.start_time_unix_nano + 1_000_000
    attributes = {each.key: each.value.string_value or each.value.int_value for each in request.attributes}
    assert attributes["http.route"] == "/buy"
    assert attributes["http.response.status_code"] == 200
    assert attributes["pierhead.request_id"] == "mine"
    resource = receiver.spans[0][0]
    assert {key: resource[key] for key in ("service.name", "service.instance.id", "team")} == {
        "service.name": "shop", "service.instance.id": "shop-1", "team": "sales",
    }  # fmt: skip


async def test_haproxys_time_arrives_as_a_span_around_the_request(
    cluster: Cluster, free_port: int, receiver: Receiver
) -> None:
    await start(cluster, free_port, receiver.urls["http/protobuf"])
    begun = time.time_ns() // 1000 - 3_000_000
    more = {"x-request-start": f"t={begun}"}
    assert await get(free_port, "/buy", f"00-{TRACE}-{CALLER}-01", more) == 200
    await until(lambda: len(receiver.spans) >= 4, "they have arrived")
    proxy, request = receiver.named("HAProxy"), receiver.named("GET /buy")
    assert (proxy.parent_span_id, request.parent_span_id) == (bytes.fromhex(CALLER), proxy.span_id)
    assert abs(proxy.start_time_unix_nano // 1000 - begun) < 1000
    assert request.start_time_unix_nano - proxy.start_time_unix_nano >= 2_999_000_000


async def test_a_failed_request_arrives_whatever_the_sampler_says(
    cluster: Cluster, free_port: int, receiver: Receiver
) -> None:
    await start(cluster, free_port, receiver.urls["http/protobuf"], OTEL_TRACES_SAMPLER="always_off")
    assert await get(free_port, "/buy", f"00-{TRACE}-{CALLER}-01") == 200
    assert await get(free_port, "/fail", f"00-{TRACE}-{CALLER}-01") == 500
    await until(lambda: bool(receiver.spans), "it has arrived")
    ((_, span),) = receiver.spans  # no user's span: what is not in the sample is not recorded
    assert (span.name, span.trace_id.hex()) == ("GET /fail", TRACE)
    assert span.status.code == trace_pb2.Status.STATUS_CODE_ERROR


async def test_the_last_spans_arrive_before_the_process_ends(
    cluster: Cluster, free_port: int, receiver: Receiver
) -> None:
    more = {"OTEL_BSP_SCHEDULE_DELAY": "60000"}
    source = f"from pierhead.tracing import export\nexport.FLUSH_S = {PATIENCE_S}\n{SHOP}"
    process = await start(cluster, free_port, receiver.urls["http/protobuf"], source, **more)
    assert await get(free_port, "/buy") == 200
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
    assert {span.name for _, span in receiver.spans} == {"GET /buy", "price", "discount"}


async def test_processors_of_the_services_own_get_them(cluster: Cluster, free_port: int, tmp_path: Path) -> None:
    """As Ray Serve's exporter_import_path names them."""
    (tmp_path / "own_traces.py").write_text(
        "from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor\n"
        f"OUT = open({str(tmp_path / 'spans')!r}, 'a')\n"
        "def processors():\n    return [SimpleSpanProcessor(ConsoleSpanExporter(out=OUT))]\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    exporter = {"PIERHEAD_TRACE_EXPORTER": "own_traces:processors", "OTEL_TRACES_SAMPLER": "always_on"}
    await cluster.process(SHOP, free_port, PIERHEAD_SERVICE="shop", PYTHONPATH=path, **exporter)
    assert await get(free_port, "/buy") == 200
    found = (tmp_path / "spans").read_text
    await until(lambda: '"name": "GET /buy"' in found(), "its span is written")
    assert '"name": "price"' in found()


@pytest.mark.parametrize("fault", ["away", "500"])
async def test_a_collector_that_is_away_delays_neither_requests_nor_the_end(
    cluster: Cluster, free_port: int, receiver: Receiver, fault: str
) -> None:
    receiver.status = 503
    url = receiver.urls["http/protobuf"] if fault == "500" else "http://127.0.0.1:9"
    process = await start(cluster, free_port, url)
    for _ in range(20):
        assert await get(free_port, "/buy") == 200
    if fault == "500":
        await until(lambda: receiver.asked > 0, "it was asked")
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_S):  # the SDK itself would try for longer
        assert await process.wait() == 0


@pytest.mark.parametrize(
    ("variables", "sampler", "collector"),
    [
        ({}, TraceSampler(), ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, TraceSampler(1.0), "http://c"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, TraceSampler(), ""),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t"}, TraceSampler(1.0), "http://t"),
        ({"PIERHEAD_TRACE_EXPORTER": "shop:made"}, TraceSampler(1.0), ""),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, TraceSampler(1.0, follows=False), ""),
        (
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"},
            TraceSampler(0.25, follows=False),
            "",
        ),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"}, TraceSampler(1.0, follows=False), ""),
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote", "OTEL_TRACES_SAMPLER_ARG": "endpoint=x"}, TraceSampler(), ""),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_SAMPLER": "jaeger_remote"}, None, ""),
    ],
)
def test_opentelemetrys_variables(variables: Mapping[str, str], sampler: TraceSampler | None, collector: str) -> None:
    """One that is not known here may be for another program of the image."""
    settings = Settings.from_env(variables)
    assert (settings.traces, settings.trace_collector) == (sampler, collector)


def test_an_exporter_that_is_no_path_is_refused() -> None:
    with pytest.raises(SettingsError, match="PIERHEAD_TRACE_EXPORTER: expected module:function"):
        Settings.from_env({"PIERHEAD_TRACE_EXPORTER": "nothing"})


@pytest.mark.parametrize(
    ("hidden", "settings", "said"),
    [
        ("opentelemetry.sdk.resources", Settings(service="a", trace_collector="http://127.0.0.1:9"), "pierhead[otel]"),
        (
            "",
            Settings(service="b", trace_exporter="nothing_there:made"),
            "ModuleNotFoundError: No module named 'nothing_there'",
        ),
        ("", Settings(service="c", trace_exporter="os:getcwd"), "span processors"),
    ],
    ids=["without the package", "no such module", "no processors"],
)
def test_what_cannot_be_exported_is_said_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hidden: str, settings: Settings, said: str
) -> None:
    monkeypatch.setattr(export, "_queues", [])
    if hidden:
        monkeypatch.setitem(sys.modules, hidden, None)
    assert export.exporter(settings) is None
    assert said in caplog.text


async def test_without_a_collector_the_sdk_is_not_imported(cluster: Cluster, free_port: int) -> None:
    source = SHOP.replace("from opentelemetry import trace", "import sys").replace(
        'with trace.get_tracer("shop").start_as_current_span("price") as span:', "if True:"
    )
    source = source.replace(
        'span.set_attribute("items", 3)', 'assert not any(each.startswith("opentelemetry") for each in sys.modules)'
    ).replace('with trace.get_tracer("shop").start_as_current_span("discount"):', "if True:")
    await cluster.process(source, free_port, PIERHEAD_SERVICE="shop", PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    assert await get(free_port, "/buy") == 200
