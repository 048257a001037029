"""What the mock engine and the LLM server cost: `python -m tests.bench.llm_engine_cost`, a minute.

A replica in a process of its own, and a caller that reads streams through a lane: tokens per second of the replica's
CPU time. The load tests of LLM serving stand on it: what the replicas use is not there for what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import psutil
from pierhead import Settings, close_handles, handle
from pierhead.calls.clients import Clients
from pierhead.llm.v1.llm_pb2 import LLMRequest
from pierhead.llm.v1.llm_pb2_grpc import LLMServerStub

SECONDS = 8.0
OUTPUT = 128
PROMPT = "Hello there, tell me of the sea. " * 64


@dataclass(frozen=True)
class Case:
    """One load."""

    streams: int
    tokens_per_s: float
    step_s: float


CASES = (
    Case(64, 2_000.0, 0.005),
    Case(256, 2_000.0, 0.005),
    Case(64, 16_000.0, 0.005),
    Case(64, 16_000.0, 0.01),
    Case(256, 16_000.0, 0.01),
)


async def measure(case: Case) -> str:
    """One line of the table."""
    port, admin = _free_port(), _free_port()
    kwargs = {"tokens_per_s": case.tokens_per_s, "step_s": case.step_s, "max_num_seqs": case.streams}
    config = {"engine": "mock", "model_loading": {"model_id": "mock"}, "engine_kwargs": kwargs}
    environ = os.environ | {
        "PIERHEAD_LLM_CONFIG": json.dumps(config), "PIERHEAD_PORT": str(port), "PIERHEAD_ADMIN_PORT": str(admin),
        "PIERHEAD_HOST": "127.0.0.1", "PIERHEAD_MAX_ONGOING_REQUESTS": "1000",
    }  # fmt: skip
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-m", "pierhead.llm.server"], env=environ, stderr=subprocess.PIPE
    )
    try:
        return await _load(case, port, psutil.Process(process.pid))
    finally:
        await close_handles()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


async def _load(case: Case, port: int, process: psutil.Process) -> str:
    Clients.use(Settings(static={"LLM": (f"127.0.0.1:{port}",)}))
    stub = handle(LLMServerStub, "llm")
    first = [0.0]
    counts = {"tokens": 0, "replies": 0, "requests": 0}
    ttfts: list[float] = []
    async for _ in stub.Chat(_request(0), timeout=30):  # waits until it is ready
        pass
    first[0] = time.monotonic()
    before = sum(process.cpu_times()[:2])
    ends = time.monotonic() + SECONDS

    async def user(number: int) -> None:
        while time.monotonic() < ends:
            began, seen = time.monotonic(), False
            async for reply in stub.Chat(_request(number), timeout=120):
                if not seen:
                    seen = True
                    ttfts.append(time.monotonic() - began)
                counts["tokens"] += reply.tokens
                counts["replies"] += 1
            counts["requests"] += 1

    await asyncio.gather(*[user(number) for number in range(case.streams)])
    took = time.monotonic() - first[0]
    cpu = sum(process.cpu_times()[:2]) - before
    return (
        f"{case.streams:7} {case.tokens_per_s:12.0f} {case.step_s * 1000:7.0f} {counts['tokens'] / took:10.0f} "
        f"{counts['tokens'] / counts['replies']:12.2f} {cpu / took * 100:7.1f} {counts['tokens'] / cpu:16.0f} "
        f"{cpu / counts['replies'] * 1e6:12.1f} {statistics.median(ttfts) * 1000:9.1f}"
    )


def _request(number: int) -> LLMRequest:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": f"{number} {PROMPT}"}], "max_tokens": OUTPUT}
    return LLMRequest(body=json.dumps(body | {"stream": True}).encode(), model="mock")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Print the table."""
    print("streams  tokens/s set  step ms  tokens/s  tokens/reply  core %  tokens/core-s  us CPU/reply  TTFT p50 ms")
    for case in CASES:
        print(asyncio.run(measure(case)), flush=True)


if __name__ == "__main__":
    main()
