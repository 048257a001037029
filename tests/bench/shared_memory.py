"""Large tensors between two replicas of one machine, by shared memory and by plain gRPC.

Run it with `python -m tests.bench.shared_memory`. The callee reads every byte and answers with a new tensor. Rounds of
both ways alternate; figures are medians.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import grpc
import numpy as np
from pierhead import Settings, close_handles, handle, serve, tensors
from pierhead.calls.clients import Clients
from pierhead.memory.meeting import share_memory
from pierhead.memory.scope import SCOPE, Scope
from pierhead.metrics import RuntimeMetrics
from pierhead.tensor.v1.tensor_pb2 import Tensor

from tests.harness.ports import free_ports

NAME = "pierhead.bench.Tensors"
MIB = 1024 * 1024
LIMIT = 4096 * MIB
CASES = ((100 * 1024, 200), (MIB, 100), (16 * MIB, 12), (60 * MIB, 4), (256 * MIB, 3))
"""Bytes of a tensor, and calls in one round; a gRPC message ends at 64 MiB."""
ROUNDS = 3


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
    """Seconds of each call, from the array to the array."""
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


async def _measure(ports: list[int], directory: str) -> None:
    metrics = RuntimeMetrics()
    memory = share_memory(Settings(shared_memory_bytes=LIMIT, shared_memory_dir=directory), metrics)
    assert memory is not None
    keeper = asyncio.create_task(memory.keep())
    Clients.use(Settings(static={"SHARED": (f"127.0.0.1:{ports[0]}",), "PLAIN": (f"127.0.0.1:{ports[1]}",)}))
    ways = {
        "shared memory": (handle(Stub, "shared", timeout_s=60), True),
        "plain gRPC": (handle(Stub, "plain", timeout_s=60, transport="grpc"), False),
    }
    for stub, _ in ways.values():
        await stub.Echo(tensors.from_numpy(np.zeros(8, np.uint8)))
    await asyncio.sleep(0.5)
    print(f"{'bytes':>12}  {'way':14} {'p50 ms':>9} {'GB/s each way':>14}")
    for size, calls in CASES:
        array = np.full(size, 7, np.uint8)
        medians: dict[str, list[float]] = {way: [] for way in ways if way == "shared memory" or size < 64 * MIB}
        for number in range(ROUNDS + 1):  # the first one warms up
            for way, found in medians.items():
                stub, shared = ways[way]
                seconds = await _round(stub, array, calls, shared=shared)
                if number:
                    found.append(statistics.median(seconds))
        for way, found in medians.items():
            middle = statistics.median(found)
            print(f"{size:12,}  {way:14} {middle * 1e3:9.3f} {size / middle / 1e9:14.2f}", flush=True)
        if len(medians) == 2:
            both = [statistics.median(found) for found in medians.values()]
            print(f"{'':12}  shared memory is {both[1] / both[0]:.2f} times as fast", flush=True)
    sent, copied = metrics.shared_memory_sent.values[()], metrics.shared_memory_copied.values[()]
    print(f"bytes sent by shared memory: {sent:,.0f}; bytes copied into it: {copied:,.0f}")
    await close_handles()
    keeper.cancel()
    memory.close()


def main() -> None:
    """Start both callees, measure, end them."""
    with tempfile.TemporaryDirectory() as directory:
        ports = free_ports(2)
        callees = []
        for port, limit in zip(ports, (LIMIT, 0), strict=True):
            environ = {
                "PIERHEAD_PORT": str(port),
                "PIERHEAD_ADMIN_PORT": "0",
                "PIERHEAD_ACCESS_LOG": "false",
                "PIERHEAD_SHARED_MEMORY_BYTES": str(limit),
                "PIERHEAD_SHARED_MEMORY_DIR": directory,
            }
            command = [sys.executable, "-m", "tests.bench.shared_memory", "callee"]
            callees.append(subprocess.Popen(command, env=os.environ | environ, stderr=subprocess.DEVNULL))
        try:
            asyncio.run(_measure(ports, directory))
        finally:
            for callee in callees:
                callee.terminate()
                callee.wait()


if __name__ == "__main__":
    if sys.argv[1:] == ["callee"]:
        serve(TensorsServicer())
    else:
        main()
