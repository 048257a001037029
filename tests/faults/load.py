"""HTTP load from within the test's own loop: what was answered how, and when.

`arrivals` is open loop: requests come at a rate, whatever the server does, and latencies count from the moment each was
due. `users` is closed loop: each sends its next request when the last answer is complete.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.bench.load.generator import ClosedLoop, Connection, OpenLoop, Record
from tests.harness.waiting import until

TICK_S = 0.001
MAX_CONNECTIONS = 1000
ANSWERS_S = 60.0
"""How long after the last request the last answer may come: against what never answers."""


@dataclass
class Seen(Record):
    """What a load saw. Latencies are seconds, in the order of the answers."""

    record_from: float = 0.0
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
    """Arrivals for which no connection became free."""
    late_s: float = 0.0
    """The latest that a request was sent after it was due: this generator's own slowness."""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    """Of the answer that is noted next."""

    def __post_init__(self) -> None:
        self.errors = self.other  # of connections that could not be opened

    def answer(self, due: float, first: float, now: float, status: int, body_bytes: int) -> None:
        """See Record."""
        if status == 200:
            self.others_ended.append(int(self.headers[b"x-others-ended"]))
            self.good.append(now - due)
        elif status in (503, 429) and b"retry-after" in self.headers:
            self.refused.append(now - due)
            self.refused_with[status] += 1
        else:
            self.other[f"{status} {self.body.decode()[:200]}"] += 1

    def failure(self, due: float, now: float, why: str) -> None:
        """See Record."""
        self.other[why] += 1

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


class _Connection(Connection):
    """Tells the headers and the body of each answer, too."""

    _record: Seen
    _headers: dict[bytes, bytes]
    _body: bytes

    def send(self, request: bytes, due: float) -> None:
        self._headers, self._body = {}, b""
        super().send(request, due)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._body += body

    def on_message_complete(self) -> None:
        self._record.headers, self._record.body = self._headers, self._body
        super().on_message_complete()


class _Arrivals(OpenLoop):
    connection = _Connection


class _Users(ClosedLoop):
    connection = _Connection


async def arrivals(addresses: Sequence[str], path: str, rate: float, seconds: float) -> Seen:
    """`rate` requests a second, to the addresses in turn."""
    seen = Seen(seconds=seconds)
    loads = [_Arrivals(f"http://{address}{path}", seen, MAX_CONNECTIONS) for address in addresses]
    start = time.monotonic()
    try:
        for place in range(int(rate * seconds)):
            due = start + place / rate
            while (now := time.monotonic()) < due:  # noqa: ASYNC110 - of time there is no event
                await asyncio.sleep(TICK_S)
            seen.late_s = max(seen.late_s, now - due)
            loads[place % len(loads)].arrive(due, now)
        await until(lambda: all(load.is_drained for load in loads), "all are answered", ANSWERS_S)
    finally:
        seen.unsent = sum(len(load.unsent) for load in loads)
        for load in loads:
            await load.close("no answer")
    return seen


async def users(addresses: Sequence[str], path: str, count: int, seconds: float) -> Seen:
    """`count` users, spread over the addresses."""
    seen = Seen(seconds=seconds)
    loads = [_Users(f"http://{address}{path}", seen) for address in addresses]
    try:
        for place in range(count):
            loads[place % len(loads)].open_connection()
        await asyncio.sleep(seconds)
        for load in loads:
            load.stopped = True
        await until(lambda: all(load.is_drained for load in loads), "all are answered", ANSWERS_S)
    finally:
        for load in loads:
            await load.close("no answer")
    return seen
