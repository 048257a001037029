"""HTTP load from within the test's own loop: what was answered how, and when.

`arrivals` is open loop: requests come at a rate, whatever the server does, and latencies count from the moment each was
due. `users` is closed loop: each sends its next request when the last answer is complete.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

TICK_S = 0.001
MAX_CONNECTIONS = 1000
ANSWERS_S = 60.0
"""How long after the last request the last answer may come: against what never answers."""


@dataclass
class Seen:
    """What a load saw. Latencies are seconds, in the order of the answers."""

    seconds: float = 0.0
    good: list[float] = field(default_factory=list)
    others_ended: list[int] = field(default_factory=list)
    """For each good answer: how many others the workers ended while it was waited for, as the ingress counts them."""
    refused: list[float] = field(default_factory=list)
    """503 or 429, with Retry-After."""
    refused_with: collections.Counter[int] = field(default_factory=collections.Counter)
    other: collections.Counter[str] = field(default_factory=collections.Counter)
    """Anything else, and how often."""
    unsent: int = 0
    """Arrivals that found MAX_CONNECTIONS requests in flight."""
    late_s: float = 0.0
    """The latest that a request was sent after it was due: this generator's own slowness."""

    def rate(self) -> float:
        """Good answers a second."""
        return len(self.good) / self.seconds

    def quantile(self, share: float) -> float:
        """Of the good answers' latencies, in seconds."""
        return sorted(self.good)[int(share * (len(self.good) - 1))]

    def answered_meanwhile(self, share: float) -> int:
        """The quantile of how many others were answered while one waited, from when the ingress knew of it. Unlike a
        latency, it does not depend on how fast the machine is."""
        return sorted(self.others_ended)[int(share * (len(self.others_ended) - 1))]

    def __str__(self) -> str:
        if not self.good:
            return f"nothing good in {self.seconds:.1f} s; {len(self.refused)} refused; other: {dict(self.other)}"
        refused = sorted(self.refused) or [0.0]
        return (
            f"{len(self.good)} good in {self.seconds:.1f} s ({self.rate():.0f}/s), "
            f"p50 {self.quantile(0.5) * 1e3:.1f} ms, p99 {self.quantile(0.99) * 1e3:.1f} ms, "
            f"max {max(self.good) * 1e3:.1f} ms; {len(self.refused)} refused "
            f"(p50 {refused[len(refused) // 2] * 1e3:.1f} ms, max {refused[-1] * 1e3:.1f} ms); "
            f"other: {dict(self.other) or 'none'}; {self.unsent} not sent; sent {self.late_s * 1e3:.0f} ms late at most"
        )


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, seen: Seen, idle: Callable[[_Connection], None], lost: Callable[[_Connection], None]) -> None:
        self._seen = seen
        self._idle = idle
        self._lost = lost
        self._transport: Any = None
        self._due: float | None = None
        self._received = b""

    def send(self, request: bytes, due: float) -> None:
        self._due = due
        self._received = b""
        self._transport.write(request)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._idle(self)

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data
        head, separator, body = received.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.lower()
        at = lines.find(b"content-length: ") + 16
        length = int(lines[at:].partition(b"\r\n")[0])
        if len(body) < length:
            return
        due, self._due = self._due, None
        assert due is not None, f"an answer to nothing: {received!r}"
        self._note(due, int(head[9:12]), lines, body)
        self._idle(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self._due is not None:
            self._seen.other[f"connection lost: {error}"] += 1
        self._lost(self)

    def close(self) -> None:
        if self._due is not None:
            self._due = None
            self._seen.other["no answer"] += 1
        self._transport.close()

    def _note(self, due: float, status: int, head: bytes, body: bytes) -> None:
        now = time.monotonic()
        seen = self._seen
        if status == 200:
            seen.others_ended.append(int(head.partition(b"x-others-ended: ")[2].partition(b"\r\n")[0]))
            seen.good.append(now - due)
        elif status in (503, 429) and b"\r\nretry-after: " in head:
            seen.refused.append(now - due)
            seen.refused_with[status] += 1
        else:
            seen.other[f"{status} {body.decode()[:200]}"] += 1


class _Load:
    """Connections to one address."""

    def __init__(self, address: str, path: str, seen: Seen) -> None:
        self._host, _, port = address.partition(":")
        self._port = int(port)
        self.request = f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode()
        self.seen = seen
        self.connections: set[_Connection] = set()
        self._opening: set[asyncio.Task[Any]] = set()

    def idle(self, connection: _Connection) -> None:
        raise NotImplementedError

    def open(self) -> None:
        connection = _Connection(self.seen, self.idle, self.connections.discard)
        self.connections.add(connection)
        loop = asyncio.get_running_loop()
        task = loop.create_task(loop.create_connection(lambda: connection, self._host, self._port))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def close(self) -> None:
        if self._opening:
            await asyncio.wait(self._opening)
        for connection in list(self.connections):
            connection.close()


class _Arrivals(_Load):
    """Each request on a connection that is free; none is held back."""

    def __init__(self, address: str, path: str, seen: Seen) -> None:
        super().__init__(address, path, seen)
        self._free: list[_Connection] = []
        self._waiting: collections.deque[float] = collections.deque()

    def arrive(self, due: float) -> None:
        if self._free:
            self._free.pop().send(self.request, due)
        elif len(self.connections) < MAX_CONNECTIONS:
            self._waiting.append(due)
            self.open()
        else:
            self.seen.unsent += 1

    def idle(self, connection: _Connection) -> None:
        if self._waiting:
            connection.send(self.request, self._waiting.popleft())
        else:
            self._free.append(connection)

    @property
    def is_drained(self) -> bool:
        return not self._waiting and len(self._free) == len(self.connections)


class _User(_Load):
    stopped = False
    resting = False

    def idle(self, connection: _Connection) -> None:
        if self.stopped:
            self.resting = True
        else:
            # Not at once: answers that come back quicker than the loop turns would keep it to themselves.
            asyncio.get_running_loop().call_soon(connection.send, self.request, time.monotonic())


async def arrivals(addresses: Sequence[str], path: str, rate: float, seconds: float) -> Seen:
    """`rate` requests a second, to the addresses in turn."""
    seen = Seen(seconds=seconds)
    loads = [_Arrivals(address, path, seen) for address in addresses]
    start = time.monotonic()
    try:
        for place in range(int(rate * seconds)):
            due = start + place / rate
            while (now := time.monotonic()) < due:  # noqa: ASYNC110 - of time there is no event
                await asyncio.sleep(TICK_S)
            seen.late_s = max(seen.late_s, now - due)
            loads[place % len(loads)].arrive(due)
        await _until(lambda: all(load.is_drained for load in loads))
    finally:
        for load in loads:
            await load.close()
    return seen


async def users(addresses: Sequence[str], path: str, count: int, seconds: float) -> Seen:
    """`count` users, spread over the addresses."""
    seen = Seen(seconds=seconds)
    loads = [_User(addresses[place % len(addresses)], path, seen) for place in range(count)]
    try:
        for load in loads:
            load.open()
        await asyncio.sleep(seconds)
        for load in loads:
            load.stopped = True
        await _until(lambda: all(load.resting for load in loads))
    finally:
        for load in loads:
            await load.close()
    return seen


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ANSWERS_S
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 - several conditions, none an event
        await asyncio.sleep(0.005)
