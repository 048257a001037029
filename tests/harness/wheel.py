"""The wheel of this clone, and environments that have it and nothing else of the clone.

Packages come from uv's cache where it holds them, so that no network is needed on a machine that has made .venv.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.stack import ROOT

SOURCES = (
    *("services/runtime", "services/llm", "proto", "controller", "simulator", "compose", "dashboards", "haproxy"),
    *(".dockerignore", "README.md", "LICENSE", "pyproject.toml", "uv.lock"),
)
NO_NETWORK = re.compile(r"network|connect|resolve host|dns error|Failed to fetch|timed out", re.IGNORECASE)


def uv(*arguments: str | Path) -> None:
    """Run uv from its cache alone, or else with the network; skips the test where there is neither."""
    command = ["uv"] if shutil.which("uv") else [sys.executable, "-m", "uv"]
    for option in (["--offline"], []):
        done = subprocess.run(
            [*command, *arguments, *option], cwd="/", capture_output=True, text=True, timeout=200, check=False
        )
        if done.returncode == 0:
            return
    if NO_NETWORK.search(done.stderr):
        pytest.skip(f"needs packages that are neither in uv's cache nor available: {done.stderr[-300:]}")
    pytest.fail(done.stderr)


def build_wheel(copy: Path, into: Path) -> Path:
    """The wheel, built from a copy: the build generates stubs into its sources, which other tests are using."""
    for name in SOURCES:
        source, target = ROOT / name, copy / name
        if source.is_dir():
            left_out = ("__pycache__", "v1") if "runtime" in name else ("__pycache__",)
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*left_out))
        else:
            shutil.copy(source, target)
    uv("build", "--wheel", "--out-dir", into, copy)
    [built] = into.glob("pierhead-*.whl")
    return built


def environment(directory: Path, *requirements: str | Path) -> Path:
    """A new environment with these; the directory of its programs."""
    uv("venv", "--python", sys.executable, directory)
    uv("pip", "install", "--python", directory / "bin" / "python", *requirements)
    return directory / "bin"
