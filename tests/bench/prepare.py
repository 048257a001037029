"""`python -m tests.bench.prepare NAME=VALUE...`: installs what only the bench needs, and becomes the bench.

It is installed outside the clone; nothing is left running, after Ctrl-C neither.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tests.bench.options import Options, OptionsError, read
from tests.environments.made import NotMade, become, with_uv
from tests.environments.ray_serve import CACHE, RAY_SERVE, has_nvidia, make
from tests.harness.imports import ROOT

INTO_OURS = ("uv", "sync", "--frozen", "--inexact", "--python", sys.executable, "--group", "bench")


def prepare(options: Options) -> None:
    """Raises NotMade."""
    extras = ("--extra", "controller", "--extra", "recsys", "--extra", "triton")
    with_uv("Installing the bench's packages", *INTO_OURS, *extras)
    if shutil.which("wrk") is None:
        with_uv("Installing wrk", "apt_install", "wrk")
    if options.peer and not os.environ.get("PIERHEAD_BENCH_PEER_PYTHON"):
        _install_peer()
    if options.mode == "containers":
        _build_images(options)
    if has_nvidia() and not os.environ.get("PIERHEAD_BENCH_PYTHON"):
        _install_cuda_services()


def _build_images(options: Options) -> None:
    """Images of their own, unless PIERHEAD_TAG names others: a stack that runs from this clone keeps its version."""
    os.environ.setdefault("PIERHEAD_TAG", "bench")
    apps = "echo recsys" + (" triton" if "triton" in options.parts else "")
    words = ["./pierhead", "build-images", "--apps", apps, "--gpu", "1" if has_nvidia() else ""]
    if subprocess.run(words, cwd=ROOT, check=False).returncode:
        raise NotMade("the images could not be built")


def _install_cuda_services() -> None:
    """The clone's own environment has PyTorch's build for CPUs; the lock's is the one for GPUs."""
    words = ("uv", "sync", "--frozen", "--no-default-groups", "--python", sys.executable)
    ours = {"UV_PROJECT_ENVIRONMENT": f"{CACHE}/ours"}
    with_uv("Installing our services with PyTorch for GPUs", *words, "--extra", "recsys", "--extra", "ranker", **ours)
    os.environ["PIERHEAD_BENCH_PYTHON"] = f"{CACHE}/ours/bin/python"


def _install_peer() -> None:
    try:
        RAY_SERVE.make(make)
    except NotMade:
        print("pierhead: the peer cannot be installed here, so only our side is measured.", file=sys.stderr)
        return
    os.environ["PIERHEAD_BENCH_PEER_PYTHON"] = RAY_SERVE.python


def main() -> int:
    """Return the exit status where the bench cannot run."""
    words = sys.argv[1:]
    try:
        if "ONLY=tensors" in words:
            prepare(read([word for word in words if word != "ONLY=tensors"] + ["MODE=processes"]))
            become("tests.bench.shared_memory")
        prepare(read(words))
    except (OptionsError, NotMade) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionsError) else 1
    return become("tests.bench", *words)


if __name__ == "__main__":
    sys.exit(main())
