"""Short answers are the very bytes that aiohttp would have written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_writer import StreamWriter
from aiohttp.test_utils import make_mocked_request
from hypothesis import given, settings
from hypothesis import strategies as st
from pierhead.http.inside import SHORT_BYTES, ShortResponses
from pierhead.request import REQUEST_ID_KEY

from tests.unit.runtime.test_direct_writer import Wire

ID = "5f0c9a1be2d34c77"


class Asked:
    """One request on a wire of its own."""

    def __init__(
        self, method: str, version: Any = HttpVersion11, headers: dict[str, str] | None = None, *, closes: bool = False
    ) -> None:
        self.wire = Wire()
        protocol: Any = SimpleNamespace(
            transport=self.wire, _paused=False, ssl_context=None, peername=None, sockname=None
        )
        self.writer = StreamWriter(protocol, None)  # type: ignore[arg-type]  # it never waits here
        self.request = make_mocked_request(
            method, "/", headers or {}, version=version, writer=self.writer, protocol=protocol
        )
        protocol.transport = self.wire
        # The parser's word, not the headers', is what aiohttp goes by.
        self.request._message = self.request._message._replace(should_close=closes)


async def by_aiohttp(asked: Asked, response: web.Response) -> None:
    """As aiohttp answers, with the header that `inside.Request` adds."""

    async def hook(_: web.StreamResponse) -> None:
        response.headers[REQUEST_ID_KEY] = ID

    asked.request._prepare_hook = hook  # type: ignore[assignment]
    await response.prepare(asked.request)
    await response.write_eof()


def undated(written: bytes) -> bytes:
    return re.sub(rb"Date: [^\r]+", b"Date: then", written)


HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "Content-Type", "X-Model", "Set-Cookie", "Content-Length", "Date", "Server", "Connection", REQUEST_ID_KEY,
            "Cache-Control", "Content-Encoding",
        ]
    ),
    st.sampled_from(["text/plain", "5", "close", "keep-alive", "é", ""]),
    max_size=3,
)  # fmt: skip


@st.composite
def responses(draw: st.DrawFn) -> Callable[[], web.Response]:
    headers = draw(HEADERS)
    if headers.get("Content-Length", "5") != "5":
        headers["Content-Length"] = "5"
    body = draw(st.sampled_from([b"hello", b"hello", b"x" * SHORT_BYTES, b"x" * (SHORT_BYTES + 1), b"", None]))
    status = draw(st.sampled_from([200, 200, 201, 204, 304, 404, 503, 599]))
    reason = draw(st.sampled_from([None, None, "Because", "Größe"]))
    what = draw(st.sampled_from(["plain", "plain", "cookie", "chunked", "compressed", "closing", "text"]))

    def make() -> web.Response:
        if what == "text" and "Content-Type" not in headers:
            return web.Response(text="grüß", status=status, headers=headers, content_type="text/csv")
        response = web.Response(body=body, status=status, reason=reason, headers=headers)
        if what == "cookie":
            response.set_cookie("session", "1")
        elif what == "chunked" and "Content-Length" not in headers:
            response.enable_chunked_encoding()
        elif what == "compressed":
            response.enable_compression()
        elif what == "closing":
            response.force_close()
        return response

    return make


@settings(max_examples=1000)
@given(
    make=responses(),
    method=st.sampled_from(["GET", "GET", "POST", "HEAD", "CONNECT", "PURGE"]),
    version=st.sampled_from([HttpVersion11, HttpVersion11, HttpVersion10]),
    headers=st.sampled_from([{}, {"Accept-Encoding": "gzip"}]),
    closes=st.sampled_from([False, False, True]),
)
def test_what_is_written_is_what_aiohttp_writes(
    make: Callable[[], web.Response], method: str, version: Any, headers: dict[str, str], closes: bool
) -> None:
    ours, theirs = (Asked(method, version, headers, closes=closes) for _ in range(2))
    response = make()
    if not ShortResponses().write(ours.request, response, ID):
        assert ours.wire.written == b""
        assert not response.prepared
        return
    other = make()
    asyncio.run(by_aiohttp(theirs, other))
    assert undated(ours.wire.written) == undated(theirs.wire.written)
    assert (response.keep_alive, response.prepared) == (other.keep_alive, other.prepared)
    assert response.body_length == other.body_length
    assert ours.writer.output_size == theirs.writer.output_size


def test_a_short_response_is_written_once_and_only_to_a_client_that_is_there() -> None:
    short, response = ShortResponses(), web.json_response({"error": {}}, status=503, headers={"Retry-After": "1"})
    left = Asked("GET")
    left.wire.closing = True
    assert not short.write(left.request, response, ID)
    first, again = Asked("GET"), Asked("GET")
    assert short.write(first.request, response, ID)
    assert not short.write(again.request, response, ID)
    assert first.wire.written.startswith(b"HTTP/1.1 503 ")
    assert left.wire.written == again.wire.written == b""


def test_a_header_cannot_hold_another_one() -> None:
    asked = Asked("GET")
    response = web.Response(body=b"x", headers={"X-Model": "1"})
    response.headers["X-Model"] = "1\r\nSet-Cookie: stolen=1"
    with pytest.raises(ValueError, match="header"):
        ShortResponses().write(asked.request, response, ID)
    assert asked.wire.written == b""


def test_the_date_goes_with_the_clock() -> None:
    times = iter((784111777.2, 784111777.9, 784111778.0))
    short = ShortResponses(clock=lambda: next(times))
    told = []
    for _ in range(3):
        asked = Asked("GET")
        assert short.write(asked.request, web.Response(body=b"x"), ID)
        told += re.findall(rb"Date: ([^\r]+)", asked.wire.written)
    assert told == [b"Sun, 06 Nov 1994 08:49:37 GMT"] * 2 + [b"Sun, 06 Nov 1994 08:49:38 GMT"]
