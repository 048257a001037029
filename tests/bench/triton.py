"""What a handle costs in front of Triton: `python -m tests.bench.triton HOST:PORT [/dev/shm]`, a minute and a half.

The server must have the model `add` (tests/contract/triton_models). One process calls it by `pierhead.triton` and by
tritonclient's own `grpc.aio` client, in turn, and prints calls per second, the CPU time of this process for a call, and
the ratio of each round. With the directory that is the server's /dev/shm, `pierhead.triton` sends large tensors through
shared memory, tritonclient's as bytes.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

import numpy as np
from pierhead import Settings, close_handles, triton
from pierhead.calls.clients import Clients
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient

ROUNDS = 5
SECONDS = 1.0
CONCURRENCY = {16: (1, 16, 64), 250_000: (1, 16, 64), 2 << 20: (1, 4)}
"""By the FP32 numbers in each of the two inputs."""

Call = Callable[[], Awaitable[object]]


async def rate(call: Call, concurrency: int) -> tuple[float, float]:
    """Calls per second, and CPU microseconds of this process per call."""
    done, until = 0, time.perf_counter() + SECONDS

    async def work() -> None:
        nonlocal done
        while time.perf_counter() < until:
            await call()
            done += 1

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return done / (time.perf_counter() - began), (time.process_time() - cpu) / done * 1e6


async def compare(raw: Call, ours: Call, concurrency: int, numbers: int) -> None:
    """Print one line."""
    rounds = [(await rate(raw, concurrency), await rate(ours, concurrency)) for _ in range(ROUNDS)]
    raw_rate, raw_cpu, our_rate, our_cpu = (
        statistics.median(values) for values in zip(*((*a, *b) for a, b in rounds), strict=True)
    )
    ratio = statistics.median(ours[0] / raw[0] for raw, ours in rounds)
    print(
        f"{concurrency:>3} at a time, 2 x {numbers * 4:>9,} bytes: raw {raw_rate:7.0f}/s {raw_cpu:6.0f} us,"
        f" handle {our_rate:7.0f}/s {our_cpu:6.0f} us, handle/raw {ratio:.0%}"
    )


async def main(address: str, directory: str = "") -> None:
    """Print the table."""
    Clients.use(Settings(static={"TRITON": (address,)}, triton_shared_memory_dir=directory))
    ours, theirs = triton.client("triton"), InferenceServerClient(address)
    for numbers, concurrencies in CONCURRENCY.items():
        array = np.ones(numbers, np.float32)

        async def by_handle(array: np.ndarray = array) -> object:
            most = {"sum": array.nbytes}
            return (await ours.infer("add", {"a": array, "b": array}, outputs=most if directory else ()))["sum"]

        async def by_tritonclient(array: np.ndarray = array) -> object:
            inputs = [InferInput(name, array.shape, "FP32").set_data_from_numpy(array) for name in ("a", "b")]
            return (await theirs.infer("add", inputs)).as_numpy("sum")

        async with asyncio.timeout(60):
            for _ in range(20):  # which also makes the memory that the rounds use
                await asyncio.gather(*(call() for call in (by_handle, by_tritonclient) for _ in range(4)))
        for concurrency in concurrencies:
            await compare(by_tritonclient, by_handle, concurrency, numbers)
    await theirs.close()
    await close_handles()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
