"""Many calls through one lane, and as many messages of one stream: nothing grows, on either side."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from tests.faults.processes import ROOT, Fleet, environment

CALLS = 300_000

WARM = 0.2
"""The share of the calls after which a process has all that it needs."""

MAY_GROW = {"resident": 3 * 2**20, "blocks": 3000, "objects": 200}
"""From then on, whatever the number of calls. Allocators take a little more now and then."""


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["calls", "messages"])
async def test_nothing_grows(fleet: Fleet, kind: str) -> None:
    [worker] = await fleet.workers("worker")
    caller = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.faults.programs.caller", kind, str(CALLS),
        cwd=ROOT,
        env=environment({"static_worker": worker.address}),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        printed, _ = await caller.communicate()
    finally:
        if caller.returncode is None:
            caller.kill()
            await caller.wait()
    assert caller.returncode == 0
    samples = [json.loads(line) for line in printed.splitlines()]
    last = samples[-1]
    assert last["done"] == CALLS
    warm = next(sample for sample in samples if sample["done"] >= WARM * CALLS)
    print(f"\n{CALLS} {kind} in {last['seconds']:.1f} s ({CALLS / last['seconds']:.0f}/s)")
    for side in ("caller", "replica"):
        grown = {what: last[side][what] - warm[side][what] for what in MAY_GROW}
        print(f"{side}: {last[side]['resident'] / 2**20:.1f} MB; since {warm['done']} {kind}: {grown}")
        assert all(grown[what] <= bound for what, bound in MAY_GROW.items()), _course(samples, side)


def _course(samples: list[dict[str, Any]], side: str) -> str:
    return "\n".join(f"{sample['done']}: {sample[side]}" for sample in samples)
