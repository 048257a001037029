"""What a call of a class's method costs compared with one through generated stubs: `python -m tests.bench.class_calls`.

One caller, and one replica in a process of its own that serves both. Rounds of the two take turns, and CPU time of both
processes counts: the ratio is for the code, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psutil
from pierhead import Service, Settings, close_handles, handle, serve
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.classes.handles import handle_on
from pierhead.echo.v1.echo_pb2 import EchoRequest, GenerateRequest
from pierhead.echo.v1.echo_pb2_grpc import EchoStub

from services.echo_proto.child import Echo as Generated
from tests.bench.processes import cpu_seconds, free_ports, get

MESSAGE = "hello world"
TOKENS = 50
Measured = Callable[[], Awaitable[object]]


class Echo(Service):
    """What services/echo_proto/child.py does, as a class."""

    async def echo(self, message: str) -> str:
        """Answer with the message."""
        return f"Echo: {message}"

    async def generate(self, message: str, num_tokens: int) -> AsyncIterator[str]:
        """As many items."""
        for index in range(num_tokens):
            await asyncio.sleep(0)
            yield f"{message} {index}"


def pairs(transport: str) -> dict[str, tuple[Measured, Measured]]:
    """What is compared: the call through stubs, and through a handle of the class."""
    stub: Any = handle(EchoStub, "echo", transport=transport)
    echo: Any = handle_on(Echo, HandleChannel("echo", transport=transport))

    async def call_stub() -> object:
        return (await stub.Echo(EchoRequest(message=MESSAGE))).response

    async def stream_stub() -> object:
        return [token.text async for token in stub.Generate(GenerateRequest(message=MESSAGE, num_tokens=TOKENS))]

    async def stream_class() -> object:
        return [text async for text in echo.generate(MESSAGE, TOKENS)]

    return {"call": (call_stub, lambda: echo.echo(MESSAGE)), f"stream of {TOKENS}": (stream_stub, stream_class)}


async def repeat(call: Measured, calls: int, width: int) -> None:
    """So many calls, `width` at a time."""

    async def some() -> None:
        for _ in range(calls // width):
            await call()

    await asyncio.gather(*(some() for _ in range(width)))


async def compare(transport: str, port: int, replica: psutil.Process, rounds: int) -> None:
    """Print a line for each pair."""
    Clients.use(Settings(static={"ECHO": (f"127.0.0.1:{port}",)}))
    members = [("caller", psutil.Process()), ("replica", replica)]
    for name, both in pairs(transport).items():
        calls = (12_800 if transport == "lane" else 3_200) // (1 if name == "call" else 16)
        found: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds + 1):
            for which in (0, 1) if number % 2 else (1, 0):
                before = sum(cpu_seconds(members).values())
                await repeat(both[which], calls, 64)
                if number:  # the first round opens connections
                    found[which].append((sum(cpu_seconds(members).values()) - before) / calls * 1e6)
        stub, own = (statistics.median(each) for each in found)
        ratios = statistics.median(one / other for other, one in zip(*found, strict=True))
        print(f"{transport:5} {name:13} {stub:9.1f} {own:9.1f} {own / stub:9.3f} {ratios:9.3f}", flush=True)
    await close_handles()


def main() -> None:
    """Start the replica, measure over both transports."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.serve is not None:
        port, admin = given.serve
        settings = Settings(port=port, admin_port=admin, host="127.0.0.1", max_ongoing_requests=1000)
        serve(Generated(), Echo(), settings=settings)
        return
    port, admin = free_ports(2)
    command = [sys.executable, "-m", "tests.bench.class_calls", "--serve", str(port), str(admin)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as replica:
        try:
            _wait(admin)
            print("                    us CPU of both ends    ratio of  median of")
            print("                     stubs      class    medians     ratios")
            for transport in ("lane", "grpc"):
                asyncio.run(compare(transport, port, psutil.Process(replica.pid), given.rounds))
        finally:
            replica.terminate()


def _wait(admin: int) -> None:
    for _ in range(100):
        if get(f"http://127.0.0.1:{admin}/readyz")[0] == 200:
            return
        time.sleep(0.1)
    raise SystemExit("the replica did not get ready within 10 s")


if __name__ == "__main__":
    main()
