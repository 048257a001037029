"""The load generator against a small server whose behaviour each test chooses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from tests.bench.load.generator import USERS, closed_loop, open_loop, requests_for, summary
from tests.bench.load.tools import percentiles_ms

Answer = Callable[[int], Awaitable[bytes]]
"""The number of a request, counted from 0 -> the bytes to send; empty = close the connection without an answer."""


def response(status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\nok".encode()


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """Serve on a free port; the URL."""
    seen = 0
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                number, seen = seen, seen + 1
                said = await answer(number)
                if not said:
                    break
                writer.write(said)
        writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.get_running_loop().create_task(handle(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    # The generator has closed its connections: each handler reads that and ends.
    if handlers:
        await asyncio.wait(handlers)


def slow_once(seconds: float) -> Answer:
    """Only the first answer takes its time."""

    async def answer(number: int) -> bytes:
        await asyncio.sleep(0.0 if number else seconds)
        return response()

    return answer


def test_every_user_is_asked_for_once_in_a_thousand_requests() -> None:
    requests = requests_for("http://127.0.0.1:1/recsys/?user_id={user_id}")
    assert len(set(requests)) == USERS
    assert all(any(b"user_id=%d HTTP" % user in request for request in requests) for user in (1, 1000))


async def test_an_open_loop_sends_as_many_as_are_due() -> None:
    async with serving(slow_once(0.0)) as url:
        record = await open_loop(url, rate=200, seconds=0.5, warm_seconds=0.25, max_connections=8)
    assert (record.requests, record.answered, record.errors) == (100, 150, {})
    assert record.latency.get_total_count() == record.first_byte.get_total_count() == 100
    # Here nothing listens any more.
    record = await open_loop(url, rate=50, seconds=0.1, warm_seconds=0.0, max_connections=4)
    assert record.requests == sum(count for why, count in record.errors.items() if why == "not sent") == 5


async def test_requests_that_fall_due_during_a_stall_count_with_their_wait() -> None:
    async with serving(slow_once(0.3)) as url:
        record = await open_loop(url, rate=100, seconds=0.5, warm_seconds=0.0, max_connections=1)
    # The first waited 300 ms, the second 290, and so on: 25 of them more than 50 ms. A generator that sends only when
    # the last answer is there would see one slow request.
    assert record.requests == 50
    assert record.latency.get_value_at_percentile(51) > 50_000


async def test_arrivals_take_another_connection_when_one_is_busy() -> None:
    last = asyncio.Event()

    async def first_after_the_last(number: int) -> bytes:
        if number == 29:
            last.set()
        if number == 0:
            await last.wait()
        return response()

    async with serving(first_after_the_last) as url:
        record = await open_loop(url, rate=100, seconds=0.3, warm_seconds=0.0, max_connections=64)
    assert (record.requests, record.errors) == (30, {})


async def test_lost_answers_and_other_statuses_are_errors_with_their_wait() -> None:
    async def fails(number: int) -> bytes:
        return b"" if number == 3 else response(status="503 Service Unavailable") if number % 2 else response()

    async with serving(fails) as url:
        record = await open_loop(url, rate=100, seconds=0.2, warm_seconds=0.0, max_connections=4)
    assert record.requests == record.latency.get_total_count() == 20
    assert record.errors == {"connection lost": 1, "status 503": 9}


async def test_a_closed_loop_keeps_its_connections_busy_and_sees_the_first_byte() -> None:
    async def in_two_parts(number: int) -> bytes:
        return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"

    async with serving(in_two_parts) as url:
        record = await closed_loop(url, connections=3, seconds=0.2, warm_seconds=0.0)
    assert record.requests >= 3
    assert not record.errors
    said = summary(record, 0.2)
    assert percentiles_ms(said["first_byte"])["p50"] <= percentiles_ms(said["latency"])["max"]
    assert said["bytes"] == 2 * record.requests
