"""GPUs that CDI hands out: a device node and a variable each, as a real one has, and nothing behind it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
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
