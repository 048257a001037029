"""An aiohttp application behind the edge, asked over HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import time
from contextlib import suppress
from traceback import format_exception
from typing import Any, Protocol

import pytest
from aiohttp import ClientSession, web
from aiohttp.client_exceptions import ClientConnectionError, ClientPayloadError
from pierhead import Backpressure, BadRequest, Settings, UserCodeError, current_request, handle
from pierhead.deadlines import Deadlines
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.edge.admission import Admission
from pierhead.edge.edge import Edge
from pierhead.http.constants import CLIENT_LEFT
from pierhead.http.errors import ERROR_BODY, ERROR_HEADERS
from pierhead.http.known import is_known
from pierhead.http.visit import Visit
from pierhead.metrics import RuntimeMetrics
from pierhead.replica.server import ReplicaServer
from pierhead.request import TIMEOUT_KEY

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.conftest import make_unknown
from tests.unit.runtime.harness import Cluster, EchoService, echo, errors, generate, know, until
from tests.unit.runtime.test_asgi import Site as AsgiSite

child = handle(EchoStub, "echo-child")


class AnySite(Protocol):
    """What a test of every kind of server needs of an application."""

    @property
    def app(self) -> object: ...
    @property
    def gate(self) -> asyncio.Event: ...
    @property
    def begun(self) -> int: ...
    @property
    def cancelled(self) -> int: ...


class Site:
    """An application and what happened in it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun = 0
        self.cancelled = 0
        self.app = web.Application()
        self.app.add_routes(
            [
                web.get("/items/{id}", self.item),
                web.get("/wait", self.wait),
                web.get("/child", self.child),
                web.get("/stream", self.stream),
                web.get("/tokens", self.tokens),
                web.get("/fail/{how}", self.fail),
                web.post("/body", self.body),
                web.get("/steps", self.steps),
            ]
        )

    async def item(self, request: web.Request) -> web.Response:
        context = current_request()
        assert context is not None
        left = round(context.remaining_s())
        return web.json_response({"id": request.match_info["id"], "trace": context.traceparent, "left": left})

    async def wait(self, _: web.Request) -> web.Response:
        self.begun += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return web.json_response({})

    async def child(self, request: web.Request) -> web.Response:
        reply = await child.Echo(echo(request.query.get("message", "")))
        return web.json_response({"response": reply.response})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"one\n")
        if request.query.get("fail") == "409":
            raise web.HTTPConflict(text="in the middle")
        if "fail" in request.query:
            raise ValueError("in the middle")
        return response

    async def tokens(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for token in child.Generate(generate("wait")):
            await response.write(f"{token.index}\n".encode())
        return response

    async def fail(self, request: web.Request) -> web.Response:
        match request.match_info["how"]:
            case "bad":
                raise BadRequest("user_id: expected an integer >= 0, found -1")
            case "conflict":
                raise web.HTTPConflict(text="twice")
            case "move":
                raise web.HTTPFound("/items/1")
            case "login":
                raise web.HTTPUnauthorized(text="who are you?", headers={"WWW-Authenticate": "Bearer"})
            case "nothing":
                return None  # type: ignore[return-value]  # the mistake
            case "cancelled":
                raise asyncio.CancelledError
        raise ValueError("boom")

    async def steps(self, _: web.Request) -> web.Response:
        for _step in range(20):
            await asyncio.sleep(0)
        return web.json_response({})

    async def body(self, request: web.Request) -> web.Response:
        return web.json_response({"bytes": len(await request.read())})


@pytest.fixture
async def site(aiohttp_version: str) -> Site:
    """With a known version of aiohttp and with an unknown one."""
    return Site()


@pytest.fixture(params=["known aiohttp", "unknown aiohttp", "asgi"])
async def each_site(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AnySite:
    """Behind each kind of server."""
    if request.param == "unknown aiohttp":
        make_unknown(monkeypatch)
    return AsgiSite() if request.param == "asgi" else Site()


async def start(cluster: Cluster, site: AnySite, **settings: Any) -> tuple[ReplicaServer, str]:
    server = await cluster.start(site.app, service="echo", **settings)
    return server, f"http://127.0.0.1:{server.http_port}"


async def raw(server: ReplicaServer, request: bytes, body: bytes = b"") -> bytes:
    """Everything that is answered to bytes on a connection of their own; `request` lacks its last line ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
    try:
        writer.write(request + b"\r\nConnection: close\r\n\r\n" + body)
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_the_request_s_id_goes_in_and_out(cluster: Cluster, site: Site, client: ClientSession) -> None:
    _, url = await start(cluster, site)
    async with client.get(f"{url}/items/7", headers={"x-request-id": "mine"}) as response:
        assert response.headers["x-request-id"] == "mine"
        told = await response.json()
        assert 30 < told.pop("left") <= 60
        assert told == {"id": "7", "trace": None}
    async with client.get(f"{url}/stream") as response:
        assert len(response.headers["x-request-id"]) == 16
    async with client.get(f"{url}/items/7", headers={"x-request-id": "x" * 500}) as response:
        assert len(response.headers["x-request-id"]) == 16


ERRORS = [
    ("GET", "/fail/bad", 400, "bad_request", "user_id: expected an integer >= 0, found -1"),
    ("GET", "/fail/conflict", 409, "conflict", "twice"),
    ("GET", "/nowhere", 404, "not_found", "no route for /nowhere; this service has /body, /child"),
    ("DELETE", "/items/1", 405, "method_not_allowed", "/items/1 does not take DELETE; it takes GET, HEAD"),
]


async def test_errors_have_one_shape_and_labels_are_routes(cluster: Cluster, site: Site, client: ClientSession) -> None:
    server, url = await start(cluster, site, debug=True)
    for method, path, status, code, message in ERRORS:
        async with client.request(method, url + path) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (status, code)
            assert error["message"].startswith(message)
            assert error["request_id"] == response.headers["x-request-id"]
            assert "traceback" not in error, "only of exceptions of user code"
    assert set(server.metrics.requests.values) == {
        ("GET /fail/{how}", "400"), ("GET /fail/{how}", "409"), ("unmatched", "404"), ("unmatched", "405"),
    }  # fmt: skip


async def test_an_application_has_its_own_shape_of_errors(cluster: Cluster, site: Site, client: ClientSession) -> None:
    site.app[ERROR_BODY] = lambda status, code, message, request_id: json.dumps(
        [status, code, message[:4], request_id]
    ).encode()
    server, url = await start(cluster, site, max_ongoing_requests=1, backpressure_status_code=429)
    waiting = asyncio.create_task(client.get(f"{url}/wait"))
    await until(lambda: site.begun == 1, "one request inside")
    async with client.get(f"{url}/fail/bad") as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())[:2] == [429, "backpressure"]
    site.gate.set()
    (await waiting).release()
    told = {"/fail/bad": [400, "bad_request", "user"], "/nowhere": [404, "not_found", "no r"]}
    for path, expected in told.items():
        async with client.get(url + path) as response:
            assert response.content_type == "application/json"
            assert await response.json() == [*expected, response.headers["x-request-id"]]
    if is_known():
        assert b'[400, "bad_request", "this"' in await raw(server, b"GARBAGE")


async def test_headers_that_a_handler_has_for_whatever_error_comes(cluster: Cluster, client: ClientSession) -> None:
    async def handle(request: web.Request) -> web.Response:
        request[ERROR_HEADERS] = {"x-left": "9"}
        if request.path == "/boom":
            raise ValueError("boom")
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.router.add_get("/{path}", handle)
    server = await cluster.start(app, request_timeout_s=0.2)
    for path, status in {"boom": 500, "late": 504}.items():
        async with client.get(f"http://127.0.0.1:{server.http_port}/{path}") as response:
            assert (response.status, response.headers["x-left"]) == (status, "9")
            assert "x-request-id" in response.headers


async def test_http_exceptions_keep_their_headers(cluster: Cluster, site: Site, client: ClientSession) -> None:
    _, url = await start(cluster, site)
    async with client.get(f"{url}/fail/move", allow_redirects=False) as response:
        assert (response.status, response.headers["location"]) == (302, "/items/1")
    async with client.get(f"{url}/fail/login") as response:
        assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert response.content_type == "application/json"
        assert (await response.json())["error"]["message"] == "who are you?"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("boom", "ValueError: boom"),
        ("nothing", "TypeError: the handler of GET /fail/{how} returned NoneType, expected a web.StreamResponse"),
        ("cancelled", "asyncio.exceptions.CancelledError"),
    ],
)
async def test_with_debug_the_client_sees_what_went_wrong(
    cluster: Cluster, site: Site, client: ClientSession, how: str, message: str
) -> None:
    """A CancelledError may come from a future of the service's own: the client is still there and waits."""
    server, url = await start(cluster, site, debug=True)
    async with client.get(f"{url}/fail/{how}") as response:
        error = (await response.json())["error"]
        assert response.status == 500
        assert error["message"].startswith(message)
        assert error["traceback"].startswith("Traceback (most recent call last):")
    assert server.metrics.requests.values == {("GET /fail/{how}", "500"): 1}
    assert server.readiness().ongoing == 0


async def test_a_body_that_cannot_be_read_is_the_client_s_fault(
    cluster: Cluster, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    server, _ = await start(cluster, site)
    head = b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 5"
    answer = await raw(server, head, b"hello")
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"the request body cannot be read: " in answer
    assert not [record for record in caplog.records if record.name == "pierhead" and record.levelname == "ERROR"]


async def test_a_second_response_to_one_request_is_not_taken_for_the_next_one_s(cluster: Cluster, site: Site) -> None:
    """A handler that has sent a response by itself and returns another one, by mistake."""

    async def twice(request: web.Request) -> web.StreamResponse:
        first = web.StreamResponse()
        await first.prepare(request)
        await first.write(b"one")
        await first.write_eof()
        return web.Response(text="second")

    site.app.router.add_get("/twice", twice)
    server, _ = await start(cluster, site)
    answers = await raw(server, b"GET /twice HTTP/1.1\r\nHost: a\r\n\r\nGET /steps HTTP/1.1\r\nHost: a")
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert b"second" not in answers


async def test_head_of_a_stream_leaves_nothing_on_the_connection(cluster: Cluster, site: Site) -> None:
    """aiohttp sends the body all the same; the next request on the connection would get it as its answer."""
    server, _ = await start(cluster, site)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
    writer.write(b"HEAD /stream HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"connection: close\r\n" in head.lower()
        await reader.read()  # ends: the connection is closed
    writer.close()
    await writer.wait_closed()


async def test_a_body_that_is_too_large(cluster: Cluster, site: Site, client: ClientSession) -> None:
    _, url = await start(cluster, site)
    async with client.post(f"{url}/body", data=io.BytesIO(bytes(1024**2 + 1))) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (413, "payload_too_large")
        assert "1048576 bytes" in error["message"]


class TestDeadline:
    @pytest.mark.parametrize(("own_s", "headers"), [(0.1, {}), (60, {"x-request-timeout-seconds": "0.1"})])
    async def test_it_ends_the_request(
        self, cluster: Cluster, each_site: AnySite, client: ClientSession, own_s: float, headers: dict[str, str]
    ) -> None:
        """The service's own, or the client's."""
        _, url = await start(cluster, each_site, request_timeout_s=own_s)
        async with client.get(f"{url}/wait", headers=headers) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (504, "deadline_exceeded")
            assert error["message"] == "GET /wait was not done within 0.1 s"
        assert each_site.cancelled == 1

    @pytest.mark.parametrize(("asked", "left"), [("700", 700), ("3600", 2000)])
    async def test_a_client_may_ask_for_less_time_than_the_service_gives(
        self, cluster: Cluster, each_site: AnySite, client: ClientSession, asked: str, left: int
    ) -> None:
        _, url = await start(cluster, each_site, request_timeout_s=2000)
        async with client.get(f"{url}/items/1", headers={"x-request-timeout-seconds": asked}) as response:
            assert left / 2 < (await response.json())["left"] <= left

    async def test_one_that_makes_no_sense(self, cluster: Cluster, each_site: AnySite, client: ClientSession) -> None:
        _, url = await start(cluster, each_site)
        for value in ("soon", "-1", "0", "nan", "inf"):
            async with client.get(f"{url}/items/1", headers={"x-request-timeout-seconds": value}) as response:
                assert response.status == 400
                message = (await response.json())["error"]["message"]
                assert message == f'x-request-timeout-seconds: expected a number of seconds above 0, found "{value}"'

    async def test_a_handler_that_takes_no_notice_of_it_is_let_finish(
        self, cluster: Cluster, site: Site, client: ClientSession
    ) -> None:
        async def stubborn(_: web.Request) -> web.Response:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return web.Response(text="all the same")

        site.app.router.add_get("/stubborn", stubborn)
        server, url = await start(cluster, site, request_timeout_s=0.3)
        async with client.get(f"{url}/stubborn") as response:
            assert (response.status, await response.text()) == (200, "all the same")
        async with client.get(f"{url}/items/1") as response:
            assert response.status == 200, "the connection continues"
        assert server.readiness().ongoing == 0


class TestCallee:
    async def test_it_gets_id_and_deadline(self, cluster: Cluster, site: Site, client: ClientSession) -> None:
        service = EchoService()
        know(await cluster.start(service))
        _, url = await start(cluster, site)
        headers = {"x-request-timeout-seconds": "50", "x-request-id": "mine"}
        async with client.get(f"{url}/child?message=hi", headers=headers) as response:
            assert await response.json() == {"response": "echo: hi"}
        (seen,) = service.seen
        assert seen is not None
        assert seen.request_id == "mine"
        assert 30 < seen.deadline - time.monotonic() <= 50

    async def test_it_gets_a_new_trace_for_one_that_could_not_travel_on(self, cluster: Cluster, site: Site) -> None:
        """gRPC refuses to send such metadata: the client's header would fail every call that is made for it."""
        service = EchoService()
        know(await cluster.start(service))
        server, _ = await start(cluster, site)
        for trace in (b"00-\xe9", "00-\u00e9".encode(), b"00-\t1", b"x" * 5000, b"00-1"):
            answer = await raw(server, b"GET /child?message=hi HTTP/1.1\r\nHost: x\r\ntraceparent: " + trace)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert [len(seen.traceparent or "") for seen in service.seen if seen] == [55] * 5

    async def test_a_callee_s_error_arrives_with_its_own_code_and_text(
        self, cluster: Cluster, each_site: AnySite, client: ClientSession
    ) -> None:
        know(await cluster.start(EchoService()))
        _, url = await start(cluster, each_site)
        for message, status, code, text in (
            ("bad", 400, "bad_request", 'message: expected anything but "bad"'),
            ("boom", 500, "internal", "internal error [error id "),
            ("abort", 409, "remote", "there is one already"),
        ):
            async with client.get(f"{url}/child", params={"message": message}) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (status, code)
                assert error["message"].startswith(text)
                assert "Traceback" not in error["message"], "a callee's traceback is not the client's business"


@pytest.mark.parametrize(
    ("settings", "status", "retry_after"),
    [
        ({}, 503, "1"),
        ({"backpressure_status_code": 429, "backpressure_retry_after_s": 2.2}, 429, "3"),
        ({"backpressure_retry_after_s": 0.0}, 503, "0"),
    ],
)
async def test_a_full_replica_refuses_before_any_work_as_the_service_s_definition_says(
    cluster: Cluster, each_site: AnySite, client: ClientSession, settings: dict[str, Any], status: int, retry_after: str
) -> None:
    server, url = await start(cluster, each_site, max_ongoing_requests=1, **settings)
    first = asyncio.ensure_future(client.get(f"{url}/wait").__aenter__())
    await until(lambda: each_site.begun == 1, "one request is in flight")
    async with client.get(f"{url}/wait") as response:
        assert (response.status, response.headers["Retry-After"]) == (status, retry_after)
        assert (await response.json())["error"]["code"] == "backpressure"
        assert "x-request-id" in response.headers
    assert each_site.begun == 1
    each_site.gate.set()
    (await first).release()
    assert server.metrics.refused.values[("overloaded",)] == 1
    assert sorted(code for _, code in server.metrics.requests.values) == ["200", str(status)]


async def test_an_error_s_own_retry_after_is_kept(cluster: Cluster, site: Site, client: ClientSession) -> None:
    async def full(_: web.Request) -> web.Response:
        raise Backpressure("come back at seven", retry_after_s=7)

    site.app.router.add_get("/full", full)
    _, url = await start(cluster, site, backpressure_status_code=429)
    async with client.get(f"{url}/full") as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "7")


class TestCalleesTraceback:
    async def test_it_is_part_of_that_of_an_error_that_it_led_to(
        self, cluster: Cluster, site: Site, client: ClientSession, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def wrapped(_: web.Request) -> web.Response:
            try:
                await child.Echo(echo("boom"))
            except UserCodeError as error:
                raise RuntimeError("the child does not work") from error
            return web.Response()

        site.app.router.add_get("/wrapped", wrapped)
        know(await cluster.start(EchoService()))
        _, url = await start(cluster, site)
        async with client.get(f"{url}/wrapped") as response:
            error = (await response.json())["error"]
        assert "traceback" not in error, "only with debug"
        error_id = error["message"].split("[error id ")[1].rstrip("]")
        (record,) = [record for record in caplog.records if error_id in record.getMessage()]
        assert record.exc_info is not None
        told = "".join(format_exception(record.exc_info[1]))
        assert "the child does not work" in told
        assert "traceback at the callee:" in told
        assert 'raise ValueError("boom")' in told


@pytest.mark.parametrize(
    "head",
    [
        b"this is no request",
        b"GET / HTTP/1.1\r\nHost: x\r\nbad header",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: many",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 100_000,
    ],
    ids=["no request", "bad header", "bad length", "long header"],
)
async def test_a_malformed_request_is_answered_in_the_one_shape(
    cluster: Cluster, site: Site, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Where aiohttp is known; any other one answers in its own words."""
    server, _ = await start(cluster, site)
    answer = await raw(server, head)
    top, _, body = answer.partition(b"\r\n\r\n")
    assert top.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    if not is_known():
        return
    error = json.loads(body)["error"]
    assert error["code"] == "bad_request"
    assert error["message"].startswith("this is not an HTTP request: ")
    assert len(error["message"]) < 300, "it is not sent back whole"
    assert f"x-request-id: {error['request_id']}".encode() in top.lower()
    assert server.metrics.requests.values == {("malformed", "400"): 1}
    assert not errors(caplog), "a client's fault is not ours"


class TestGauges:
    @pytest.mark.parametrize("path", ["/steps", "/items/1", "/child?message=hi", "/tokens", "/fail/boom", "/nowhere"])
    async def test_a_client_that_leaves_at_any_turn_of_the_loop_leaves_nothing_behind(
        self, cluster: Cluster, each_site: AnySite, path: str
    ) -> None:
        service = EchoService()
        service.gate.set()
        child_server = await cluster.start(service)
        know(child_server)
        server, _ = await start(cluster, each_site)
        answered = 0
        turns = 0
        while answered < 3:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            for _ in range(turns):
                await asyncio.sleep(0)
            answered += bool(reader._buffer)  # type: ignore[attr-defined]
            writer.transport.abort()
            await until(lambda: server.readiness().ongoing == 0, f"the count is back after {turns} turns")
            turns += 1
        await until(lambda: child_server.readiness().ongoing == 0, "the callee's count is back")
        assert turns > 5, "some were cut off before their end"
        if path == "/tokens":
            assert "499" in {code for _, code in server.metrics.requests.values}, "and were counted as such"


@pytest.mark.parametrize(("seconds_ago", "counted"), [(0.0, "499"), (2.0, "504")])
async def test_a_client_that_leaves_after_its_deadline_counts_as_answered_too_late(
    seconds_ago: float, counted: str
) -> None:
    read, codes = {TIMEOUT_KEY: "1"}.get, list[str]()
    visit = Visit(read, Edge(Settings(), Admission(1), RuntimeMetrics()))
    visit.started -= seconds_ago
    visit.ended = codes.append
    visit.begin(read, Deadlines.current())
    visit.end("GET /", CLIENT_LEFT)
    assert codes == [counted]


@pytest.mark.parametrize("how", ["1", "409"])
async def test_a_failure_after_the_response_has_begun_cuts_the_connection(
    cluster: Cluster, each_site: AnySite, client: ClientSession, how: str
) -> None:
    _, url = await start(cluster, each_site)
    with pytest.raises((ClientPayloadError, ClientConnectionError)):
        async with client.get(f"{url}/stream?fail={how}") as response:
            await response.read()
    async with client.get(f"{url}/items/1") as response:
        assert response.status == 200


class TestDrain:
    async def test_open_connections_are_served_to_the_end_and_then_closed(
        self, cluster: Cluster, each_site: AnySite, client: ClientSession
    ) -> None:
        server, url = await start(cluster, each_site)
        first = asyncio.ensure_future(client.get(f"{url}/wait").__aenter__())
        await until(lambda: each_site.begun == 1, "one request is in flight")
        server.stop()
        await until(lambda: server.state == "draining", "it drains")
        async with client.get(f"{url}/items/1") as response:
            assert (response.status, response.headers["Connection"]) == (200, "close")
        each_site.gate.set()
        response = await first
        assert response.status == 200
        response.release()
        await cluster.ended(server)
