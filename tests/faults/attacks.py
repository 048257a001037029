"""What a client may do to harm the others, in a process of its own: `python -m tests.faults.attacks NAME --seconds 10`.

Each attack is bounded in count and time, goes to one address, and ends by itself. It says how far it came: connections
that were open at the end, requests that were sent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import itertools
import json
import resource
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

from tests.harness.http2 import PREFACE, data, head, reset

WRITE_S = 5.0
"""For a write to a peer that does not read."""
AT_ONCE = 200
"""Connections that are being opened at a time."""
FILES = 65_536


@dataclass
class Target:
    """Where HTTP and gRPC answer, and how far an attack has come."""

    host: str
    http: int
    grpc: int
    seconds: float
    opened: int = 0
    sent: int = 0

    @contextlib.asynccontextmanager
    async def connected(self, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """One connection. It counts as opened as long as it is."""
        reader, writer = await asyncio.open_connection(self.host, port)
        self.opened += 1
        try:
            yield reader, writer
        finally:
            self.opened -= 1
            writer.transport.abort()

    async def hold(self, count: int, port: int, *parts: bytes) -> None:
        """That many connections that send these parts, a second apart, and then nothing."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            with contextlib.suppress(OSError):
                await gate.acquire()
                try:
                    connection = await asyncio.wait_for(asyncio.open_connection(self.host, port), WRITE_S)
                finally:
                    gate.release()
                reader, writer = connection
                self.opened += 1
                try:
                    for part in parts:
                        writer.write(part)
                        self.sent += 1
                        await asyncio.wait_for(writer.drain(), WRITE_S)
                        await asyncio.sleep(1)
                    while await reader.read(65_536):  # until it is closed
                        pass
                finally:
                    self.opened -= 1
                    writer.transport.abort()

        await self._together(one for _ in range(count))

    async def flood(self, clients: int, port: int, requests: Iterator[bytes]) -> None:
        """Clients that send one request after the other, and throw the answers away."""

        async def one() -> None:
            while True:
                with contextlib.suppress(OSError):
                    async with self.connected(port) as (reader, writer):
                        dropping = asyncio.ensure_future(_drop(reader))
                        try:
                            while not reader.at_eof():
                                writer.write(next(requests))
                                self.sent += 1
                                await asyncio.wait_for(writer.drain(), WRITE_S)
                                await asyncio.sleep(0)
                        finally:
                            dropping.cancel()
                await asyncio.sleep(0.05)

        await self._together(one for _ in range(clients))

    async def _together(self, each: Iterator[Callable[[], Awaitable[None]]]) -> None:
        """All of them, until the time is over. The end of one is not the end of the attack."""
        tasks = [asyncio.ensure_future(one()) for one in each]
        await asyncio.wait(tasks, timeout=self.seconds)
        open_at_end = self.opened
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.opened = open_at_end


async def _drop(reader: asyncio.StreamReader) -> None:
    while await reader.read(65_536):
        pass


def _post(path: str, *lines: str) -> bytes:
    return "\r\n".join(
        (f"POST {path} HTTP/1.1", "host: edge", "content-type: application/json", *lines, "", "")
    ).encode()


def _body(content: bytes, *lines: str) -> bytes:
    return _post("/v1/chat/completions", f"content-length: {len(content)}", *lines) + content


def _h2(path: str, **fields: str) -> dict[str, str]:
    return {":method": "POST", ":scheme": "http", ":path": path, ":authority": "edge", **fields}


_GRPC = {"te": "trailers", "content-type": "application/grpc"}
CALL = _h2("/pierhead.echo.v1.Echo/Echo", **_GRPC)
UPGRADE = (
    b"GET /echo/socket HTTP/1.1\r\nhost: edge\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
STREAM = json.dumps(
    {"model": "steady", "stream": True, "max_tokens": 1_000_000, "messages": [{"role": "user", "content": "hi"}]}
).encode()


def _half_open(path: str, fields: dict[str, str]) -> bytes:
    """A hundred requests of one HTTP/2 connection whose body never comes."""
    return PREFACE + b"".join(head(2 * number + 1, _h2(path) | fields) for number in range(100))


def _resets(fields: dict[str, str]) -> Iterator[bytes]:
    """A new connection every 20,000 streams: what goes out is one piece of 500 requests, each taken back at once."""
    for number in itertools.count():
        first = (number % 40) * 500
        begin = PREFACE if first == 0 else b""
        streams = range(2 * first + 1, 2 * (first + 500) + 1, 2)
        yield begin + b"".join(head(stream, fields, ends=True) + reset(stream) for stream in streams)


def _deep() -> Iterator[bytes]:
    bodies = [
        b'{"model": "steady", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "steady", "max_tokens": ' + b"9" * 900_000 + b"}",
        json.dumps({f"key-{number}": number for number in range(80_000)}).encode(),
    ]
    packed = gzip.compress(bytes(100_000_000))
    yield from itertools.cycle([*map(_body, bodies), _body(packed, "content-encoding: gzip")])


ATTACKS: dict[str, Callable[[Target], Awaitable[None]]] = {
    "slow bodies, content-length": lambda at: at.hold(
        1200, at.http, _post("/v1/chat/completions", "content-length: 9"), b"x"
    ),
    "slow bodies, chunked": lambda at: at.hold(
        1200, at.http, _post("/v1/chat/completions", "transfer-encoding: chunked"), b"1\r\nx\r\n"
    ),
    "slow bodies of 8.3 kB": lambda at: at.hold(
        1200, at.http, _post("/v1/chat/completions", "content-length: 9000") + bytes(8300)
    ),
    "slow bodies, HTTP/2": lambda at: at.hold(12, at.http, _half_open("/v1/chat/completions", {})),
    "half-open calls": lambda at: at.hold(12, at.grpc, _half_open("/pierhead.echo.v1.Echo/Echo", _GRPC)),
    "half a message": lambda at: at.hold(12, at.grpc, PREFACE + head(1, CALL) + data(1, b"\0\0\0")),
    "slow heads": lambda at: at.hold(3000, at.http, b"GET /echo?message=hi HTTP/1.1\r\nhost: e", b"dge\r\n"),
    "idle connections": lambda at: at.hold(10_100, at.http),
    "idle WebSockets": lambda at: at.hold(1500, at.http, UPGRADE),
    "rapid reset, HTTP": lambda at: at.flood(4, at.http, _resets(_h2("/echo?message=hi") | {":method": "GET"})),
    "rapid reset, gRPC": lambda at: at.flood(4, at.grpc, _resets(CALL)),
    "invented paths": lambda at: at.flood(
        8, at.http, (f"GET /none/{number} HTTP/1.1\r\nhost: edge\r\n\r\n".encode() for number in range(60_000))
    ),
    "invented calls": lambda at: at.flood(
        4,
        at.grpc,
        (
            PREFACE + b"".join(head(2 * stream + 1, _h2(f"/a{number}.S/M", **_GRPC), ends=True) for stream in range(50))
            for number in range(6_000)
        ),
    ),
    "JSON without a bottom": lambda at: at.flood(4, at.http, _deep()),
    "clients that do not read": lambda at: _unread(at, 200),
}
"""By name."""


async def _unread(at: Target, count: int) -> None:
    """Streams of a million tokens that nobody reads."""

    async def one() -> None:
        with contextlib.suppress(OSError):
            async with at.connected(at.http) as (_, writer):
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                writer.write(_body(STREAM))
                at.sent += 1
                await asyncio.sleep(at.seconds)

    await at._together(one for _ in range(count))


def main() -> None:
    """Run from the command line; the result is a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[*ATTACKS, "all"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--http", type=int, required=True)
    parser.add_argument("--grpc", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    names = list(ATTACKS) if given.name == "all" else [given.name]

    async def run() -> dict[str, dict[str, int]]:
        targets = {name: Target(given.host, given.http, given.grpc, given.seconds) for name in names}
        print("running", file=sys.stderr, flush=True)
        await asyncio.gather(*(ATTACKS[name](target) for name, target in targets.items()), return_exceptions=True)
        return {name: {"open": target.opened, "sent": target.sent} for name, target in targets.items()}

    print(json.dumps(asyncio.run(run())))


if __name__ == "__main__":
    main()
