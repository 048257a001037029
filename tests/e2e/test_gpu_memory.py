"""Replicas that ask for memory of a GPU wait for what others use. `nvidia-smi` is the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.fake_gpus import CDI_FILE, CDI_KIND, GPUS, fake_gpus
from tests.harness.stack import Stack
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Smi:
    """An `nvidia-smi` that CDI mounts into each container with a device, as NVIDIA's files do."""

    directory: Path

    def say(self, *used_mib: int) -> None:
        """How much of each GPU's 24 GiB is in use."""
        names = [f"GPU-000{index}" for index in range(len(used_mib))]
        listing = "".join(f"GPU {index}: Card (UUID: {name})\n" for index, name in enumerate(names))
        gpus = "".join(
            f"<gpu><uuid>{name}</uuid><fb_memory_usage><total>24576 MiB</total><used>{used} MiB</used>"
            "</fb_memory_usage></gpu>"
            for name, used in zip(names, used_mib, strict=True)
        )
        xml = f'<?xml version="1.0" ?>\n<nvidia_smi_log>{gpus}</nvidia_smi_log>\n'
        # One file for both of its forms, so that no reading finds one of them old.
        fresh = self.directory / "fresh"
        fresh.write_text(f"{listing}{xml}")
        fresh.replace(self.directory / "said")


@pytest.fixture
def smi(tmp_path: Path) -> Iterator[Smi]:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = -L ] || exec cat /pierhead-smi/said\n')
    program.chmod(0o755)
    mounts = {tmp_path: "/pierhead-smi", program: "/usr/bin/nvidia-smi"}
    edits = "".join(
        f"  - {{hostPath: {outside}, containerPath: {inside}, options: [ro, bind]}}\n"
        for outside, inside in mounts.items()
    )
    with fake_gpus():
        with CDI_FILE.open("a") as file:
            file.write(f"containerEdits:\n  mounts:\n{edits}")
        said = Smi(tmp_path)
        said.say(*[0] * GPUS)
        yield said


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
