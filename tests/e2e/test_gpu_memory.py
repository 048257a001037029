"""Replicas that ask for memory of a GPU wait for what others use. `nvidia-smi` is the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.fake_gpus import CDI_KIND, GPUS, Smi, fake_gpus, fake_smi
from tests.harness.stack import Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(300)]


@pytest.fixture
def smi(tmp_path: Path) -> Iterator[Smi]:
    with fake_gpus():
        yield fake_smi(tmp_path, GPUS)


@pytest.fixture
def memory_stack(smi: Smi) -> Iterator[Stack]:
    smi.say(20_000, 23_000, 24_000, 24_000)
    environment = {"PIERHEAD_GPU_CDI_KIND": CDI_KIND}
    with Stack("pierhead-test-memory", ["tests/e2e/apps/gpu_memory.yaml"], environment).running() as stack:
        yield stack


def test_a_replica_waits_for_memory_in_use(memory_stack: Stack, smi: Smi, capsys: pytest.CaptureFixture[str]) -> None:
    why = "it asks for 8 GiB of a GPU and 0 of 4 GPUs fit: 4 have at most 4.4 GiB free (other processes use 19.5 GiB)"
    eventually(lambda: why in memory_stack.service("llm")["message"], "it waits with numbers")
    assert memory_stack.replicas("llm") == {}
    smi.say(20_000, 500, 24_000, 24_000)
    memory_stack.wait_settled(llm=2)
    held = {container.labels["pierhead.gpus"] for container in memory_stack.replicas("llm").values()}
    assert held == {f"GPU-0001=memory:{8 * 1024**3}"}
    with capsys.disabled():
        print(f"\n{memory_stack.pierhead('status').stdout}")
