"""The client of streams says how each of them ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.harness.streams import CUT, DONE, ERROR_EVENT, GIVEN_UP, Streams
from tests.harness.waiting import eventually

PART = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
FAILED = b'data: {"error": {"message": "it went away"}}\n\n'
END = b"data: [DONE]\n\n"


@contextmanager
def server(*writes: bytes, status: int = 200, breaks: bool = False, waits: bool = False) -> Iterator[str]:
    """Answers every request with these writes; `breaks`: and then closes the connection; `waits`: and never ends."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for data in writes:
            await response.write(data)
        if waits:
            await asyncio.Event().wait()
        if breaks:
            assert request.transport is not None
            request.transport.abort()
        return response

    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize(
    ("writes", "ending", "how", "events"),
    [
        ([PART, PART, END], {}, DONE, 2),
        ([PART + PART, PART + END], {}, DONE, 3),
        ([PART, FAILED], {}, ERROR_EVENT, 1),
        ([PART, FAILED, END], {}, CUT, 1),
        ([PART, PART], {}, CUT, 2),
        ([], {}, CUT, 0),
        ([PART], {"breaks": True}, CUT, 1),
        ([b"no room"], {"status": 503}, "status 503", 0),
    ],
)
def test_streams_that_the_server_ends(writes: list[bytes], ending: dict[str, Any], how: str, events: int) -> None:
    with server(*writes, **ending) as url, Streams(url, "m", count=3, tokens=2) as streams:
        pass
    assert [each.how for each in streams.ended] == [how] * 3
    assert bool(streams.not_well()) == (how != DONE)
    if not ending:
        assert [each.events for each in streams.ended] == [events] * 3
    if "status" in ending:
        assert {each.detail for each in streams.ended} == {"no room"}


def test_a_client_that_leaves() -> None:
    with server(PART, waits=True) as url, Streams(url, "m", count=4, tokens=2) as streams:
        eventually(lambda: streams.begun == 4, "all have begun", 10)
        assert not streams.ended
        streams.give_up()
    assert [each.how for each in streams.ended] == [GIVEN_UP] * 4


def test_one_after_the_other_until_the_block_ends() -> None:
    with server(PART, END) as url, Streams(url, "m", count=2, tokens=2, again=True) as streams:
        eventually(lambda: len(streams.ended) > 10, "they go on", 10)
    assert {each.how for each in streams.ended} == {DONE}
