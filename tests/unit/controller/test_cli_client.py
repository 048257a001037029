"""The API's client over real HTTP: answers of all kinds become documents or one sentence with an exit code."""

from __future__ import annotations

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from controller.tool import patience
from controller.tool.client import ControllerClient, service_path
from controller.tool.errors import BadInput, CommandError, NotYet, Unreachable
from tests.harness.http_answers import sends, serving


def refusal(message: str) -> bytes:
    return json.dumps({"error": {"code": "x", "message": message}}).encode()


def test_what_is_asked_for_and_with_what() -> None:
    seen: list[tuple[str, str | None]] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append((handler.path, handler.headers.get("Authorization")))
        sends(handler, 200, b'{"a": 1}')

    with serving(answer) as url:
        client = ControllerClient(f"{url}/", "secret")
        assert client.get(service_path("a/b c", "logs"), {"tail": "1"}) == {"a": 1}
    assert seen == [("/api/v1/services/a%2Fb%20c/logs?tail=1", "Bearer secret")]


def test_a_unix_socket_is_asked_as_an_address_is(tmp_path: Path) -> None:
    path, seen = tmp_path / "p.sock", list[str | None]()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers.get("Host"))
        handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        sends(handler, 404 if handler.path == "/no" else 200, refusal("no") if handler.path == "/no" else b'{"a": 1}')

    with serving(answer, at=path):
        client = ControllerClient(f"unix://{path}")
        assert client.get("/api/v1/services") == client.put("/x", {}) == {"a": 1}
        with pytest.raises(BadInput, match="no"):
            client.get("/no")
    assert seen == ["localhost"] * 3
    with pytest.raises(Unreachable, match=r"does not answer at unix:///.*start the stack with `pierhead up`"):
        ControllerClient(f"unix://{tmp_path}/none.sock").get("/")


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (404, refusal("there is no service"), BadInput, "there is no service"),
        (502, refusal("the engine said no"), CommandError, "the engine said no"),
        (500, b"<html>", CommandError, "the API answered 500, without a reason"),
        (200, b"<html>", CommandError, "is not Pierhead's API: its answer is not JSON"),
        (200, b"[]", CommandError, "is not Pierhead's API: its answer is no JSON object"),
    ],
)
def test_refusals(status: int, body: bytes, kind: type[CommandError], words: str) -> None:
    with serving(lambda handler: sends(handler, status, body)) as url, pytest.raises(CommandError) as caught:
        ControllerClient(url).get("/")
    assert type(caught.value) is kind
    assert words in str(caught.value)


def test_a_controller_that_has_just_started_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "POLL_S", 0.01)
    answers: list[tuple[int, bytes, dict[str, str]]] = [
        (503, refusal("just started"), {"Retry-After": "1"}),
        (200, b"{}", {}),
    ]
    with serving(lambda handler: sends(handler, *answers.pop(0))) as url:
        assert patience.patiently(lambda: ControllerClient(url).get("/")) == {}
    with serving(lambda handler: sends(handler, 503, refusal("the engine is away"))) as url:
        with pytest.raises(CommandError, match="the engine is away") as caught:
            patience.patiently(lambda: ControllerClient(url).get("/"))
        assert not isinstance(caught.value, NotYet), "nobody said that it passes"


def test_a_controller_that_takes_the_place_of_a_lost_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change too: it was not sent, so it cannot have been taken."""
    monkeypatch.setattr("controller.tool.client.POLL_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    client = ControllerClient(f"http://127.0.0.1:{address[1]}", patience_s=30.0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.put, "/", {})
        with pytest.raises(TimeoutError):
            answer.result(0.1)
        with serving(lambda handler: sends(handler, 200, b'{"a": 1}'), port=address[1]):
            assert answer.result(30.0) == {"a": 1}


def test_an_address_that_nothing_answers_at_takes_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network drops what is sent to a node that was lost, as the kernel does where a backlog is full."""
    monkeypatch.setattr("controller.tool.project.direct.CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        with socket.create_connection(address), pytest.raises(Unreachable, match="timed out"):
            ControllerClient(f"http://127.0.0.1:{address[1]}", timeout_s=3600).get("/services")


def test_a_change_that_is_not_answered_may_have_been_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(Unreachable, match=r"does not answer at .*start the stack with `pierhead up`"):
            ControllerClient(url, timeout_s=0.1).get("/")
        for ask in (ControllerClient(url, change_timeout_s=0.2).post, ControllerClient(url, change_timeout_s=0.2).put):
            with pytest.raises(Unreachable, match=r"not answered within 0.2 s: it may have accepted the") as late:
                ask("/api/v1/deploy", {})
            assert "pierhead up" not in str(late.value), "it runs"
    with pytest.raises(Unreachable, match="start the stack with `pierhead up`"):
        ControllerClient(url).post("/api/v1/deploy", {})
    with serving(lambda handler: None) as url, pytest.raises(Unreachable, match=r"\(.*\): it may have accepted the"):
        ControllerClient(url).post("/api/v1/deploy", {})


@pytest.mark.parametrize(
    "url",
    [
        "gpu-box:8100",
        "http://[::1",
        "http://:8100",
        "http://gpu-box\n",
        "http://gpu box",
        "http://a:99999",
        "ftp://a",
        "unix://a/b",
    ],
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        ControllerClient(url).get("/")
    assert str(caught.value) == f"PIERHEAD_API_URL: expected http://host:port or unix:///path, found {url!r}"


@pytest.mark.parametrize(
    ("token", "found"), [("secret\r", r"'\r' as character 7 of 7"), ("s\u20ac", r"'\u20ac' as character 2")]
)
def test_a_token_that_no_header_can_carry(token: str, found: str) -> None:
    with pytest.raises(BadInput, match=f"PIERHEAD_API_TOKEN: .*found {re.escape(found)}") as caught:
        ControllerClient("http://127.0.0.1:1", token).get("/")
    assert "secret" not in str(caught.value)
