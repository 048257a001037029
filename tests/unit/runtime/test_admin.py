"""The admin port, asked as the controller, HAProxy and Prometheus ask it, and as nobody should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType

import pytest
from aiohttp import ClientSession
from pierhead.replica import admin
from pierhead.replica.admin import (
    MAX_HEAD_BYTES,
    AdminRequest,
    AdminServer,
    Readiness,
    admin_pages,
    admin_taker,
    read_head,
)
from pierhead.replica.user_config import ConfigReport
from pierhead.settings import MAX_USER_CONFIG_BYTES

from tests.harness.waiting import PATIENCE_S

NOTHING: Mapping[str, str] = MappingProxyType({})
JSON = {"Content-Type": "application/json"}


class Admin:
    """A server on a loopback port, and what its pages say."""

    def __init__(self) -> None:
        self.readiness = Readiness("ready", 3, 1, waiting={"b": 1})
        self.metrics = b"some_total 1.0\n"
        self.problem: Exception | None = None
        self.server = AdminServer(admin_pages(lambda: self.readiness, self.expose))
        self.taken: list[str] = []
        self.taking = AdminServer(admin_taker("user_config", self.take, lambda: ConfigReport("1", "0")))
        self.port = 0

    def expose(self) -> bytes:
        if self.problem is not None:
            raise self.problem
        return self.metrics

    def take(self, text: str) -> None:
        if text == "{}":
            raise ValueError("expected another one")
        self.taken.append(text)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def raw(self, sent: bytes) -> bytes:
        """What comes back until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        async with asyncio.timeout(PATIENCE_S):
            got = await reader.read()
        writer.close()
        return got


@pytest.fixture
async def served() -> AsyncIterator[Admin]:
    made = Admin()
    made.port = await made.server.start("127.0.0.1", 0)
    yield made
    await made.server.close()


async def test_the_three_pages(served: Admin) -> None:
    async with ClientSession(served.url) as client:
        async with client.get("/livez") as answer:
            assert (answer.status, await answer.json()) == (200, {"alive": True})
        async with client.get("/readyz?verbose=1") as answer:
            assert answer.status == 200
            assert await answer.json() == {
                "state": "ready",
                "ongoing": 3,
                "queued": 1,
                "detail": "",
                "waiting": {"b": 1},
                "answered": 0,
                "errors": 0,
                "progress": 0,
                "user_config": None,
                "stats": {},
                "stats_version": 0,
                "broken": False,
                "stage": "",
                "lasting": 0,
                "unreached": {},
                "used": 0,
                "sleep": None,
            }
        async with client.get("/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            assert await answer.read() == served.metrics
        served.readiness = Readiness("draining", 3, 0, "stopped")
        async with client.get("/readyz") as answer:
            assert (answer.status, (await answer.json())["state"]) == (503, "draining")


async def test_answers_to_other_requests_list_the_paths(served: Admin) -> None:
    async with ClientSession(served.url) as client:
        async with client.get("/ready") as answer:
            assert (answer.status, await answer.json()) == (
                404,
                {"error": "the admin port answers /livez, /readyz, /metrics"},
            )
        async with client.post("/readyz", data=b"x" * 100) as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
        async with client.head("/metrics") as answer:
            assert (answer.status, answer.headers["Content-Length"], await answer.read()) == (200, "15", b"")


async def test_a_page_that_fails_harms_no_other(served: Admin, caplog: pytest.LogCaptureFixture) -> None:
    served.problem = KeyError("lost")
    async with ClientSession(served.url) as client:
        for path, status in (("/metrics", 500), ("/livez", 200)):
            async with client.get(path) as answer:
                assert answer.status == status
    assert "KeyError: 'lost'" in caplog.text


async def test_a_connection_stays_open_until_the_server_closes(served: Admin) -> None:
    _, left = await asyncio.open_connection("127.0.0.1", served.port)
    left.write(b"GET /livez HT")
    left.transport.abort()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    for _ in range(3):
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Connection: keep-alive" in head
        assert await reader.readexactly(15) == b'{"alive": true}'
    await served.server.close()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", served.port)


async def test_a_head_that_is_too_long_is_refused(served: Admin) -> None:
    got = await served.raw(b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"Connection: close" in got


async def test_requests_in_one_packet_are_answered_one_after_the_other(served: Admin) -> None:
    got = await served.raw(b"GET /livez HTTP/1.1\r\n\r\nGET /readyz HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert [part.split(b"\r\n")[0] for part in got.split(b"HTTP/1.1 ")[1:]] == [b"200 OK", b"200 OK"]
    assert got.index(b'"alive"') < got.index(b'"ready"')


async def test_a_connection_without_a_request_is_closed(served: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "SLOW_S", 0.01)
    assert await served.raw(b"GET /livez") == b""


async def put(made: Admin, body: bytes, method: str = "PUT", headers: Mapping[str, str] = NOTHING) -> tuple[int, str]:
    port = await made.taking.start("127.0.0.1", 0)
    try:
        async with ClientSession() as client:
            url = f"http://127.0.0.1:{port}/user-config"
            async with client.request(method, url, data=body, headers={**JSON, **headers}) as answer:
                return answer.status, await answer.text()
    finally:
        await made.taking.close()


@pytest.mark.parametrize("size", [1, MAX_USER_CONFIG_BYTES])
async def test_a_body_is_taken_whole(served: Admin, size: int) -> None:
    status, text = await put(served, b"x" * size)
    assert (status, text) == (200, '{"user_config": {"wanted": "1", "applied": "0", "error": ""}}')
    assert served.taken == ["x" * size]


@pytest.mark.parametrize(
    ("body", "method", "expected"),
    [
        (b"{}", "PUT", (400, '{"error": "user_config: expected another one"}')),
        (b"\xff", "PUT", (400, "user_config: 'utf-8' codec can't decode")),
        (b"", "PUT", (413, "/user-config: expected a body of 1 to 65536 bytes and its length")),
        (
            b"x" * (MAX_USER_CONFIG_BYTES + 1),
            "PUT",
            (413, "/user-config: expected a body of 1 to 65536 bytes and its length"),
        ),
        (b"", "GET", (405, "/user-config takes PUT")),
        (b"x", "POST", (405, "/user-config takes PUT")),
    ],
)
async def test_other_bodies_are_refused(served: Admin, body: bytes, method: str, expected: tuple[int, str]) -> None:
    status, text = await put(served, body, method)
    assert status == expected[0]
    assert expected[1] in text
    assert served.taken == []


@pytest.mark.parametrize("shown", ["", "Bearer another", "Bearer", "t0ken", "Basic t0ken"])
async def test_only_who_knows_the_token_may_change_something(shown: str) -> None:
    made = Admin()
    made.taking = AdminServer(admin_taker("user_config", made.take, lambda: ConfigReport("1", "0")), "t0ken")
    status, text = await put(made, b"{}", headers={"Authorization": shown} if shown else {})
    assert (status, made.taken) == (403, [])
    assert "for the controller alone" in text
    assert (await put(made, b'{"a": 1}', headers={"Authorization": "Bearer t0ken"}))[0] == 200


NO_REQUEST = AdminRequest("")


@pytest.mark.parametrize(
    ("head", "request_"),
    [
        (b"GET /a?b=c HTTP/1.1", AdminRequest("GET", "/a", goes_on=True)),
        (b"GET /a HTTP/1.0", AdminRequest("GET", "/a", goes_on=False)),
        (b"GET /a HTTP/1.0\r\nConnection: Keep-Alive", AdminRequest("GET", "/a", goes_on=True)),
        (b"GET /a HTTP/1.1\r\nConnection: close", AdminRequest("GET", "/a", goes_on=False)),
        (b"POST /a HTTP/1.1\r\nContent-Length: 5", AdminRequest("POST", "/a", goes_on=False)),
        (b"POST /a HTTP/1.1\r\nContent-Length: 0", AdminRequest("POST", "/a", goes_on=True)),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked", AdminRequest("POST", "/a", goes_on=False)),
        (b"PUT /a HTTP/1.1\r\nContent-Length: 5", AdminRequest("PUT", "/a", goes_on=False, length=5)),
        (b"PUT /a HTTP/1.1\r\nContent-Length: 1_0", AdminRequest("PUT", "/a", goes_on=False, length=-1)),
        (b"PUT /a HTTP/1.1\r\nTransfer-Encoding: chunked", AdminRequest("PUT", "/a", goes_on=False, length=-1)),
        (b"nonsense", NO_REQUEST),
        (b"GET /livez", NO_REQUEST),
        (b"GET /livez HTTP/2.0", NO_REQUEST),
        (b"GET /livez HTTP/1.1\r\nno colon", NO_REQUEST),
        (b"GET /livez HTTP/1.1\r\n: no name", NO_REQUEST),
        (b"GET /livez HTTP/1.1\r\nname : space", NO_REQUEST),
        (b"\x16\x03\x01\x02\x00\x01\x00", NO_REQUEST),
    ],
)
def test_heads(head: bytes, request_: AdminRequest) -> None:
    assert read_head(head + b"\r\n\r\n") == request_
