"""The page of what a Swarm cannot carry, made of the messages of the checks themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from controller.files.problems import Problems, ServiceSource
from controller.model.spec import GpuRequest, GpuSlot
from controller.swarm.files.checks import NOT_ON_SWARM, check_swarm
from docs.generate.markdown import cell

ABOUT = """\
# Compose keys that a Swarm does not have

With `PIERHEAD_ENGINE=swarm` each of these is an error of the compose files: `make up`, `pierhead deploy` and `pierhead
validate` name it and what to do, and nothing is changed. (Swarm's own API accepts most of them and drops them
silently.) [Run on many machines](../how-to/many-machines.md#compose-files) says what the other keys mean there.

| key | what to do |
|---|---|
"""
VALUES: Mapping[str, Any] = {
    "entrypoint": [],
    "extra_hosts": ["host.docker.internal:host-gateway"],
    "security_opt": ["systempaths=unconfined"],
    "tmpfs": ["/scratch:uid=1000"],
    "volumes": [
        {"type": "bind", "source": "/data", "target": "/data", "bind": {"selinux": "z"}},
        {"type": "volume", "source": "data", "target": "/more", "volume": {"subpath": "a"}},
    ],
}
"""Keys that a Swarm has, with values that it does not have."""
GPU = GpuRequest(1, device_ids=("GPU-1",), capabilities=("gpu", "video"), slot=GpuSlot(fraction=0.5), kind="H100")


def page(root: Path) -> str:
    """Return the whole page."""
    problems = Problems()
    source = ServiceSource("docs", "", {**dict.fromkeys(NOT_ON_SWARM, True), **VALUES})
    check_swarm(source, None, GPU, problems)
    return ABOUT + "".join(f"| {_row(line)} |\n" for line in problems.lines)


def _row(line: str) -> str:
    path, _, words = line.partition(": ")
    key = re.sub(r"\[\d+\]", "", path.removeprefix('services."".'))
    return f"`{key}` | {cell(words.removeprefix('not possible on a Swarm: '))}"
