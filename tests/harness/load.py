"""A strict closed-loop load, in a process of its own: `python -m tests.harness.load URL... --connections 50`.

Every connection sends one GET after the other and never retries: a reset, a short read or any status but 200 is a
failure with its time and first bytes. A URL `grpc://host:port` is called as pierhead.echo.v1.Echo. Bounded in time;
SIGTERM ends it early. The result goes to stdout as JSON, and on SIGUSR1 the number of requests so far to stderr.
`--pause-s` bounds the rate: each connection rests so long between two requests, and their first ones are spread over
that time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import grpc
from pierhead.echo.v1.echo_pb2 import EchoRequest
from pierhead.echo.v1.echo_pb2_grpc import EchoStub

MAX_FAILURES_KEPT = 200
ANSWER_S = 90.0
"""Against what never answers. Longer than the product's own limits: what it says of a request is what is counted."""
RESULT_S = 60.0
"""For the process to write down what it has seen, once the last answer is there."""
PAUSE_S = 0.02
"""After a failure: what fails at once must not become a busy loop that starves the stack."""


@dataclass
class Failure:
    """One request that did not end in 200."""

    at: float
    url: str
    what: str
    begun_at: float = 0.0


@dataclass
class FailureCount:
    """How many requests to a URL failed in one way (a status, or the name of an error) in a second of unix time."""

    second: int
    url: str
    kind: str
    count: int = 0


@dataclass
class LoadResult:
    """What a load saw: counts, failures, latencies in milliseconds.

    `failures` are the first ones; `last_failed_begun_at`, `counts` and `kinds` speak of all.
    """

    requests: int = 0
    failed: int = 0
    seconds: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    last_failed_begun_at: float = 0.0
    """Unix time at which the youngest request began that failed (when it ended depends on this process); 0 = none."""
    counts: list[FailureCount] = field(default_factory=list)
    keeps: int = MAX_FAILURES_KEPT
    """How many failures are kept."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read it as the load's process writes it."""
        raw = json.loads(text)
        raw["failures"] = [Failure(**failure) for failure in raw["failures"]]
        raw["counts"] = [FailureCount(**count) for count in raw["counts"]]
        return cls(**raw)

    def note_failure(self, begun_at: float, at: float, url: str, kind: str, what: str) -> None:
        """Count a request that began and failed at these unix times; failures come in the order of `at`."""
        self.failed += 1
        self.last_failed_begun_at = max(self.last_failed_begun_at, begun_at)
        if len(self.failures) < self.keeps:
            self.failures.append(Failure(at, url, what, begun_at))
        key = (int(at), url, kind)
        for found in reversed(self.counts):
            if found.second != key[0]:
                break
            if (found.second, found.url, found.kind) == key:
                found.count += 1
                return
        self.counts.append(FailureCount(*key, count=1))

    def kinds(self) -> set[str]:
        """In which ways requests failed: statuses, names of errors."""
        return {found.kind for found in self.counts}

    def __str__(self) -> str:
        return (
            f"{self.requests} requests in {self.seconds:.1f} s ({self.requests / max(self.seconds, 0.001):.0f}/s), "
            f"{self.failed} failed, p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.1f} ms, max {self.max_ms:.1f} ms"
        )


class Load:
    """Runs the load process around a block of a test; `result` is there when the block has ended."""

    def __init__(
        self,
        urls: Sequence[str],
        connections: int = 50,
        limit_s: float = 300.0,
        *,
        reuse: bool = True,
        pause_s: float = 0.0,
        answer_s: float = ANSWER_S,
        keeps: int = MAX_FAILURES_KEPT,
    ) -> None:
        self._arguments = [*urls, "--connections", str(connections), "--limit-s", str(limit_s)]
        self._arguments += ["--pause-s", str(pause_s), "--answer-s", str(answer_s), "--keeps", str(keeps)]
        self._arguments += [] if reuse else ["--no-reuse"]
        self.result = LoadResult()

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.harness.load", *self._arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        assert line.startswith("running"), f"the load did not start: {line}{self._process.stderr.read()}"
        return self

    def so_far(self) -> int:
        """How many requests have ended, failed ones too."""
        assert self._process.stderr is not None
        self._process.send_signal(signal.SIGUSR1)
        line = self._process.stderr.readline()
        assert line.strip().isdigit(), f"the load has ended: {line}{self._process.stderr.read()}"
        return int(line)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended by itself."""
        return self._process.poll() is None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        output, complaints = self._process.communicate(timeout=ANSWER_S + RESULT_S)
        assert output, f"the load gave no result: {complaints}"
        self.result = LoadResult.from_json(output)

    def assert_no_failure(self) -> None:
        assert self.result.requests > 0
        assert self.result.failed == 0, f"{self.result}\n" + "\n".join(map(str, self.result.failures[:20]))


async def run(
    urls: Sequence[str],
    connections: int,
    limit_s: float,
    *,
    reuse: bool = True,
    pause_s: float = 0.0,
    answer_s: float = ANSWER_S,
    keeps: int = MAX_FAILURES_KEPT,
) -> LoadResult:
    """Load `urls` in turn over that many connections until SIGTERM or the limit; without `reuse`, each request opens a
    new one.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.call_later(limit_s, stop.set)
    result = LoadResult(keeps=keeps)
    loop.add_signal_handler(signal.SIGUSR1, lambda: print(result.requests, file=sys.stderr, flush=True))
    latencies: list[float] = []
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for index in range(connections):
            url, first_s = urls[index % len(urls)], pause_s * index / connections
            client = _Calls(url) if url.startswith("grpc:") else _Http(url, reuse=reuse)
            group.create_task(_user(client, url, first_s, stop, result, latencies, pause_s=pause_s, answer_s=answer_s))
        print("running", file=sys.stderr, flush=True)
    result.seconds = time.monotonic() - started
    latencies.sort()
    if latencies:
        result.p50_ms = latencies[len(latencies) // 2] * 1000
        result.p99_ms = latencies[int(len(latencies) * 0.99)] * 1000
        result.max_ms = latencies[-1] * 1000
    return result


async def _user(
    client: _Http | _Calls, url: str, first_s: float, stop: asyncio.Event, result: LoadResult, latencies: list[float],
    *, pause_s: float, answer_s: float,
) -> None:  # fmt: skip
    await asyncio.sleep(first_s)
    while not stop.is_set():
        begun, begun_at = time.monotonic(), time.time()
        try:
            async with asyncio.timeout(answer_s):
                kind, problem = await client.ask()
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            kind, problem = type(error).__name__, f"{type(error).__name__}: {error}"
            await client.close()
        result.requests += 1
        if kind:
            result.note_failure(begun_at, time.time(), url, kind, problem)
            await asyncio.sleep(PAUSE_S)
        else:
            latencies.append(time.monotonic() - begun)
        if pause_s:
            await asyncio.sleep(pause_s)
    await client.close()


class _Http:
    """A connection of HTTP/1.1, opened when it is needed."""

    def __init__(self, url: str, *, reuse: bool) -> None:
        self._at = urlsplit(url)
        target = f"{self._at.path}?{self._at.query}" if self._at.query else self._at.path
        connection = "keep-alive" if reuse else "close"
        self._request = f"GET {target} HTTP/1.1\r\nHost: {self._at.netloc}\r\nConnection: {connection}\r\n\r\n".encode()
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self) -> tuple[str, str]:
        """What went wrong, in a word and in words; both "" = nothing did."""
        self._open = self._open or await asyncio.open_connection(self._at.hostname, self._at.port)
        reader, writer = self._open
        writer.write(self._request)
        status, keep, body = await _response(reader)
        if not keep:
            await self.close()
        return ("", "") if status == 200 else (str(status), f"{status} {body[:300]!r}")

    async def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
        self._open = None


class _Calls:
    """A channel of gRPC."""

    def __init__(self, url: str) -> None:
        self._channel = grpc.aio.insecure_channel(urlsplit(url).netloc)
        self._echo = EchoStub(self._channel)

    async def ask(self) -> tuple[str, str]:
        """As `_Http.ask`."""
        try:
            await self._echo.Echo(EchoRequest(message="hi"))
        except grpc.aio.AioRpcError as error:
            return error.code().name, f"{error.code().name} {error.details()}"
        return "", ""

    async def close(self) -> None:
        """Nothing: it opens its connection again by itself, and ends with the process."""


async def _response(reader: asyncio.StreamReader) -> tuple[int, bool, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    if "content-length" not in headers:
        raise ValueError(f"no content-length in {head!r}")
    body = await reader.readexactly(int(headers["content-length"]))
    return int(lines[0].split()[1]), headers.get("connection", "").lower() != "close", body


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--connections", type=int, default=50)
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--no-reuse", action="store_true", help="a new connection for each request")
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--answer-s", type=float, default=ANSWER_S)
    parser.add_argument("--keeps", type=int, default=MAX_FAILURES_KEPT, help="how many failures are listed one by one")
    given = vars(parser.parse_args())
    reuse = not given.pop("no_reuse")
    running = run(**given, reuse=reuse)
    print(json.dumps(asdict(asyncio.run(running))))


if __name__ == "__main__":
    main()
