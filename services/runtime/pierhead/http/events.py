"""Server-sent events: an async iterator as the answer of a handler.

    async def stream(request: web.Request) -> web.StreamResponse:
        return await sse(request, child.Generate(...), encode=lambda token: sse_event(token.text), end=DONE)

The events of one turn of the event loop are written with one call, headers included. No event waits for others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, Callable, Mapping
from typing import Any, Generic, TypeVar

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from pierhead.errors import Draining, PierheadError
from pierhead.http.gate import VISIT
from pierhead.http.known import shortcuts
from pierhead.http.poll import NoItemYet, Polled

T = TypeVar("T")

MAX_WRITE = 64 * 1024
"""Bytes of events that are written at once even if more events are available."""


LAST_EVENT_S = 2.0
"""How long a client may take to read the event that reports a failure; then its connection is closed."""


HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


def sse_event(data: object, *, name: str | None = None, event_id: str | None = None) -> bytes:
    """One event. `data`: text is sent unchanged, anything else as JSON. A lone surrogate, which UTF-8 cannot
    encode, is sent as its escape (\\ud83d), which JSON parses back.

    Raises ValueError for a name or an id of several lines, TypeError for data that JSON cannot hold.
    """
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    if "\n" in text or "\r" in text:
        text = "\ndata: ".join(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    head = ""
    for field, value in (("event", name), ("id", event_id)):
        if value is not None:
            if "\n" in value or "\r" in value or "\0" in value:
                raise ValueError(f"{field} of a server-sent event: expected one line, found {value!r}")
            head += f"{field}: {value}\n"
    return f"{head}data: {text}\n\n".encode(errors="backslashreplace")


def error_event(error: PierheadError, request_id: str) -> bytes:
    """The last event of a stream that failed after its first event: `event: error`, with the body of the error."""
    described = {"code": error.kind, "message": error.message, "request_id": request_id}
    return sse_event({"error": described}, name="error")


async def sse(
    request: web.Request,
    source: AsyncIterable[T],
    encode: Callable[[T], bytes] = sse_event,
    *,
    end: bytes = b"",
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    on_error: Callable[[PierheadError, str], bytes] = error_event,
    endless: bool = False,
    lend: Callable[[int | None], None] | None = None,
) -> web.StreamResponse:
    """Answer with an event for each item of `source`, and `end` after the last one.

    `encode(item)`: the bytes of its event. `on_error(error, request_id)`: the last event of a source that fails in the
    middle. A source that fails before its first item raises here, and the answer has the status of its error. When the
    client leaves, the source is ended, by its `cancel()` if it has one, as calls through a handle do. The source is
    read only as fast as the client reads.

    `endless`: the source never ends. Then the request's time does not end the stream, and a replica that
    drains ends it at once, with the event of the error `draining`: the client asks again and gets another replica.

    `lend(descriptor)`: lends the connection, once the first event was written, to the process that makes the events,
    which writes the next ones itself; None: it cannot be lent. An item with no bytes then tells that events were
    written. Nothing but this answer goes over such a connection. The source has `read_ready`.
    """
    stream = _EventStream(request, source, encode, status, {**HEADERS, **(headers or {})}, lend)
    visit = request.get(VISIT)  # None: not served by a replica

    def leave() -> None:
        if visit is not None:
            visit.fail(Draining("this replica is draining; ask again"))

    try:
        if endless and visit is not None:
            visit.live_on()
            visit.edge.drained.add(leave)
            if visit.edge.admission.draining:  # a drain that has begun would not end this one
                leave()
        await stream.run(end)
    except BaseException as error:
        left = request.transport is None or request.transport.is_closing()
        resource = request.match_info.route.resource
        name = f"{request.method} {resource.canonical if resource is not None else request.path}"
        known = visit.known(error, name) if stream.begun and visit is not None and not left else None
        if visit is None or known is None:
            raise
        visit.outcome = str(known.http_status)
        await stream.fail(on_error(known, visit.request_id))
    finally:
        if visit is not None:
            visit.edge.drained.discard(leave)
        await stream.close()
    return stream.response


class _EventStream(Generic[T]):
    """The events of one response."""

    def __init__(
        self,
        request: web.Request,
        source: AsyncIterable[T],
        encode: Callable[[T], bytes],
        status: int,
        headers: Mapping[str, str],
        lend: Callable[[int | None], None] | None,
    ) -> None:
        known = shortcuts()  # with which the head goes with the first event
        self.response = (known.EventResponse if known else web.StreamResponse)(status=status, headers=headers)
        self._request = request
        self._source = source
        self._iterator = aiter(source)
        self._encode = encode
        self._writer: AbstractStreamWriter | None = None
        self._events: list[bytes] = []
        self._size = 0
        self._lend = lend
        self._lent = False
        if lend is not None:
            self.response.force_close()

    @property
    def begun(self) -> bool:
        """Whether an event was produced."""
        return bool(self._events) or self._writer is not None

    async def run(self, end: bytes) -> None:
        """Write events until the source has no more. Raises what the source raises, and ConnectionError."""
        source = self._source if hasattr(self._source, "read_ready") else self._iterator
        if hasattr(source, "read_ready"):
            await self._run_ready(source)
        else:
            await self._run_polled()
        await self.finish(end)

    async def _run_ready(self, source: Any) -> None:
        """For a source that lists its arrived items (`read_ready`), as calls through a handle do: cheaper than polling.
        They also deliver further items directly while the client keeps up; the others are read from the iterator.
        """
        events, encode, read_ready = self._events, self._encode, source.read_ready
        deliver = getattr(source, "deliver", None)
        direct: Callable[[bytes], bool] | None = None
        known = shortcuts()

        def pass_on(items: list[T]) -> bool:
            assert direct is not None  # noqa: S101
            for item in items:
                events.append(encode(item))  # the events before an item that fails go out before the error
            return direct(self._take())

        async for item in self._iterator:
            events.append(encode(item))
            for more in read_ready():
                events.append(encode(more))
            await self._write()
            if self._lend is not None and not self._lent and self._writer is not None:
                self._lent = True
                self._lend(known.lendable(self._writer) if known else None)
            if deliver is None:
                continue
            if direct is None and self._writer is not None and known:
                direct = known.direct_writer(self._writer)
            if direct is not None:
                deliver(pass_on)

    async def _run_polled(self) -> None:
        events, encode, source = self._events, self._encode, Polled(self._iterator)
        while True:
            try:
                item = source.poll()
                if isinstance(item, NoItemYet):
                    if events:
                        try:
                            await self._write()
                        except BaseException as error:
                            await source.fail(error)
                    item = await source.wait()
            except StopAsyncIteration:
                return
            event = encode(item)
            events.append(event)
            self._size += len(event)
            if self._size > MAX_WRITE:
                await self._write()
                await asyncio.sleep(0)  # a source that always has an item must not block the loop

    async def _write(self) -> None:
        writer = self._writer
        if writer is None:
            writer = await self._begin()
        # Not response.write(), which does the same with one more Python frame per event.
        await writer.write(self._take())

    async def close(self) -> None:
        """End the source: cancel the call behind it, or close the generator. Does nothing after its end."""
        cancel, aclose = getattr(self._source, "cancel", None), getattr(self._iterator, "aclose", None)
        if cancel is not None:
            cancel()
        if aclose is not None:
            await aclose()

    async def finish(self, last: bytes) -> None:
        """Write the remaining events and `last`, and end the response, all at once."""
        if self._writer is None:
            await self._begin()
        self._events.append(last)
        await self.response.write_eof(self._take())

    async def fail(self, last: bytes) -> None:
        """`finish` for a request past its deadline: a client that does not read must not keep it in flight."""
        try:
            async with asyncio.timeout(LAST_EVENT_S):
                await self.finish(last)
        except (TimeoutError, asyncio.CancelledError):
            # CancelledError also without a cancellation: aiohttp waits for the future of the abandoned write.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client did not take the last event of its stream") from None

    async def _begin(self) -> AbstractStreamWriter:
        writer = await self.response.prepare(self._request)
        if writer is None:
            raise ConnectionResetError("the response has ended already")
        self._writer = writer
        return writer

    def _take(self) -> bytes:
        events = self._events
        data = events[0] if len(events) == 1 else b"".join(events)
        events.clear()
        self._size = 0
        if self._lent and not data and (visit := self._request.get(VISIT)) is not None:
            visit.edge.moved += 1
        return data
