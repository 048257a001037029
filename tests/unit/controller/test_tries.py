"""Requests that operators try: the API in front of an edge that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from pierhead.contract.v1.application_pb2 import Application

from controller.api_tokens import digest_of, read_tokens
from controller.daemon import edge_calls
from controller.daemon.bodies import LONGEST_TRY, MOST_HEADERS, try_in
from controller.daemon.callers import Gatekeeper
from controller.daemon.edge_calls import EdgeAddress, EdgeCalls
from controller.errors import InvalidRequest, TooMany
from controller.status.methods import methods
from controller.status.records.changes import Try
from tests.harness.applications import contract
from tests.harness.certificates import made, write
from tests.harness.waiting import PATIENCE_S
from tests.unit.controller.control import Control, until, version
from tests.unit.controller.test_api import JSON, Client, bearer, error_of, serving
from tests.unit.controller.worlds import service

Answer = Callable[[web.Request], Any]
KEY = "sk-the-clients-own"
SHOP = service("web", route="/shop", host="*.shop.example")
RANKER = service("ranker", route=None, protocol="grpc", grpc_services=("shop.Ranker", "shop.Unknown"), replicas=1)


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, SHOP, RANKER, service("api", route=None, replicas=1))


@contextlib.asynccontextmanager
async def edge_of(control: Control, answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    """The API of a stack whose HAProxy answers like this."""
    app = web.Application(client_max_size=16 << 20)
    app.router.add_route("*", "/{path:.*}", answer)
    server = TestServer(app)
    await server.start_server(ssl=tls)
    async with server as edge:
        control.edge = EdgeAddress(str(edge.make_url("/")).rstrip("/"), "")
        async with serving(control, web=2, ranker=1) as client:
            yield client


async def tried(client: Client, path: str, method: str = "GET", name: str = "web", **more: Any) -> ClientResponse:
    body = {"path": path, "method": method, **more}
    return await client.post(f"/api/v1/services/{name}/try", json=body)


async def parts_of(response: ClientResponse) -> list[dict[str, Any]]:
    assert (response.status, response.content_type) == (200, "text/event-stream"), await response.text()
    lines = [line async for line in response.content if line.startswith(b"data: ")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def joined(parts: list[dict[str, Any]]) -> str:
    return "".join(part.get("text", "") for part in parts)


def certificate_of(name: str, directory: Path) -> ssl.SSLContext:
    """Of a server that has a certificate for this name alone, which nobody has signed."""
    write(directory / "edge.pem", *made(name, now=time.time()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "edge.pem")
    return context


@pytest.mark.parametrize("over_tls", [False, True])
async def test_a_request_reaches_the_edge_as_a_client_sends_it(
    control: Control, over_tls: bool, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}
    tls = certificate_of("shop.example", tmp_path) if over_tls else None

    async def answer(request: web.Request) -> web.Response:
        seen.update(method=request.method, path=request.raw_path, headers=request.headers, body=await request.text())
        return web.json_response({"answer": "ä"}, headers={"X-Own": "1"})

    async with edge_of(control, answer, tls) as client:
        headers = {"X-Mine": "a, b", "Content-Type": "application/x-mine"}
        more: dict[str, Any] = {"headers": headers, "body": '{"user": 3}', "key": KEY, "timeout_s": 5}
        first, *parts = await parts_of(await tried(client, "/shop/b%20y?user=3&x=%2F", "POST", **more))
    assert (seen["method"], seen["path"], seen["body"]) == ("POST", "/shop/b%20y?user=3&x=%2F", '{"user": 3}')
    assert {name: seen["headers"][name] for name in headers} == headers
    assert (seen["headers"]["Authorization"], seen["headers"]["Host"]) == (f"Bearer {KEY}", "try.shop.example")
    assert seen["headers"]["X-Request-Id"] == first["request_id"] != ""
    assert seen["headers"]["traceparent"].startswith(f"00-{first['request_id'].replace('-', '')}-")
    assert seen["headers"]["traceparent"].endswith("-01")
    assert "Cookie" not in seen["headers"]
    assert parts[0]["head"]["status"] == "200 OK"
    assert ["X-Own", "1"] in parts[0]["head"]["headers"]
    assert (joined(parts), parts[-1]["end"]["bytes"]) == ('{"answer": "\\u00e4"}', 20)
    assert 0 < parts[0]["head"]["first_byte_s"] <= parts[-1]["end"]["total_s"]
    assert parts[-1]["end"]["problem"] == ""


async def test_the_audit_has_who_tried_what_and_no_secret(control: Control, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def answer(request: web.Request) -> web.Response:
        raise web.HTTPInternalServerError(text="<b>it broke</b>")

    async with edge_of(control, answer) as client:
        more: dict[str, Any] = {"headers": {"X-Mine": KEY}, "body": KEY, "key": KEY}
        parts = await parts_of(await tried(client, f"/shop/buy?token={KEY}", "POST", **more))
        assert (parts[1]["head"]["status"], joined(parts)) == ("500 Internal Server Error", "<b>it broke</b>")
        (asked,) = control.said("asked")
    assert asked == "this machine at 127.0.0.1: try POST /shop/buy"
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("controller")]
    assert ours
    assert not any(KEY in line for line in ours)


async def test_an_answer_comes_as_it_is_sent_and_ends_with_the_page(control: Control) -> None:
    gone = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write("ein Bär: \u00e4".encode()[:-1])
        try:
            await until(lambda: request.transport is None)
        finally:
            gone.set()
        return response

    async with edge_of(control, answer) as client:
        response = await tried(client, "/shop")
        text = ""
        async with asyncio.timeout(PATIENCE_S):
            while "Bär: " not in text:
                line = await response.content.readline()
                if line.startswith(b"data: "):
                    text += json.loads(line[6:]).get("text", "")
        assert not gone.is_set()
        response.close()
        await asyncio.wait_for(gone.wait(), PATIENCE_S)


async def test_what_never_ends_ends_at_its_time_and_at_its_size(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if "late" in request.path:
            await asyncio.sleep(PATIENCE_S)
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"x" * 100_000)
        return response

    async with edge_of(control, answer) as client:
        parts = await parts_of(await tried(client, "/shop"))
        assert len(joined(parts)) == parts[-1]["end"]["bytes"] == edge_calls.MOST_BYTES
        assert parts[-1]["end"]["problem"] == "only the first 1 MiB of the body were read"
        first, last = await parts_of(await tried(client, "/shop/late", timeout_s=0.2))
        assert (first["request_id"] != "", last["end"]["problem"]) == (True, "it had not ended after 0.2 s")
        monkeypatch.setattr(edge_calls, "MOST_CALLS", 0)
        assert (await error_of(await tried(client, "/shop")))[:2] == (503, "too_many")


async def test_an_edge_that_is_away_and_one_that_breaks_off(control: Control) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.abort()
        return response

    async with edge_of(control, answer) as client:
        parts = await parts_of(await tried(client, "/shop"))
        assert (joined(parts), parts[-1]["end"]["problem"]) == ("half", "the answer broke off")
    control.edge = EdgeAddress("http://127.0.0.1:1", "")
    async with serving(control, web=2) as client:
        _, last = await parts_of(await tried(client, "/shop"))
        assert last["end"]["problem"].startswith("no answer of HAProxy that can be read: ")


async def test_a_redirection_is_shown_and_not_followed(control: Control) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        raise web.HTTPFound("http://evil.example/")

    async with edge_of(control, answer) as client:
        parts = await parts_of(await tried(client, "/shop"))
    assert (asked, parts[1]["head"]["status"]) == (["/shop"], "302 Found")
    assert ["Location", "http://evil.example/"] in parts[1]["head"]["headers"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "body: expected"),
    ({"path": "/shop", "host": "evil.example"}, "body: expected"),
    *(
        ({"path": path}, "path: expected")
        for path in (
            *("", "shop", "http://evil.example/", "//evil.example/shop", "@evil.example", "/shop/../admin"),
            *("/shop/%2e%2e/admin", "/shop/%2E./x", "/shop/..%2fadmin", "/shop/.", "/shop\\..\\x", "/shop/x y"),
            *("/shop\r\nx-admin: 1", "/shop\n", "/shopping", "/", "/shop#x", "/sh\u00f6p", 7, None),
        )
    ),
    ({"path": "/shop", "method": "TRACE"}, "method: expected one of GET, "),
    ({"path": "/shop", "method": "get"}, "method: expected"),
    *(
        ({"path": "/shop", "headers": {name: "1"}}, "headers: expected names")
        for name in (
            *("Host", "CONTENT-LENGTH", "transfer-encoding", "Connection", "Upgrade", "X-Forwarded-For", "Forwarded"),
            *(
                "x_forwarded_for",
                "X-Real-IP",
                "Proxy-Authorization",
                "grpc-timeout",
                "x-bin",
                "a b",
                "",
                "a:b",
                "a\r\nb",
            ),
        )
    ),
    ({"path": "/shop", "headers": {"x": "a\r\nHost: evil"}}, "headers.x: expected one line"),
    ({"path": "/shop", "headers": {"x": 1}}, "headers.x: expected"),
    ({"path": "/shop", "headers": {f"x-{n}": "" for n in range(MOST_HEADERS + 1)}}, "headers: expected at most"),
    ({"path": "/shop", "headers": ["x"]}, "headers: expected"),
    ({"path": "/shop", "key": "a\r\nX: 1"}, "key: expected one line"),
    ({"path": "/shop", "body": {"x": 1}}, "body: expected a text"),
    *(({"path": "/shop", "timeout_s": wrong}, "timeout_s: expected") for wrong in (0, 601, "60", True, None)),
]


async def test_nothing_but_a_path_of_the_service_can_be_asked_for(control: Control) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response()

    async with edge_of(control, answer) as client:
        for body, expected in WRONG:
            answered = await error_of(await client.post("/api/v1/services/web/try", json=body))
            assert answered[0] == 400, body
            assert answered[2].startswith(expected), answered
        assert (await tried(client, "/shop", name="nobody")).status == 404
        assert "has no route" in (await error_of(await tried(client, "/shop", name="api")))[2]
        large = json.dumps({"path": "/shop", "body": "x" * (LONGEST_TRY + 1)}).encode()
        for sent, status in ((large, 400), (b" " * (4 << 20), 413)):
            refused = await client.post("/api/v1/services/web/try", data=io.BytesIO(sent), headers=JSON)
            assert refused.status == status
    assert (asked, control.said("asked")) == ([], [])


@pytest.mark.parametrize(
    "body", [{"key": f"\n{KEY}"}, {"headers": {"x": f"\n{KEY}"}}, {"nonsense": KEY}, {"body": [KEY]}]
)
def test_no_refusal_shows_a_secret(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        try_in(json.dumps({"path": "/shop", **body}).encode())
    assert KEY not in str(refused.value)


async def test_a_reader_may_not_and_who_may_scale_may(control: Control) -> None:
    keeper = Gatekeeper(read_tokens("secret", f"r:read:{digest_of('r')},s:scale:{digest_of('s')}"), frozenset)

    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.Response()

    async with edge_of(control, answer) as client:
        application = control.controller.api(keeper).application()
        async with TestServer(application) as guarded:
            for token, status in (("r", 403), ("s", 200)):
                url = guarded.make_url("/api/v1/services/web/try")
                async with client.session.post(url, json={"path": "/shop"}, headers=bearer(token)) as answered:
                    assert answered.status == status
                    await answered.read()
    assert seen == [None], "the token is for the API alone"


@contextlib.asynccontextmanager
async def grpc_edge(reply: Callable[[bytes, grpc.aio.ServicerContext[Any, Any]], Any]) -> AsyncIterator[str]:
    """HAProxy's port of gRPC, with one method."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
            known = details.method == "/shop.Ranker/rank"
            return grpc.unary_unary_rpc_method_handler(reply) if known else None

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_method_of_a_contract_takes_json(control: Control) -> None:
    seen: dict[str, Any] = {}

    async def rank(message: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        seen.update(message=message, metadata=dict(context.invocation_metadata() or ()))
        if message.endswith(b"\x09"):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such user")
        return b"\x0a\x02\x02\x01"  # value: [2, 1]

    control.contracts[version(control, RANKER)] = contract(service="ranker")
    async with grpc_edge(rank) as address:
        control.edge = EdgeAddress(grpc=address)
        async with serving(control, ranker=1) as client:
            found = await (await client.get("/api/v1/services/ranker/contract")).json()
            assert found["methods"] == [{"path": "/shop.Ranker/rank", "example": {"user": 1, "items": [1]}}]
            more: dict[str, Any] = {
                "body": '{"user": 1, "items": [1, 2]}',
                "key": KEY,
                "headers": {"X-Mine": "1"},
                "name": "ranker",
            }
            parts = await parts_of(await tried(client, "/shop.Ranker/rank", "gRPC", **more))
            assert json.loads(joined(parts)) == {"value": ["2", "1"]}
            assert (parts[-1]["end"]["status"], parts[-1]["end"]["problem"]) == ("OK", "")
            metadata = {"authorization": f"Bearer {KEY}", "x-mine": "1", "application": "ranker"}
            assert seen["message"] == b"\x08\x01\x12\x02\x01\x02"
            assert metadata.items() <= seen["metadata"].items()
            assert seen["metadata"]["x-request-id"] == parts[0]["request_id"]
            assert parts[0]["request_id"].replace("-", "") in seen["metadata"]["traceparent"]
            parts = await parts_of(await tried(client, "/shop.Ranker/rank", "gRPC", "ranker", body='{"user": 9}'))
            assert (parts[-1]["end"]["status"], parts[-1]["end"]["problem"]) == ("NOT_FOUND", "no such user")
            for path, body, expected in (
                ("/shop.Ranker/rank", '{"usr": 9}', "body: expected shop.RankerTypes.rank_request as JSON: "),
                ("/shop.Ranker/rank", "{", "body: expected a message as JSON: "),
                ("/shop.Ranker/sort", "{}", "path: no replica's contract has the method"),
                ("/shop.Unknown/rank", "{}", "path: no replica's contract has the method"),
                ("/shop.Shop/buy", "{}", "path: HAProxy has no such gRPC service of ranker"),
            ):
                refused = await error_of(await tried(client, path, "gRPC", "ranker", body=body))
                assert (refused[0], refused[2][: len(expected)]) == (400, expected)


async def test_over_tls_the_page_says_which_client_to_use() -> None:
    calls = EdgeCalls(edge_calls.OVER_TLS, asyncio.Event())
    with pytest.raises(InvalidRequest, match="gRPC over TLS alone"):
        calls.begin(RANKER, Try("/shop.Ranker/rank", "gRPC"), b"")


async def test_so_many_at_a_time_and_a_place_that_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_calls, "MOST_CALLS", 1)
    calls = EdgeCalls(EdgeAddress("http://127.0.0.1:1"), asyncio.Event())

    async def answer(request: web.Request) -> web.StreamResponse:
        first = calls.stream(request, calls.begin(SHOP, Try("/shop"), b""))
        running = asyncio.ensure_future(first)
        await asyncio.sleep(0)  # it has begun, and nothing of it is sent yet
        with pytest.raises(TooMany):
            calls.begin(SHOP, Try("/shop"), b"")
        return await running

    app = web.Application()
    app.router.add_get("/", answer)
    async with TestClient(TestServer(app)) as client:
        for _ in range(2):
            assert '"end"' in await (await client.get("/")).text()


def test_an_example_is_bounded_however_a_type_holds_itself() -> None:
    file = FileDescriptorProto(name="wide.proto", package="wide", syntax="proto3")
    message = file.message_type.add(name="M")
    for number in range(1, 201):
        message.field.add(name=f"f{number}", number=number, type=11, label=1, type_name=".wide.M")
    service = file.service.add(name="S")
    for name in ("A", "B"):
        service.method.add(name=name, input_type=".wide.M", output_type=".wide.M")
    told = Application(files=FileDescriptorSet(file=[file])).SerializeToString()
    assert len(json.dumps([one.example for one in methods(told, ["wide.S"])])) < 10_000


async def test_the_logs_of_one_replica(control: Control) -> None:
    async with serving(control, web=2) as client:
        await until(lambda: len(control.engine.containers) >= 2)
        both = (await (await client.get("/api/v1/services/web/logs")).json())["replicas"]
        chosen = both[1]["name"]
        one = (await (await client.get(f"/api/v1/services/web/logs?replica={chosen}")).json())["replicas"]
        assert (len(both), [each["name"] for each in one]) == (2, [chosen])
