"""An HTTP/1.1 load generator in one process: `python -m tests.bench.load.generator URL --rate 400 --seconds 8`.

Open loop (`--rate`): arrival k is due at start + k / rate whatever the server does, and its latency counts from the
moment it was due. A server that stalls is charged for all arrivals during the stall, which closed loops leave out
("coordinated omission": Gil Tene, How NOT to Measure Latency). The clock is the kernel's periodic timer (timerfd), as
event loops' own timers are only good to a millisecond. A free connection takes the request, else a new one, up to
`--max-connections`; after that arrivals wait, which counts. `lag_p99_ms` tells the generator's own lateness.

Closed loop (`--connections`): each connection sends its next request when the last answer is complete; latency counts
from the sending. Used for what wrk does not tell: when the first byte of a body came.

"{user_id}" in the URL runs through 1 to 1000. The first `--warm-seconds` are not recorded. The result is one line of
JSON; histograms are HdrHistograms (microseconds, 3 digits) in their own portable encoding.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import ctypes
import gc
import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httptools
import uvloop
from hdrh.histogram import HdrHistogram

USERS: Final = 1000
USER_STEP: Final = 387
"""Without a common divisor with USERS: each id comes once in that many requests, neighbours far apart."""
DRAIN_S: Final = 15.0
"""What has not been answered this long after the last arrival counts as an error, with the time it waited so far."""
_CLOCK_MONOTONIC: Final = 1


def new_histogram() -> HdrHistogram:
    """1 microsecond to 10 minutes, 3 significant digits: all histograms of the bench, so that they can be merged."""
    return HdrHistogram(1, 600_000_000, 3)


def requests_for(url: str) -> list[bytes]:
    """The request's bytes; one for each user id, in the order of sending, where the URL holds "{user_id}"."""
    parts = urlsplit(url)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    unwatched = "x-request-disconnect-disabled: ?1\r\n" if os.environ.get("BENCH_WATCH") == "0" else ""
    head = f"GET {{}} HTTP/1.1\r\nHost: {{}}\r\n{unwatched}\r\n"
    if "{user_id}" not in target:
        return [head.format(target, parts.netloc).encode()]
    users = [place * USER_STEP % USERS + 1 for place in range(1, USERS + 1)]
    return [head.format(target.replace("{user_id}", str(user)), parts.netloc).encode() for user in users]


@dataclass
class Record:
    """What a run saw. Times are seconds of time.monotonic()."""

    record_from: float
    latency: HdrHistogram = field(default_factory=new_histogram)
    first_byte: HdrHistogram = field(default_factory=new_histogram)
    lag: HdrHistogram = field(default_factory=new_histogram)
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    requests: int = 0
    """Recorded ones; `answered` counts those of the warm-up too."""
    answered: int = 0
    body_bytes: int = 0
    last: float = 0.0

    def answer(self, due: float, first: float, now: float, status: int, body_bytes: int) -> None:
        """One complete answer."""
        self.answered += 1
        if due < self.record_from:
            return
        self.requests += 1
        self.last = now
        self.body_bytes += body_bytes
        self.latency.record_value(_micro(now - due))
        self.first_byte.record_value(_micro(first - due))
        if status != 200:
            self.errors[f"status {status}"] += 1

    def failure(self, due: float, now: float, why: str) -> None:
        """A request without an answer: an error, and the time it took to know belongs to the latencies."""
        if due < self.record_from:
            return
        self.requests += 1
        self.errors[why] += 1
        self.latency.record_value(_micro(now - due))


def _micro(seconds: float) -> int:
    return max(1, round(seconds * 1e6))


class Connection(asyncio.Protocol):
    """One connection, one request at a time. `idle` is called whenever it could take the next."""

    def __init__(self, record: Record, idle: Callable[[Connection], None], lost: Callable[[Connection], None]) -> None:
        self._record, self._idle, self._lost = record, idle, lost
        self._transport: Any = None
        self._due: float | None = None
        self._first = 0.0
        self._bytes = 0
        self._parser: Any = None

    def send(self, request: bytes, due: float) -> None:
        """Send a request that was due at `due`."""
        self._due, self._first, self._bytes = due, 0.0, 0
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    def close(self, why: str) -> None:
        """Close; a request without an answer is recorded as a failure."""
        due, self._due = self._due, None
        if due is not None:
            self._record.failure(due, time.monotonic(), why)
        self._transport.close()

    # -------------------------------------------------------------------------------------------------- the transport

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._idle(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close(f"not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.close("connection lost")
        self._lost(self)

    # ----------------------------------------------------------------------------------------------------- the parser

    def on_body(self, body: bytes) -> None:
        if not self._bytes:
            self._first = time.monotonic()
        self._bytes += len(body)

    def on_message_complete(self) -> None:
        due, self._due = self._due, None
        if due is None:
            return
        now = time.monotonic()
        self._record.answer(due, self._first or now, now, self._parser.get_status_code(), self._bytes)
        if self._parser.should_keep_alive():
            # Not from within the parser: it is still reading.
            asyncio.get_running_loop().call_soon(self._idle, self)
        else:
            self._transport.close()


class Load:
    """What open and closed loops share: requests in their order, connections, the end."""

    connection: type[Connection] = Connection

    def __init__(self, url: str, record: Record) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._requests = requests_for(url)
        self._place = 0
        self.record = record
        self.connections: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()

    def next_request(self) -> bytes:
        self._place = (self._place + 1) % len(self._requests)
        return self._requests[self._place]

    def idle(self, connection: Connection) -> None:
        raise NotImplementedError

    def lost(self, connection: Connection) -> None:
        self.connections.discard(connection)

    def open_connection(self) -> None:
        """Begin to open one more; it reports itself idle."""
        connection = self.connection(self.record, self.idle, self.lost)
        self.connections.add(connection)
        task = asyncio.get_running_loop().create_task(self._connect(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, connection: Connection) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: connection, self._host, self._port)
        except OSError as error:
            self.record.errors[f"connect: {error.strerror or error}"] += 1
            self.connections.discard(connection)

    async def close(self, why: str) -> None:
        """Close every connection; what is unanswered is recorded as failed because of `why`."""
        if self._opening:
            await asyncio.wait(self._opening, timeout=5)
        for connection in list(self.connections):
            connection.close(why)


class OpenLoop(Load):
    """Sends each request when it is due, on whatever connection is free."""

    def __init__(self, url: str, record: Record, max_connections: int) -> None:
        super().__init__(url, record)
        self._max_connections = max_connections
        self._free: list[Connection] = []
        self._waiting: collections.deque[float] = collections.deque()

    def arrive(self, due: float, now: float) -> None:
        """A request that was due at `due` is to be sent now."""
        if self._free:
            self.record.lag.record_value(_micro(now - due))
            self._free.pop().send(self.next_request(), due)
            return
        self._waiting.append(due)
        if len(self.connections) < self._max_connections:
            self.open_connection()

    def idle(self, connection: Connection) -> None:
        if self._waiting:
            connection.send(self.next_request(), self._waiting.popleft())
        else:
            self._free.append(connection)

    def lost(self, connection: Connection) -> None:
        super().lost(connection)
        if connection in self._free:
            self._free.remove(connection)
        if self._waiting and len(self.connections) < self._max_connections:
            self.open_connection()

    @property
    def unsent(self) -> collections.deque[float]:
        """When the requests were due that no connection has taken."""
        return self._waiting

    @property
    def is_drained(self) -> bool:
        """Nothing is in flight and nothing waits, or nobody is there to send to."""
        return not self.connections or (not self._waiting and len(self._free) == len(self.connections))


class ClosedLoop(Load):
    """Keeps each connection busy until it is stopped."""

    def __init__(self, url: str, record: Record) -> None:
        super().__init__(url, record)
        self.stopped = False
        self._resting = 0

    def idle(self, connection: Connection) -> None:
        if self.stopped:
            self._resting += 1
        else:
            connection.send(self.next_request(), time.monotonic())

    def lost(self, connection: Connection) -> None:
        super().lost(connection)
        if not self.stopped:
            self.open_connection()

    @property
    def is_drained(self) -> bool:
        return self._resting >= len(self.connections)


class Ticks:
    """The kernel's periodic timer: says how many arrivals have become due."""

    def __init__(self, start: float, interval: float) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.file = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        when = struct.pack("4l", *_timespec(interval), *_timespec(start))
        absolute = 1
        if self.file < 0 or libc.timerfd_settime(self.file, absolute, when, None):
            raise OSError(ctypes.get_errno(), "timerfd")

    def due(self) -> int:
        """Arrivals that became due since the last call."""
        try:
            return int.from_bytes(os.read(self.file, 8), "little")
        except BlockingIOError:
            return 0

    def close(self) -> None:
        os.close(self.file)


def _timespec(seconds: float) -> tuple[int, int]:
    return int(seconds), round(seconds % 1 * 1e9)


async def open_loop(url: str, rate: float, seconds: float, warm_seconds: float, max_connections: int) -> Record:
    """`rate` arrivals a second for `warm_seconds` + `seconds`."""
    loop = asyncio.get_running_loop()
    start = time.monotonic() + 0.1
    # The interval that the kernel keeps is whole nanoseconds.
    interval = round(1e9 / rate) / 1e9
    arrivals = _due_times(start, interval, round((warm_seconds + seconds) * rate))
    load = OpenLoop(url, Record(record_from=start + warm_seconds), max_connections)
    ticks, all_sent = Ticks(start, interval), asyncio.Event()

    def on_tick() -> None:
        now = time.monotonic()
        for _ in range(ticks.due()):
            due = next(arrivals, None)
            if due is None:
                loop.remove_reader(ticks.file)
                all_sent.set()
                return
            load.arrive(due, now)

    loop.add_reader(ticks.file, on_tick)
    try:
        await asyncio.wait_for(all_sent.wait(), warm_seconds + seconds + DRAIN_S)
        await _until(lambda: load.is_drained, DRAIN_S)
    finally:
        loop.remove_reader(ticks.file)
        ticks.close()
        for due in load.unsent:
            load.record.failure(due, time.monotonic(), "not sent")
        await load.close("no answer")
    return load.record


def _due_times(start: float, interval: float, count: int) -> Iterator[float]:
    return (start + place * interval for place in range(count))


async def closed_loop(url: str, connections: int, seconds: float, warm_seconds: float) -> Record:
    """`connections` requests in flight at all times."""
    load = ClosedLoop(url, Record(record_from=time.monotonic() + warm_seconds))
    for _ in range(connections):
        load.open_connection()
    try:
        await asyncio.sleep(warm_seconds + seconds)
        load.stopped = True
        await _until(lambda: load.is_drained, DRAIN_S)
    finally:
        load.stopped = True
        await load.close("no answer")
    return load.record


async def _until(condition: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 - nothing is measured any more
        await asyncio.sleep(0.005)


def summary(record: Record, seconds: float) -> dict[str, Any]:
    """The result as JSON types; times in milliseconds but for the encoded histograms."""
    span = max(seconds, record.last - record.record_from)
    return {
        "requests": record.requests,
        "answered_with_warm_up": record.answered,
        "seconds": span,
        "bytes": record.body_bytes,
        "errors": dict(record.errors),
        "latency": record.latency.encode().decode(),
        "first_byte": record.first_byte.encode().decode(),
        "lag_p99_ms": record.lag.get_value_at_percentile(99) / 1e3,
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--rate", type=float, help="arrivals a second")
    how.add_argument("--connections", type=int, help="requests in flight")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warm-seconds", type=float, default=1.0)
    parser.add_argument("--max-connections", type=int, default=1024)
    a = parser.parse_args()
    gc.disable()  # a run is short, and a collection would be charged to the server
    if a.rate is not None:
        run = open_loop(a.url, a.rate, a.seconds, a.warm_seconds, a.max_connections)
    else:
        run = closed_loop(a.url, a.connections, a.seconds, a.warm_seconds)
    print(json.dumps(summary(uvloop.run(run), a.seconds)))


if __name__ == "__main__":
    main()
