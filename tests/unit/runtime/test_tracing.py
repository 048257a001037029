"""Traces: what one process knows of a request, which requests are kept, and one trace through every way in and out."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, web
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from pierhead import DeadlineExceeded, Settings, batch, handle
from pierhead.echo.v1 import echo_pb2, echo_pb2_grpc
from pierhead.request import current_request
from pierhead.trace import MAX_EVENTS, MAX_SPANS, MAX_TEXT, RequestSpan, RequestTrace, TraceSampler
from pierhead.tracing.keeper import MOST_KEPT, TraceKeeper

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, EchoService, address, echo, know, until

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"


class TestSampler:
    @pytest.mark.parametrize(
        ("sampler", "traceparent", "sampled"),
        [
            (TraceSampler(), None, False),
            (TraceSampler(1.0), None, True),
            (TraceSampler(), SAMPLED, True),
            (TraceSampler(1.0), UNSAMPLED, False),
            (TraceSampler(0.0, follows=False), SAMPLED, False),
            (TraceSampler(1.0, follows=False), UNSAMPLED, True),
            (TraceSampler(1.0), f"00-{'0' * 32}-{CALLER}-00", True),  # none, so the trace begins here
            (TraceSampler(0.5, follows=False), SAMPLED, False),  # by the trace's id, as in every other part
            (TraceSampler(0.6, follows=False), UNSAMPLED, True),
        ],
    )
    def test_who_is_in_the_sample(self, sampler: TraceSampler, traceparent: str | None, sampled: bool) -> None:
        assert sampler.begin(traceparent).sampled is sampled

    def test_a_callers_trace_continues(self) -> None:
        trace = TraceSampler().begin(SAMPLED)
        assert (trace.trace_id, trace.parent_id) == (TRACE, CALLER)
        assert trace.traceparent() == f"00-{TRACE}-{trace.span_id}-01"
        later = TraceSampler().begin(f"01-{TRACE}-{CALLER}-01-more")
        assert later.trace_id == TRACE

    @given(st.text() | st.from_regex(r"[0-9a-f-]{50,60}"))
    def test_what_is_none_begins_a_new_one(self, text: str) -> None:
        trace = TraceSampler().begin(text)
        continues = TraceSampler().begin(trace.traceparent())
        assert (continues.trace_id, continues.parent_id) == (trace.trace_id, trace.span_id)
        assert trace.trace_id not in text or trace.parent_id in text

    @pytest.mark.parametrize(
        "text",
        [f"ff-{TRACE}-{CALLER}-01", f"00-{'0' * 32}-{CALLER}-01", f"00-{TRACE}-{'0' * 16}-01", SAMPLED.upper(), ""],
    )
    def test_what_w3c_forbids_begins_a_new_one(self, text: str) -> None:
        assert TraceSampler().begin(text).trace_id != TRACE

    def test_the_share_is_that_of_the_ratio_and_all_parts_decide_alike(self) -> None:
        sampler = TraceSampler(0.5, follows=False)
        begun = [sampler.begin(None) for _ in range(2000)]
        assert 800 < sum(each.sampled for each in begun) < 1200
        assert [sampler.begin(each.traceparent()).sampled for each in begun] == [each.sampled for each in begun]


def of(keeper: TraceKeeper) -> list[dict[str, Any]]:
    """What a replica's page has."""
    return list(json.loads(keeper.page())["traces"])


def keeper(**settings: Any) -> TraceKeeper:
    return TraceKeeper(Settings(service="shop", replica="shop-1", **settings), TraceSampler())


class TestKeeper:
    @pytest.mark.parametrize(
        ("status", "seconds", "traceparent", "why"),
        [
            ("200", 0.1, None, None),
            ("404", 0.1, None, None),
            ("429", 0.1, None, None),
            ("OK", 0.1, UNSAMPLED, None),
            ("CANCELLED", 0.1, None, None),
            ("500", 0.1, None, "failed"),
            ("503", 0.1, None, "failed"),
            ("INTERNAL", 0.1, None, "failed"),
            ("UNAVAILABLE", 3.0, None, "failed"),
            ("OK", 1.0, None, "slow"),
            ("404", 2.0, SAMPLED, "slow"),
            ("200", 0.1, SAMPLED, "sampled"),
            ("200", 0.1, UNSAMPLED, None),
        ],
    )
    def test_what_is_kept(self, status: str, seconds: float, traceparent: str | None, why: str | None) -> None:
        kept = keeper()
        kept.finished(kept.begin(traceparent), "GET /", status, seconds, "mine")
        found = of(kept)
        assert [each["why"] for each in found] == ([] if why is None else [why])

    @pytest.mark.parametrize(
        ("start", "waited"),
        [
            ("t=0000999994500000", 5.0),
            ("t=0000999999500000", 0.0),
            ("t=0000999999550000", 0.0),  # by the clock of another machine
            ("t=0001000000500000", None),
            ("t=0000000000000000", None),  # longer than a day
            ("t=-000999994500000", None),
            ("t=" + "9" * 400, None),
            ("t=\N{ARABIC-INDIC DIGIT FIVE}000999994500000", None),
            ("", None),
        ],
    )
    def test_the_wait_in_haproxy_counts(self, start: str, waited: float | None) -> None:
        """It is a span of its own, around that of the request."""
        kept = TraceKeeper(Settings(service="shop", socket="/run/s"), TraceSampler(), clock=lambda: 1_000_000.0)
        for number, status in enumerate(("200", "500")):
            trace = kept.begin(UNSAMPLED)
            trace.start = start
            kept.finished(trace, "GET /", status, 0.5, f"mine-{number}")
        found = {each["request"]: each for each in of(kept)}
        assert ("mine-0" in found) is bool(waited), "slow, as it waited for longer than slow_request_s"
        failed = found["mine-1"]
        if waited is None:
            assert (failed["parent"], failed["spans"]) == (CALLER, [])
            return
        (proxy,) = failed["spans"]
        assert (proxy["kind"], proxy["name"], proxy["status"], proxy["parent"]) == ("proxy", "HAProxy", "500", CALLER)
        assert failed["parent"] == proxy["span"]
        assert proxy["attributes"] == {"waited_s": waited}
        assert (proxy["began"], proxy["seconds"]) == (pytest.approx(999_999.5 - waited), pytest.approx(0.5 + waited))

    def test_a_wait_by_another_machines_clock_makes_no_request_slow(self) -> None:
        kept = keeper()
        for traceparent in (UNSAMPLED, SAMPLED):
            trace = kept.begin(traceparent)
            trace.start = f"t={time.time() - 50:.6f}".replace(".", "")
            kept.finished(trace, "GET /", "200", 0.1, "mine")
        (found,) = of(kept)
        assert found["why"] == "sampled"
        assert found["spans"][0]["seconds"] == pytest.approx(50.1, abs=PATIENCE_S)

    def test_each_reason_has_its_own_bound(self) -> None:
        """A flood of one kind does not displace the others; the last ones stay."""
        kept = keeper()
        kept.finished(kept.begin(None), "GET /", "500", 0.1, "failed")
        for number in range(MOST_KEPT + 5):
            kept.finished(kept.begin(None), "GET /", "200", 5.0, f"slow-{number}")
        found = {each["request"] for each in of(kept)}
        assert "failed" in found
        assert len(found) == MOST_KEPT + 1
        assert f"slow-{MOST_KEPT + 4}" in found

    def test_spans_and_events_are_bounded(self) -> None:
        trace = RequestTrace(None, sampled=True)
        for number in range(MAX_SPANS + 3):
            span = trace.span("client", "x" * 10_000, 0.0)
            for _ in range(MAX_EVENTS + 3):
                span.event(0.0, "retry", "y" * 10_000)
            span.end(float(number + 1))
        kept = keeper()
        kept.finished(trace, "GET /", "200", 1.0, "mine")
        (found,) = of(kept)
        assert (len(found["spans"]), found["left_out"]) == (MAX_SPANS, 3)
        assert len(found["spans"][0]["events"]) == MAX_EVENTS
        assert {len(each["detail"]) for each in found["spans"][0]["events"]} == {MAX_TEXT}
        assert len(found["spans"][0]["name"]) == MAX_TEXT

    def test_a_large_page_leaves_out_the_older_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = keeper()
        for number in range(10):
            kept.finished(kept.begin(None), "GET /", "500", 0.1, f"request-{number}")
        monkeypatch.setattr("pierhead.tracing.keeper.MOST_BYTES", len(kept.page()) // 2)
        assert [each["request"] for each in of(kept)] == [
            "request-9",
            "request-8",
            "request-7",
            "request-6",
            "request-5",
        ][: len(of(kept))]
        assert 3 <= len(of(kept)) <= 5

    def test_a_connection_that_lasts_is_not_slow(self) -> None:
        kept = keeper()
        trace = kept.begin(None)
        trace.lasts = True
        kept.finished(trace, "GET /socket", "101", 500.0, "mine")
        assert of(kept) == []

    def test_work_that_outlives_its_request_adds_nothing(self) -> None:
        kept = keeper()
        trace = kept.begin(SAMPLED)
        kept.finished(trace, "GET /", "200", 0.1, "mine")
        trace.span("client", "shop/Buy", 0.0)
        assert (trace.spans, of(kept)[0]["spans"]) == ([], [])

    def test_requests_that_shared_batches_do_not_keep_each_other(self) -> None:
        """Each is in a batch with the one before and in one with the one after: a chain without an end."""
        kept = keeper()
        gc.collect()
        before, former = _traces_alive(), kept.begin(SAMPLED)
        for number in range(200):
            trace = kept.begin(SAMPLED if number % 7 else None)
            span = RequestSpan("batch", "score", 0.0)
            span.members = [former, trace]
            for each in span.members:
                each.add(span)
            kept.finished(former, "GET /", "200", 0.1, "mine")
            former = trace
        del trace, each, span
        gc.collect()
        assert _traces_alive() - before < 3 * MOST_KEPT

    def test_a_span_that_has_not_ended_ends_with_its_request(self) -> None:
        kept = keeper()
        trace = kept.begin(SAMPLED)
        trace.span("client", "shop/Buy", time.monotonic() - 2.0)
        kept.finished(trace, "GET /", "200", 3.0, "mine")
        (found,) = of(kept)
        (span,) = found["spans"]
        assert span["status"] == "not ended"
        assert span["seconds"] == pytest.approx(2.0, abs=0.1)
        assert span["parent"] == found["span"]
        assert found["parent"] == CALLER
        assert (found["service"], found["replica"]) == ("shop", "shop-1")


def _traces_alive() -> int:
    return sum(isinstance(each, RequestTrace) for each in gc.get_objects())


class Shop:
    """A service with a way in for each protocol, each of which calls the service "echo-child"."""

    def __init__(self) -> None:
        self.child: Any = None

    async def ask(self) -> str:
        self.child = self.child or handle(echo_pb2_grpc.EchoStub, "echo-child")
        return str((await self.child.Echo(echo())).response)

    def aiohttp(self) -> web.Application:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(text=await self.ask())

        app = web.Application()
        app.router.add_get("/buy", answer)
        return app

    def asgi(self) -> FastAPI:
        app = FastAPI()
        app.get("/buy")(self.ask)
        return app


class Asking(EchoService):
    """Answers by a call of its own."""

    def __init__(self, shop: Shop) -> None:
        super().__init__()
        self.shop = shop

    async def Echo(self, request: echo_pb2.EchoRequest, context: Any) -> echo_pb2.EchoReply:
        return echo_pb2.EchoReply(response=await self.shop.ask())


def kept(server: Any) -> list[dict[str, Any]]:
    return of(server.edge.traces)


def mine() -> tuple[tuple[str, str], ...]:
    """Of a request that HAProxy had a second ago."""
    start = f"t={time.time() - 1:.6f}".replace(".", "")
    return ("traceparent", SAMPLED), ("x-request-id", "mine"), ("x-request-start", start)


async def _http(server: Any) -> str:
    async with ClientSession() as client:
        url, headers = f"http://127.0.0.1:{server.http_port}/buy", dict(mine())
        async with client.get(url, headers=headers) as response:
            assert response.status == 200
    return "GET /buy"


async def _grpc(server: Any) -> str:
    async with grpc.aio.insecure_channel(address(server)) as channel:
        stub: Any = echo_pb2_grpc.EchoStub(channel)
        await stub.Echo(echo(), metadata=mine())
    return "pierhead.echo.v1.Echo/Echo"


PARTS: dict[str, tuple[Callable[[Shop], object], Callable[[Any], Any]]] = {
    "aiohttp": (Shop.aiohttp, _http),
    "asgi": (Shop.asgi, _http),
    "grpc": (Asking, _grpc),
}


@pytest.mark.parametrize("transport", ["lane", "grpc"])
@pytest.mark.parametrize("way", sorted(PARTS))
async def test_one_trace_from_the_caller_to_the_callee(cluster: Cluster, way: str, transport: str) -> None:
    part, ask = PARTS[way]
    child = await cluster.start(EchoService(), service="echo-child", replica="child-1")
    know(child, transport=transport)
    parent = await cluster.start(part(Shop()), service="shop", replica="shop-1")
    name = await ask(parent)
    await until(lambda: bool(kept(parent)) and bool(kept(child)), "both have ended the request")
    (above,), (below,) = kept(parent), kept(child)
    proxy, call = above["spans"]
    assert {above["trace"], below["trace"]} == {TRACE}
    assert (proxy["kind"], proxy["parent"], below["spans"]) == ("proxy", CALLER, [])
    assert 1 <= proxy["seconds"] - above["seconds"] < 1 + PATIENCE_S
    assert (above["parent"], call["parent"], below["parent"]) == (proxy["span"], above["span"], call["span"])
    assert {above["request"], below["request"]} == {"mine"}
    assert (above["name"], above["service"], above["replica"]) == (name, "shop", "shop-1")
    assert (call["kind"], call["name"], call["status"]) == ("client", "pierhead.echo.v1.Echo/Echo", "OK")
    assert call["attributes"]["service"] == "echo-child"
    assert below["began"] >= call["began"] - 0.001
    assert above["seconds"] >= call["seconds"] >= below["seconds"] >= 0


async def test_a_failed_call_is_kept_on_both_sides_without_any_sample(cluster: Cluster) -> None:
    child = await cluster.start(EchoService(), service="echo-child", replica="child-1")
    know(child)

    async def fail(_: web.Request) -> web.Response:
        stub: Any = handle(echo_pb2_grpc.EchoStub, "echo-child")
        await stub.Echo(echo("boom"))
        raise AssertionError

    app = web.Application()
    app.router.add_get("/fail", fail)
    parent = await cluster.start(app, service="shop", replica="shop-1")
    async with ClientSession() as client, client.get(f"http://127.0.0.1:{parent.http_port}/fail") as response:
        assert response.status == 500
    (above,), (below,) = kept(parent), kept(child)
    assert above["trace"] == below["trace"]
    assert below["parent"] == above["spans"][0]["span"]
    assert (above["why"], below["why"], above["spans"][0]["status"]) == ("failed", "failed", "internal")


async def test_user_code_has_the_context_of_its_own_span(cluster: Cluster) -> None:
    """For what it calls outside the stack."""

    async def tell(_: web.Request) -> web.Response:
        request = current_request()
        return web.json_response(request.traceparent if request else "")

    app = web.Application()
    app.router.add_get("/buy", tell)
    server = await cluster.start(app)
    async with ClientSession() as client:
        url = f"http://127.0.0.1:{server.http_port}/buy"
        async with client.get(url) as response:
            assert await response.json() is None
        async with client.get(url, headers={"traceparent": SAMPLED}) as response:
            told = await response.json()
    assert told == f"00-{TRACE}-{kept(server)[0]['span']}-01"


class Batched(EchoService):
    async def Echo(self, request: echo_pb2.EchoRequest, context: Any) -> echo_pb2.EchoReply:
        self.calls += 1
        return echo_pb2.EchoReply(response=await self.shout(request.message))

    @batch(max_batch_size=2)
    async def shout(self, messages: list[str]) -> list[str]:
        self.begun += len(messages)
        await self.gate.wait()
        return [each.upper() for each in messages]


async def _awaited(call: Any) -> Any:
    return await call


async def test_a_batch_is_in_the_trace_of_each_member_with_a_link_to_the_other(cluster: Cluster) -> None:
    service = Batched()
    server = await cluster.start(service)
    other = f"00-{'1' * 32}-{CALLER}-01"
    async with grpc.aio.insecure_channel(address(server)) as channel:
        stub: Any = echo_pb2_grpc.EchoStub(channel)
        first = asyncio.ensure_future(_awaited(stub.Echo(echo())))
        await until(lambda: service.begun == 1, "a batch of one runs")
        both = [stub.Echo(echo(), metadata=(("traceparent", each),)) for each in (SAMPLED, other)]
        await until(lambda: service.calls == 3, "two calls are the next batch")
        service.gate.set()
        await asyncio.gather(first, *map(_awaited, both))
    await until(lambda: len(kept(server)) == 2, "both have ended")
    spans = {each["trace"]: each["spans"][0] for each in kept(server)}
    assert {trace: span["links"] for trace, span in spans.items()} == {TRACE: ["1" * 32], "1" * 32: [TRACE]}
    assert {(span["name"], span["status"]) for span in spans.values()} == {("batch Batched.shout", "OK")}
    assert spans[TRACE]["attributes"] == {"members": 2, "rows": 2}


class Failing(EchoService):
    """Each request is two items of a batch that fails."""

    async def Echo(self, request: echo_pb2.EchoRequest, context: Any) -> echo_pb2.EchoReply:
        return echo_pb2.EchoReply(response="".join(await asyncio.gather(self.shout("a"), self.shout("b"))))

    @batch(max_batch_size=2)
    async def shout(self, messages: list[str]) -> list[str]:
        raise ValueError("boom")


async def test_a_batch_that_failed_says_so_once_however_many_items_the_request_has(cluster: Cluster) -> None:
    server = await cluster.start(Failing())
    async with grpc.aio.insecure_channel(address(server)) as channel:
        stub: Any = echo_pb2_grpc.EchoStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Echo(echo())
    await until(lambda: bool(kept(server)), "it has ended")
    (found,) = kept(server)
    assert [(span["name"], span["status"]) for span in found["spans"]] == [("batch Failing.shout", "failed")]


async def test_a_full_replica_keeps_no_trace_of_what_it_refuses(cluster: Cluster) -> None:
    gate = asyncio.Event()

    async def hold(_: web.Request) -> web.Response:
        await gate.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/", hold)
    server = await cluster.start(app, max_ongoing_requests=1)
    async with ClientSession() as client:
        url = f"http://127.0.0.1:{server.http_port}/"
        first = asyncio.ensure_future(client.get(url))
        await until(lambda: server.readiness().ongoing == 1, "it is full")
        async with client.get(url, headers={"traceparent": SAMPLED}) as response:
            assert response.status == 503
        gate.set()
        (await first).release()
    assert kept(server) == []


async def test_a_call_that_nobody_reads_and_one_past_its_deadline_say_so(cluster: Cluster) -> None:
    service = EchoService()
    know(await cluster.start(service))

    async def ask(_: web.Request) -> web.Response:
        stub: Any = handle(echo_pb2_grpc.EchoStub, "echo-child")
        await stub.Echo(echo())  # connected
        with pytest.raises(DeadlineExceeded):
            await stub.Echo(echo("wait"), timeout=0.05)
        unread = stub.Echo(echo())
        await until(unread.done, "it has ended, and nobody has read it")
        del unread
        return web.Response()

    app = web.Application()
    app.router.add_get("/", ask)
    parent = await cluster.start(app, service="shop")
    async with ClientSession() as client:
        url = f"http://127.0.0.1:{parent.http_port}/"
        async with client.get(url, headers={"traceparent": SAMPLED}) as response:
            assert response.status == 200
    assert [span["status"] for span in kept(parent)[0]["spans"]] == ["OK", "deadline_exceeded", "not read"]


async def test_a_call_that_waited_for_room_says_so(cluster: Cluster) -> None:
    full = await cluster.start(EchoService("full"), service="echo-child", replica="full", max_ongoing_requests=1)
    know(full)
    service: Any = full._servicers[0]

    async def ask(_: web.Request) -> web.Response:
        stub: Any = handle(echo_pb2_grpc.EchoStub, "echo-child")
        await stub.Echo(echo())  # connected
        waiting = asyncio.ensure_future(_awaited(stub.Echo(echo("wait"))))
        await until(lambda: service.begun == 1, "the first call has the only place")
        second = asyncio.ensure_future(_awaited(stub.Echo(echo())))
        request = current_request()
        spans = request.trace.spans if request is not None and request.trace is not None else []
        await until(lambda: bool(spans[2].events), "the second one was refused")
        service.gate.set()
        await asyncio.gather(waiting, second)
        return web.Response()

    app = web.Application()
    app.router.add_get("/buy", ask)
    parent = await cluster.start(app, service="shop")
    async with ClientSession() as client:
        url = f"http://127.0.0.1:{parent.http_port}/buy"
        async with client.get(url, headers={"traceparent": SAMPLED}) as response:
            assert response.status == 200
    _, first, second = kept(parent)[0]["spans"]
    assert [each["name"] for each in first["events"]] == []
    assert second["status"] == "OK"
    told = [each["name"] for each in second["events"]]
    assert told[0] == "is tried again: overloaded"
    assert told[-2:] == ["waits for a replica with room", "has a replica"]


async def test_without_traces_nothing_has_one(cluster: Cluster) -> None:
    child = await cluster.start(EchoService(), service="echo-child", traces=None)
    know(child)
    parent = await cluster.start(Shop().aiohttp(), service="shop", traces=None)
    await _http(parent)
    assert parent.edge.traces is None
    (seen,) = child._servicers[0].seen  # type: ignore[attr-defined]
    assert (seen.trace, seen.traceparent) == (None, SAMPLED)
    async with ClientSession() as client, client.get(f"http://127.0.0.1:{parent.admin_port}/traces") as response:
        assert response.status == 404


async def test_the_admin_port_has_them(cluster: Cluster) -> None:
    know(await cluster.start(EchoService()))
    parent = await cluster.start(Shop().aiohttp(), service="shop")
    await _http(parent)
    async with ClientSession() as client, client.get(f"http://127.0.0.1:{parent.admin_port}/traces") as response:
        assert [each["trace"] for each in (await response.json())["traces"]] == [TRACE]
