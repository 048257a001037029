"""Server-sent events behind the edge, read as bytes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from pierhead import BadRequest, sse, sse_event
from pierhead.http.events import MAX_WRITE, error_event

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, errors, pass_deadlines, until

Make = Callable[[], AsyncIterator[Any]]


class Stage:
    """A replica that answers with the events of one source, and what it wrote to its connection."""

    def __init__(self, source: Make, **options: Any) -> None:
        self.source = source
        self.options = options
        self.writes: list[bytes] = []
        self.most_buffered = 0
        """Bytes that the client had not taken."""
        self.requests: list[web.Request] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        transport = request.transport
        assert transport is not None
        write = transport.write

        def spy(data: Any) -> None:
            self.writes.append(bytes(data))
            write(data)
            self.most_buffered = max(self.most_buffered, transport.get_write_buffer_size())

        transport.write = spy  # type: ignore[method-assign]
        return await sse(request, self.source(), **self.options)

    async def open(self, cluster: Cluster, head: str = "", **settings: Any) -> Connection:
        app = web.Application()
        app.router.add_get("/stream", self.handle)
        self.server = await cluster.start(app, service="echo", **settings)
        connection = Connection(*await asyncio.open_connection("127.0.0.1", self.server.http_port))
        CONNECTIONS.append(connection)
        connection.writer.write(f"GET /stream HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
        async with asyncio.timeout(PATIENCE_S):
            connection.top = (await connection.reader.readuntil(b"\r\n\r\n")).decode()
        return connection


class Connection:
    """Reads a chunked response."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.top = ""

    async def chunk(self) -> bytes:
        """The next chunk: what was written at once. Empty at the end."""
        async with asyncio.timeout(PATIENCE_S):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def chunks(self) -> list[bytes]:
        found = []
        while chunk := await self.chunk():
            found.append(chunk)
        return found

    def leave(self) -> None:
        self.writer.transport.abort()


CONNECTIONS: list[Connection] = []


@pytest.fixture
async def cluster(cluster: Cluster) -> AsyncIterator[Cluster]:
    """Ends the connections of `Stage.open`, too."""
    yield cluster
    for connection in CONNECTIONS:
        connection.leave()
    CONNECTIONS.clear()


def data(*texts: str) -> bytes:
    return b"".join(f"data: {text}\n\n".encode() for text in texts)


async def turn(*turns: list[str], between: Callable[[], Awaitable[Any]] = lambda: asyncio.sleep(0.01)) -> Any:
    """A source: what is listed together comes without waiting."""
    for number, texts in enumerate(turns):
        if number:
            await between()
        for text in texts:
            yield text


async def test_what_is_there_in_one_turn_is_one_write(cluster: Cluster) -> None:
    stage = Stage(lambda: turn(["a", "b", "c"], ["d"], ["e", "f"]), end=data("[DONE]"))
    connection = await stage.open(cluster)
    assert "HTTP/1.1 200" in connection.top
    assert "Content-Type: text/event-stream" in connection.top
    assert "x-request-id: " in connection.top
    assert await connection.chunks() == [data("a", "b", "c"), data("d"), data("e", "f", "[DONE]")]
    assert len(stage.writes) == 3, "the head goes with the first events, the end of the response with the last"


class Told:
    """A source as the calls of a handle are: it tells what has arrived, and may be cancelled."""

    def __init__(self, *turns: list[str], stays: bool = False) -> None:
        self.turns = list(turns)
        self.inbox: list[str] = []
        self.stays = stays
        self.cancelled = 0

    def __aiter__(self) -> Told:
        return self

    async def __anext__(self) -> str:
        if not self.inbox:
            await asyncio.sleep(0.01)
            if not self.turns:
                if self.stays:
                    await asyncio.Event().wait()
                raise StopAsyncIteration
            self.inbox = self.turns.pop(0)
        return self.inbox.pop(0)

    def read_ready(self) -> list[str]:
        ready, self.inbox = self.inbox, []
        return ready

    def cancel(self) -> bool:
        self.cancelled += 1
        return True


class HandsOver(Told):
    """One that hands over what comes, as calls over a lane do."""

    def __init__(self, *turns: list[str]) -> None:
        super().__init__(*turns)
        self.sink: Callable[[list[str]], bool] | None = None

    def deliver(self, sink: Callable[[list[str]], bool]) -> None:
        self.sink = sink

    async def __anext__(self) -> str:
        while self.sink is not None and self.turns:
            await asyncio.sleep(0.01)
            if not self.sink(self.turns.pop(0)):
                self.sink = None
        return await super().__anext__()


@pytest.mark.parametrize("kind", [Told, HandsOver])
async def test_what_a_source_says_is_there_is_written_at_once(cluster: Cluster, kind: type[Told]) -> None:
    stage = Stage(lambda: kind(["a", "b"], ["c", "d"], ["e"]), end=data("[DONE]"))
    connection = await stage.open(cluster)
    assert await connection.chunks() == [data("a", "b"), data("c", "d"), data("e"), data("[DONE]")]
    assert len(stage.writes) == 4


async def test_a_slow_client_is_waited_for_and_gets_everything_in_order(cluster: Cluster) -> None:
    # A small one behind each large one: the large ones are more than the client takes, and the small ones have to wait.
    texts = [f"{number} " + "x" * (100_000 * (1 - number % 2)) for number in range(400)]
    source = HandsOver(*[[text] for text in texts])
    stage = Stage(lambda: source, end=data("[DONE]"))
    connection = await stage.open(cluster)
    await until(lambda: bool(stage.requests[0].protocol._drain_waiter), "the stream waits for its client")
    assert len(source.turns) > 100
    assert b"".join(await connection.chunks()) == data(*texts, "[DONE]")
    assert stage.most_buffered < 300_000


async def test_what_comes_before_an_event_that_fails_goes_out(cluster: Cluster) -> None:
    def encode(text: str) -> bytes:
        if text == "bad":
            raise BadRequest("it cannot be told")
        return data(text)

    class Failing(HandsOver):
        async def __anext__(self) -> str:
            try:
                return await super().__anext__()
            except BadRequest:  # of the sink: as with calls, the reader gets it
                self.turns.clear()
                raise

    stage = Stage(lambda: Failing(["a"], ["b", "c", "bad", "d"]), encode=encode)
    connection = await stage.open(cluster)
    sent = b"".join(await connection.chunks())
    assert sent.startswith(data("a", "b", "c") + b"event: error")


async def test_a_source_that_never_waits_is_written_piece_by_piece_and_others_have_their_turn(cluster: Cluster) -> None:
    turns = 0

    async def flood() -> AsyncIterator[str]:
        for _ in range(100):
            yield "x" * (MAX_WRITE // 10)

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(others())
    connection = await Stage(flood).open(cluster)
    chunks = await connection.chunks()
    task.cancel()
    assert len(chunks) == 10
    assert max(map(len, chunks)) < 2 * MAX_WRITE
    assert turns >= len(chunks)


async def test_no_more_is_read_from_the_source_than_the_client_takes(cluster: Cluster) -> None:
    given_out = 0

    async def endless() -> AsyncIterator[str]:
        nonlocal given_out
        while True:
            given_out += 1
            yield "x" * 10_000

    stage = Stage(endless)
    connection = await stage.open(cluster)

    def full() -> bool:
        protocol = stage.requests[0].protocol
        return protocol.writing_paused

    await until(full, "nobody reads, so the connection is full")
    before = given_out
    for _ in range(100):
        await asyncio.sleep(0)
    assert given_out == before
    connection.leave()
    await until(lambda: stage.server.readiness().ongoing == 0, "the client has left")


async def test_a_failure_before_the_first_event_has_its_own_status(cluster: Cluster) -> None:
    async def source() -> AsyncIterator[str]:
        await asyncio.sleep(0)
        if stage.requests:
            raise BadRequest("message: too dull")
        yield ""

    stage = Stage(source)
    connection = await stage.open(cluster)
    assert "HTTP/1.1 400" in connection.top
    assert stage.server.metrics.requests.values == {("GET /stream", "400"): 1}


@pytest.mark.parametrize("turns", [0, 1])
async def test_a_failure_in_the_middle_ends_the_stream_with_an_event(cluster: Cluster, turns: int) -> None:
    async def source() -> AsyncIterator[str]:
        yield "a"
        for _ in range(turns):
            await asyncio.sleep(0)
        raise ValueError("boom")

    stage = Stage(source, end=data("[DONE]"))
    connection = await stage.open(cluster, head="x-request-id: mine\r\n")
    assert "HTTP/1.1 200" in connection.top
    events = b"".join(await connection.chunks())
    assert events.startswith(data("a") + b"event: error\ndata: ")
    error = json.loads(events.removeprefix(data("a") + b"event: error\ndata: "))["error"]
    assert (error["code"], error["request_id"]) == ("internal", "mine")
    assert error["message"].startswith("internal error [error id ")
    assert stage.server.metrics.requests.values == {("GET /stream", "500"): 1}, "counted as what it was"


async def test_a_deadline_in_the_middle_ends_the_stream_with_an_event(cluster: Cluster) -> None:
    closed = asyncio.Event()

    async def source() -> AsyncIterator[str]:
        try:
            yield "a"
            await asyncio.Event().wait()
        finally:
            closed.set()

    stage = Stage(source)
    connection = await stage.open(cluster, request_timeout_s=50.0)
    assert await connection.chunk() == data("a")
    pass_deadlines(100.0)
    (end,) = await connection.chunks()
    assert b'"code": "deadline_exceeded", "message": "GET /stream was not done within 50 s"' in end
    assert closed.is_set()
    assert stage.server.metrics.requests.values == {("GET /stream", "504"): 1}


class Fills(HandsOver):
    """Hands over more than a client takes, and then waits."""

    async def __anext__(self) -> str:
        if self.sink is None:
            return "a"
        while self.sink(["x" * 100_000]):
            pass
        await asyncio.Event().wait()
        raise StopAsyncIteration


async def test_an_endless_stream_has_no_deadline_and_ends_when_the_replica_drains(cluster: Cluster) -> None:
    async def source() -> AsyncIterator[str]:
        yield "one"
        await asyncio.Event().wait()

    stage = Stage(source, endless=True)
    connection = await stage.open(cluster, drain_timeout_s=PATIENCE_S)
    assert await connection.chunk() == b"data: one\n\n"
    pass_deadlines(1000.0)
    assert (stage.server.readiness().ongoing, stage.server.readiness().lasting) == (1, 1)
    stage.server.stop()
    last = b"".join(await connection.chunks())
    assert last.startswith(b"event: error\n"), last
    assert b'"code": "draining"' in last
    await cluster.ended(stage.server)
    assert stage.server.readiness().lasting == 0


async def test_a_client_that_reads_nothing_is_cut_off(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pierhead.http.events.LAST_EVENT_S", 0.1, raising=False)
    stage = Stage(Fills)
    await stage.open(cluster, request_timeout_s=0.3)
    await until(lambda: bool(stage.server.metrics.requests.values), "the request has ended")
    assert stage.server.metrics.requests.values == {("GET /stream", "504"): 1}


async def test_the_handler_chooses_the_event_of_a_failure(cluster: Cluster) -> None:
    async def source() -> AsyncIterator[str]:
        yield "a"
        raise BadRequest("no more")

    def plainly(error: Exception, request_id: str) -> bytes:
        return data(f"{error} {request_id}")

    connection = await Stage(source, on_error=plainly).open(cluster, head="x-request-id: mine\r\n")
    assert await connection.chunks() == [data("a", "no more mine")]


class Generated(Told):
    """One that is a generator: what ends it is that it is closed."""

    async def __aiter__(self) -> AsyncIterator[str]:  # type: ignore[override]
        try:
            yield "a"
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1


@pytest.mark.parametrize("kind", [Told, Generated])
async def test_a_client_that_leaves_ends_the_source(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, kind: type[Told]
) -> None:
    source = kind(["a"], stays=True)
    stage = Stage(lambda: source if kind is Told else aiter(source))
    connection = await stage.open(cluster)
    assert await connection.chunk() == data("a")
    assert not source.cancelled
    connection.leave()
    await until(lambda: source.cancelled == 1, "the source has ended")
    await until(lambda: stage.server.readiness().ongoing == 0, "the count is back")
    assert stage.server.metrics.requests.values == {("GET /stream", "499"): 1}
    assert not errors(caplog, logging.WARNING)


class TestEvent:
    def test_half_a_character_comes_as_its_escape(self) -> None:
        """As tokens of a model may, and texts that clients send as JSON."""
        (line,) = sse_event({"text": "a\ud83d"}).decode().splitlines()[:1]
        assert json.loads(line.removeprefix("data: ")) == {"text": "a\ud83d"}
        assert sse_event("a\ud83d") == data("a\\ud83d")
        told = error_event(BadRequest("no such file: \udcff"), "id").decode().splitlines()[1].removeprefix("data: ")
        assert json.loads(told)["error"]["message"] == "no such file: \udcff"

    def test_text_and_json(self) -> None:
        assert sse_event("hi") == b"data: hi\n\n"
        assert sse_event({"a": "grüezi"}) == 'data: {"a": "grüezi"}\n\n'.encode()
        assert sse_event("hi", name="token", event_id="7") == b"event: token\nid: 7\ndata: hi\n\n"

    @pytest.mark.parametrize("wrong", ["a\nb", "a\rb", "\0"])
    def test_a_name_is_one_line(self, wrong: str) -> None:
        with pytest.raises(ValueError, match="expected one line"):
            sse_event("hi", name=wrong)
        with pytest.raises(ValueError, match="expected one line"):
            sse_event("hi", event_id=wrong)

    @given(st.text(alphabet=st.characters(codec="utf-8")))
    def test_any_text_comes_out_as_it_went_in_but_for_its_line_ends(self, text: str) -> None:
        """As the HTML standard's event stream interpretation reads it."""
        event = sse_event(text).decode()
        assert event.endswith("\n\n")
        fields = [line.removeprefix("data: ") for line in event[:-2].split("\n")]
        assert all(line.startswith("data: ") for line in event[:-2].split("\n"))
        assert "\n".join(fields) == text.replace("\r\n", "\n").replace("\r", "\n")
