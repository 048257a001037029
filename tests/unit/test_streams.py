"""The client of streams tells how each of them ended."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler

import pytest

from tests.harness.http_answers import serving
from tests.harness.streams import CUT, DONE, ERROR_EVENT, GIVEN_UP, Streams
from tests.harness.waiting import eventually

PART = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
FAILED = b'data: {"error": {"message": "it went away"}}\n\n'
END = b"data: [DONE]\n\n"


def write(handler: BaseHTTPRequestHandler, *writes: bytes, status: int = 200, size: int | None = None) -> None:
    """`size`: what the headers say of the answer's size; without it the answer ends with the connection."""
    handler.rfile.read(int(handler.headers["Content-Length"]))
    handler.send_response(status)
    if size is not None:
        handler.send_header("Content-Length", str(size))
    handler.end_headers()
    for data in writes:
        handler.wfile.write(data)


@pytest.mark.parametrize(
    ("writes", "more", "how", "events"),
    [
        ([PART, PART, END], {}, DONE, 2),
        ([PART + PART, PART + END], {}, DONE, 3),
        ([PART, FAILED], {}, ERROR_EVENT, 1),
        ([PART, FAILED, END], {}, CUT, 1),
        ([PART, PART], {}, CUT, 2),
        ([], {}, CUT, 0),
        ([PART, END], {"size": 1000}, CUT, 1),
        ([b"no room"], {"status": 503}, "status 503", 0),
    ],
)
def test_streams_that_the_server_ends(writes: list[bytes], more: dict[str, int], how: str, events: int) -> None:
    with serving(lambda to: write(to, *writes, **more)) as url, Streams(url, "m", count=3, tokens=2) as streams:
        pass
    assert [(each.how, each.events) for each in streams.ended] == [(how, events)] * 3
    assert bool(streams.not_well()) == (how != DONE)
    assert "status" not in more or {each.detail for each in streams.ended} == {"no room"}


def test_a_client_that_leaves() -> None:
    left = threading.Event()

    def go_on(handler: BaseHTTPRequestHandler) -> None:
        write(handler, PART)
        left.wait(10)

    with serving(go_on) as url, Streams(url, "m", count=4, tokens=2) as streams:
        eventually(lambda: streams.begun == 4, "all have begun", 10)
        assert not streams.ended
        streams.give_up()
    left.set()
    assert [each.how for each in streams.ended] == [GIVEN_UP] * 4


def test_one_after_the_other_until_the_block_ends() -> None:
    with serving(lambda to: write(to, PART, END)) as url, Streams(url, "m", count=2, tokens=2, again=True) as streams:
        eventually(lambda: len(streams.ended) > 10, "they continue", 10)
    assert {each.how for each in streams.ended} == {DONE}
