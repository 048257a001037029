"""What a client, or a neighbour on the stack's network, may do to harm the others, in a process of its own:
`python -m tests.faults.attacks NAME --seconds 10`.

Each attack is bounded in count and time, goes to one address, and ends by itself. It says how far it came: connections
that were open at the end, and pieces that were sent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import itertools
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from tests.harness.http2 import PREFACE, data, head, reset

WRITE_S = 5.0
"""For a write to a peer that does not read."""
AT_ONCE = 50
"""Connections that are being opened at a time: to hold them is the attack, to open them is none."""
AGAIN_S = 1.0
"""Before a connection that was closed, or refused, is opened again."""
NOTHING = "nothing"
API, DISCOVERY, ADMIN = 8100, 8101, 9100
"""Ports of the controller, and that of a replica."""


@dataclass
class Target:
    """Where the edge, the controller and a replica answer, and how far an attack has come."""

    host: str
    http: int
    grpc: int
    controller: str
    replica: str
    seconds: float
    opened: int = 0
    sent: int = 0

    @contextlib.asynccontextmanager
    async def connected(self, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """One connection. It counts as opened as long as it is."""
        host = {API: self.controller, DISCOVERY: self.controller, ADMIN: self.replica}.get(port, self.host)
        async with asyncio.timeout(WRITE_S):
            reader, writer = await asyncio.open_connection(host, port)
        self.opened += 1
        try:
            yield reader, writer
        finally:
            self.opened -= 1
            writer.transport.abort()

    async def hold(self, count: int, port: int, *parts: bytes, reads: bool = True) -> None:
        """That many connections that send these parts, a second apart, and then nothing. One that is closed is opened
        again.
        """
        gate = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            while True:
                with contextlib.suppress(OSError):
                    async with contextlib.AsyncExitStack() as opened:
                        async with gate:
                            reader, writer = await opened.enter_async_context(self.connected(port))
                        if not reads:
                            writer.transport.pause_reading()  # type: ignore[attr-defined]
                        for part in parts:
                            writer.write(part)
                            self.sent += 1
                            async with asyncio.timeout(WRITE_S):
                                await writer.drain()
                            await asyncio.sleep(1)
                        await _drop(reader)
                await asyncio.sleep(AGAIN_S)

        await self._together(one for _ in range(count))

    async def flood(self, clients: int, port: int, requests: Callable[[], Iterator[bytes]]) -> None:
        """Clients that send one request after the other, and throw the answers away. `requests`: of a connection."""

        async def one() -> None:
            while True:
                with contextlib.suppress(OSError):
                    async with self.connected(port) as (reader, writer):
                        dropping = asyncio.ensure_future(_drop(reader))
                        try:
                            for request in requests():
                                if reader.at_eof():
                                    break
                                writer.write(request)
                                self.sent += 1
                                async with asyncio.timeout(WRITE_S):
                                    await writer.drain()
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


def _stream(tokens: int) -> bytes:
    asked = {"model": "steady", "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": "hi"}]}
    return _body(json.dumps(asked).encode())


def _half_open(path: str, fields: dict[str, str]) -> bytes:
    """A hundred requests of one HTTP/2 connection whose body never comes."""
    return PREFACE + b"".join(head(2 * number + 1, _h2(path) | fields) for number in range(100))


def _resets(fields: dict[str, str]) -> Iterator[bytes]:
    """20,000 streams of a connection, in pieces of 500 requests, each taken back at once."""
    yield PREFACE
    for first in range(0, 20_000, 500):
        streams = range(2 * first + 1, 2 * (first + 500) + 1, 2)
        yield b"".join(head(stream, fields, ends=True) + reset(stream) for stream in streams)


def _paths() -> Callable[[], Iterator[bytes]]:
    numbers = itertools.count()  # of all connections together
    return lambda: (f"GET /none/{number} HTTP/1.1\r\nhost: edge\r\n\r\n".encode() for number in numbers)


def _calls() -> Callable[[], Iterator[bytes]]:
    """50 calls a connection, of services that nobody has."""
    numbers = itertools.count()

    def of_one() -> Iterator[bytes]:
        service = next(numbers)
        yield PREFACE + b"".join(
            head(2 * stream + 1, _h2(f"/a{service}.S/M", **_GRPC), ends=True) for stream in range(50)
        )

    return of_one


def _deep() -> Callable[[], Iterator[bytes]]:
    bodies = [
        b'{"model": "steady", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "steady", "max_tokens": ' + b"9" * 900_000 + b"}",
        json.dumps({f"key-{number}": number for number in range(80_000)}).encode(),
    ]
    packed = gzip.compress(bytes(100_000_000))
    return partial(itertools.cycle, [*map(_body, bodies), _body(packed, "content-encoding: gzip")])


def _api() -> Iterator[bytes]:
    """Changes and reads as a container asks for them, and as a page whose name was made to point at the controller."""
    change = b'{"replicas": 0}'
    fields = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(change)
    yield from itertools.cycle(
        [
            b"PUT /api/v1/services/echo/scale HTTP/1.1\r\nhost: controller\r\n" + fields + change,
            b"GET /api/v1/services/echo/logs HTTP/1.1\r\nhost: controller\r\n\r\n",
            b"GET /api/v1/events?limit=1000 HTTP/1.1\r\nhost: rebound.example:8100\r\n\r\n",
            b"GET /metrics HTTP/1.1\r\nhost: controller\r\n\r\n",
        ]
    )


def _admin() -> Iterator[bytes]:
    """Another user_config, and sleep, for a replica."""
    change = b'{"greeting": "mine"}'
    fields = b"host: replica\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(change)
    paths = (b"PUT /user-config", b"POST /sleep", b"GET /metrics")
    yield from itertools.cycle([path + b" HTTP/1.1\r\n" + fields + change for path in paths])


def _watches() -> bytes:
    """A hundred watches of one connection."""
    request = b"\x0a\x04echo"  # WatchRequest(services=["echo"])
    message = b"\0" + len(request).to_bytes(4, "big") + request
    asked = _h2("/pierhead.discovery.v1.Discovery/Watch", **_GRPC)
    return PREFACE + b"".join(head(2 * number + 1, asked) + data(2 * number + 1, message) for number in range(100))


async def _logs(at: Target) -> None:
    """Lines with control characters, without an end, and that are no text."""
    end = asyncio.get_running_loop().time() + at.seconds
    for line in itertools.cycle(
        (b"\x1b]0;mine\x07\x1b[2J\n", b"9" * 50_000, b"\xff\xfe\0\n", b'{"level": 1' + b"0" * 5000 + b"}\n")
    ):
        if asyncio.get_running_loop().time() > end:
            break
        os.write(2, line)
        at.sent += 1
        await asyncio.sleep(0.0005)


ATTACKS: dict[str, Callable[[Target], Awaitable[None]]] = {
    NOTHING: lambda at: asyncio.sleep(at.seconds),
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
    "rapid reset, HTTP": lambda at: at.flood(
        4, at.http, partial(_resets, _h2("/echo?message=hi") | {":method": "GET"})
    ),
    "rapid reset, gRPC": lambda at: at.flood(4, at.grpc, partial(_resets, CALL)),
    "invented paths": lambda at: at.flood(8, at.http, _paths()),
    "invented calls": lambda at: at.flood(4, at.grpc, _calls()),
    "JSON without a bottom": lambda at: at.flood(4, at.http, _deep()),
    "streams of 50 tokens that nobody reads": lambda at: at.hold(200, at.http, _stream(50), reads=False),
    "streams of a million tokens that nobody reads": lambda at: at.hold(200, at.http, _stream(1_000_000), reads=False),
    "API, by a neighbour and a rebound page": lambda at: at.flood(4, API, _api),
    "admin page, by a neighbour": lambda at: at.flood(4, ADMIN, _admin),
    "Discovery watches": lambda at: at.hold(6, DISCOVERY, _watches()),
    "hostile labels and logs": _logs,
}
"""By name. The first one shows what its process alone does; the labels of the last one are those of its container."""


def main() -> None:
    """Run from the command line; the result is a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[*ATTACKS, "all"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--http", type=int, required=True)
    parser.add_argument("--grpc", type=int, required=True)
    parser.add_argument("--controller", required=True)
    parser.add_argument("--replica", required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    signal.alarm(int(given.seconds) + 60)  # it ends, whatever happens
    names = list(ATTACKS) if given.name == "all" else [given.name]

    async def run() -> dict[str, dict[str, int]]:
        at = Target(given.host, given.http, given.grpc, given.controller, given.replica, given.seconds)
        targets = {name: replace(at) for name in names}
        print("running", file=sys.stderr, flush=True)
        await asyncio.gather(*(ATTACKS[name](target) for name, target in targets.items()), return_exceptions=True)
        return {name: {"open": target.opened, "sent": target.sent} for name, target in targets.items()}

    print(json.dumps(asyncio.run(run())))


if __name__ == "__main__":
    main()
