"""What is written directly are the very bytes that aiohttp would have written."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.http_writer import StreamWriter
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from pierhead.http.inside import direct_writer

HEAD = b"first piece"


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closing


class Response:
    """A response that streams, of which the head and a first piece are written."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.protocol: Any = SimpleNamespace(transport=self.wire, _paused=False)
        self.writer = StreamWriter(self.protocol, None)  # type: ignore[arg-type]  # it never waits here

    async def begin(self, *, chunked: bool = True) -> Response:
        if chunked:
            self.writer.enable_chunking()
        await self.writer.write_headers("HTTP/1.1 200 OK", CIMultiDict({"Content-Type": "text/event-stream"}))
        await self.writer.write(HEAD)
        return self


@given(st.lists(st.tuples(st.binary(max_size=5000), st.booleans()), max_size=20))
def test_any_mixture_with_aiohttps_own_writes(pieces: list[tuple[bytes, bool]]) -> None:
    async def write() -> None:
        mixed, plain = await Response().begin(), await Response().begin()
        direct = direct_writer(mixed.writer)
        assert direct is not None
        for piece, directly in pieces:
            await plain.writer.write(piece)
            if directly:
                assert direct(piece)
            else:
                await mixed.writer.write(piece)
        for each in (mixed, plain):
            await each.writer.write_eof(b"end")
        assert mixed.wire.written == plain.wire.written
        assert mixed.writer.output_size == plain.writer.output_size

    asyncio.run(write())


async def test_after_it_aiohttps_own_write_waits_for_the_client() -> None:
    response = await Response().begin()
    direct = direct_writer(response.writer)
    assert direct is not None
    waited: list[bool] = []

    async def drain() -> None:
        waited.append(True)

    response.protocol._drain_helper = drain
    assert direct(b"x" * 70_000)
    response.protocol._paused = True
    assert not direct(b"this one is written, the next one has to wait")
    assert response.wire.written.endswith(b"this one is written, the next one has to wait\r\n")
    await response.writer.write(b"a small one")
    assert waited, "what was written directly counts"


@pytest.mark.parametrize("gone", ["closing", "closed"])
async def test_to_a_client_that_has_gone_nothing_is_written(gone: str) -> None:
    response = await Response().begin()
    direct = direct_writer(response.writer)
    assert direct is not None
    before = response.wire.written
    if gone == "closing":
        response.wire.closing = True
    else:
        response.protocol.transport = None
    assert not direct(b"x")
    assert response.wire.written == before


async def test_what_is_aiohttps_alone_to_write() -> None:
    unchunked = await Response().begin(chunked=False)
    assert direct_writer(unchunked.writer) is None, "HTTP/1.0, or a length that was promised"
    compressed = await Response().begin()
    compressed.writer.enable_compression()
    assert direct_writer(compressed.writer) is None
    ended = await Response().begin()
    await ended.writer.write_eof()
    assert direct_writer(ended.writer) is None
    unwritten = Response()
    unwritten.writer.enable_chunking()
    await unwritten.writer.write_headers("HTTP/1.1 200 OK", CIMultiDict())
    assert direct_writer(unwritten.writer) is None, "its head goes with the first piece"


async def test_somebodys_own_writer_is_left_alone() -> None:
    class Traced(StreamWriter):
        pass

    response = Response()
    response.writer = Traced(response.protocol, None)  # type: ignore[arg-type]
    assert direct_writer((await response.begin()).writer) is None
