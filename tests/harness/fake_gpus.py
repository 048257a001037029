"""GPUs that CDI hands out: a device node and a variable each, as a real one has, and nothing behind it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CDI_KIND = "pierhead.test/gpu"
CDI_FILE = Path("/etc/cdi/pierhead-e2e.yaml")
LOCK = Path("/run/lock/pierhead-fake-gpus")
GPUS = 4


@contextlib.contextmanager
def fake_gpus() -> Iterator[None]:
    """Four of them for as long as the block runs; another process's block waits for the end of this one."""
    if os.geteuid() != 0:
        pytest.fail(f"this test writes {CDI_FILE}, which takes root")
    CDI_FILE.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_gpus(range(GPUS))
        try:
            yield
        finally:
            CDI_FILE.unlink()


def write_gpus(indices: Iterable[int]) -> None:
    """Write which GPUs there are, in one step: the engine may be reading the file."""
    devices = "".join(
        f"- name: GPU-000{index}\n  containerEdits:\n    env: [PINNED_GPU=GPU-000{index}]\n"
        f"    deviceNodes: [{{path: /dev/pinned{index}, hostPath: /dev/null}}]\n"
        for index in indices
    )
    new = CDI_FILE.with_suffix(".new")
    new.write_text(f"cdiVersion: 0.5.0\nkind: {CDI_KIND}\ndevices:\n{devices}")
    new.rename(CDI_FILE)


@dataclass(frozen=True)
class Smi:
    """An `nvidia-smi` that CDI mounts into each container with a device, as NVIDIA's files do."""

    directory: Path
    total_mib: int

    def say(self, *used_mib: int) -> None:
        """How much of each GPU's memory is in use."""
        names = [f"GPU-000{index}" for index in range(len(used_mib))]
        listing = "".join(f"GPU {index}: Card (UUID: {name})\n" for index, name in enumerate(names))
        gpus = "".join(
            f"<gpu><uuid>{name}</uuid><fb_memory_usage><total>{self.total_mib} MiB</total><used>{used} MiB</used>"
            "</fb_memory_usage></gpu>"
            for name, used in zip(names, used_mib, strict=True)
        )
        xml = f'<?xml version="1.0" ?>\n<nvidia_smi_log>{gpus}</nvidia_smi_log>\n'
        # One file for both of its forms, so that no reading finds one of them old.
        fresh = self.directory / "fresh"
        fresh.write_text(f"{listing}{xml}")
        fresh.replace(self.directory / "said")


def fake_smi(directory: Path, gpus: int, total_mib: int = 24576) -> Smi:
    """Have the GPUs of `fake_gpus` come with one, which says that nothing is in use."""
    program = directory / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = -L ] || exec cat /pierhead-smi/said\n')
    program.chmod(0o755)
    mounts = {directory: "/pierhead-smi", program: "/usr/bin/nvidia-smi"}
    edits = "".join(
        f"  - {{hostPath: {outside}, containerPath: {inside}, options: [ro, bind]}}\n"
        for outside, inside in mounts.items()
    )
    said = Smi(directory, total_mib)
    said.say(*[0] * gpus)
    write_gpus(range(gpus))
    with CDI_FILE.open("a") as file:
        file.write(f"containerEdits:\n  mounts:\n{edits}")
    return said
