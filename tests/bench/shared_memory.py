"""Large tensors between two replicas of one machine: by shared memory, by plain gRPC, and as Ray Serve passes them.

`make bench ONLY=tensors` runs it. The callee reads every byte and answers with a new tensor. Rounds of all ways take
turns; figures are medians, and the CPU time of every process that has a part in a call.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from pierhead import Settings, close_handles, handle, serve, tensors
from pierhead.calls.clients import Clients
from pierhead.memory.link_setup import share_memory
from pierhead.memory.scope import SCOPE, Scope
from pierhead.metrics import RuntimeMetrics
from pierhead.tensor.v1.tensor_pb2 import Tensor

from tests.bench.cases import PEER
from tests.bench.processes import Member, cpu_seconds, free_ports, get
from tests.bench.systems import peer
from tests.bench.systems.running import Running, Workplace

NAME = "pierhead.bench.Tensors"
MIB = 1024 * 1024
LIMIT = 4096 * MIB
CASES = ((100 * 1024, 400), (MIB, 100), (16 * MIB, 16), (256 * MIB, 8))
"""Bytes of a tensor, and calls in one round."""
ROUNDS = 3
THEIRS = replace(PEER, env=(("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", str(2**31 - 1)),))
"""Its own limit of a message is 4 MiB."""


class TensorsServicer:
    """`Echo`: a tensor of the same size."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.uint8)

    async def Echo(self, request: Tensor, context: Any) -> Tensor:
        array = tensors.to_numpy(request)
        if self._room.size != array.size:
            self._room = np.empty_like(array)
        np.add(array, 1, out=self._room)  # reads every byte
        return tensors.from_numpy(self._room)


def add_TensorsServicer_to_server(servicer: Any, server: Any) -> None:
    """As generated code has it."""
    codec = (Tensor.FromString, Tensor.SerializeToString)
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(servicer.Echo, *codec)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    server.add_registered_method_handlers(NAME, handlers)


class Stub:
    """As generated code has it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.Echo: Any = channel.unary_unary(f"/{NAME}/Echo", Tensor.SerializeToString, Tensor.FromString)


async def _round(stub: Stub, array: Any, calls: int, *, shared: bool) -> list[float]:
    """Seconds of each call, from the array to the array. Each call is as if it served a request of its own."""
    found = []
    for _ in range(calls):
        scope = Scope()
        token = SCOPE.set(scope if shared else None)
        began = time.perf_counter()
        answer = tensors.to_numpy(await stub.Echo(tensors.from_numpy(array)))
        found.append(time.perf_counter() - began)
        if answer[-1] != (int(array[-1]) + 1) % 256:
            raise RuntimeError("the answer is another tensor")
        del answer
        scope.end()
        SCOPE.reset(token)
        await asyncio.sleep(0)
    return found


@dataclass
class Way:
    """One way between two processes, and what was measured of it."""

    name: str
    round: Callable[[Any, int], Awaitable[list[float]]]
    """`round(array, calls)`: seconds of each call."""
    members: Callable[[], Iterable[Member]]
    """Every process that has a part in it."""
    largest: int = LIMIT
    """Bytes of a tensor."""
    p50s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    async def measure(self, array: Any, calls: int) -> None:
        """One round."""
        before = sum(cpu_seconds(self.members()).values())
        self.p50s.append(statistics.median(await self.round(array, calls)))
        self.cpu_s += sum(cpu_seconds(self.members()).values()) - before


async def _measure(ways: list[Way]) -> None:
    print(f"{'bytes':>12}  {'way':24} {'p50 ms':>9} {'GB/s each way':>14} {'CPU us/call':>12}")
    for size, calls in CASES:
        array = np.full(size, 7, np.uint8)
        measured = [way for way in ways if size <= way.largest]
        for number in range(ROUNDS + 1):
            if number <= 1:  # the first one warms up
                for way in measured:
                    way.p50s, way.cpu_s = [], 0.0
            for way in measured if number % 2 else reversed(measured):
                await way.measure(array, calls)
        p50s = {way.name: statistics.median(way.p50s) for way in measured}
        for way in measured:
            p50, cpu_us = p50s[way.name], way.cpu_s / (ROUNDS * calls) * 1e6
            print(f"{size:12,}  {way.name:24} {p50 * 1e3:9.3f} {size / p50 / 1e9:14.2f} {cpu_us:12,.0f}")
        ratios = [f"{p50s[way.name] / p50s[ways[0].name]:.2f} of {way.name}" for way in measured[1:]]
        print(f"{'':12}  times the throughput: " + ", ".join(ratios), flush=True)


async def _run(ports: list[int], callees: list[int], directory: str, theirs: Running | None) -> None:
    metrics = RuntimeMetrics()
    memory = share_memory(Settings(shared_memory_bytes=LIMIT, shared_memory_dir=directory), metrics)
    assert memory is not None
    keeper = asyncio.create_task(memory.keep())
    Clients.use(Settings(static={"SHARED": (f"127.0.0.1:{ports[0]}",), "PLAIN": (f"127.0.0.1:{ports[1]}",)}))
    processes: list[Member] = [("ours", psutil.Process(pid)) for pid in (os.getpid(), *callees)]
    shared = handle(Stub, "shared", timeout_s=60)
    plain = handle(Stub, "plain", timeout_s=60, transport="grpc")
    for stub in (shared, plain):
        await stub.Echo(tensors.from_numpy(np.zeros(8, np.uint8)))
    await asyncio.sleep(0.5)  # the two meet; until then tensors travel as bytes
    ways = [
        Way("shared memory", partial(_round, shared, shared=True), lambda: processes),
        Way("plain gRPC", partial(_round, plain, shared=False), lambda: processes, largest=63 * MIB),
    ]
    if theirs is not None:
        url = theirs.url + "/round?size={}&calls={}&store={}"

        async def ask(store: bool, array: Any, calls: int) -> list[float]:
            status, body = await asyncio.to_thread(get, url.format(array.size, calls, store), 300)
            if status != 200:
                raise RuntimeError(f"the peer answers {status}: {body[:500]!r}")
            return list(map(float, json.loads(body)))

        ways.append(Way("Ray Serve, object store", partial(ask, True), theirs.members))
        ways.append(Way("Ray Serve, gRPC", partial(ask, False), theirs.members, largest=63 * MIB))
    await _measure(ways)
    sent, copied = metrics.shared_memory_sent.values[()], metrics.shared_memory_copied.values[()]
    print(f"bytes sent by shared memory: {sent:,.0f}; bytes copied into it: {copied:,.0f}")
    await close_handles()
    keeper.cancel()
    memory.close()


def main() -> None:
    """Start both callees, and the peer where its interpreter is named; measure, end them."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        ports = free_ports(2)
        callees = []
        for port, limit in zip(ports, (LIMIT, 0), strict=True):
            environ = {
                "PIERHEAD_PORT": str(port),
                "PIERHEAD_ADMIN_PORT": "0",
                "PIERHEAD_ACCESS_LOG": "off",
                "PIERHEAD_LOG_LEVEL": "error",
                "PIERHEAD_SHARED_MEMORY_BYTES": str(limit),
                "PIERHEAD_SHARED_MEMORY_DIR": directory,
            }
            command = [sys.executable, "-m", "tests.bench.shared_memory", "callee"]
            callees.append(subprocess.Popen(command, env=os.environ | environ))
            stack.callback(callees[-1].wait)
            stack.callback(callees[-1].terminate)
        theirs, interpreter = None, os.environ.get("PIERHEAD_BENCH_PEER_PYTHON", "")
        if interpreter:
            place = Path(directory)
            work = Workplace(place, Path(sys.executable), Path(interpreter), None, "cpu", "", torch_threads=1)
            theirs = stack.enter_context(peer.running(work, THEIRS, "tensors", "/round?size=8&calls=1"))
        asyncio.run(_run(ports, [callee.pid for callee in callees], directory, theirs))


if __name__ == "__main__":
    if sys.argv[1:] == ["callee"]:
        serve(TensorsServicer())
    else:
        main()
