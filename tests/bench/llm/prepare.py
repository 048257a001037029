"""`python -m tests.bench.llm.prepare NAME=VALUE...`: installs what only this bench needs, and becomes the bench."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tests.bench.llm.cases import Options, OptionsError, read
from tests.bench.prepare import CACHE, INTO_OURS, REQUIREMENTS
from tests.environments.made import NotMade, become, run, with_uv
from tests.environments.vllm import VLLM, make

MORE = REQUIREMENTS.with_name("requirements-llm.txt")
PACKAGES = "lib/python3.11/site-packages"


def prepare(options: Options) -> None:
    """Raises NotMade."""
    with_uv("Installing the bench's packages", *INTO_OURS, "--extra", "controller")
    if "vllm" in options.parts:
        _or_warn("there is no vLLM here, so none is measured", _install_vllm)
    if options.peer and not os.environ.get("PIERHEAD_BENCH_LLM_PEER_PYTHON"):
        _or_warn("the peer cannot be installed here, so only our side is measured", _install_peer)


def _or_warn(words: str, install: Callable[[], None]) -> None:
    try:
        install()
    except NotMade as error:
        print(f"{error}\npierhead: {words}.", file=sys.stderr)


def _install_vllm() -> None:
    VLLM.make(make)


def _install_peer() -> None:
    """Ray Serve LLM imports vLLM, whose place the tests' own takes: its engine is the mock one on both sides."""
    made_of = REQUIREMENTS.read_bytes() + MORE.read_bytes() + f"{VLLM.directory}\n".encode()
    directory = CACHE / f"llm-peer-{hashlib.sha256(made_of).hexdigest()[:12]}"
    python = str(directory / "bin" / "python")
    if not (directory / "complete").exists():
        _install_vllm()
        directory.parent.mkdir(parents=True, exist_ok=True)
        base = ("uv", "venv", "--clear", "--python", str(Path(VLLM.python).resolve()), str(directory))
        with_uv("Making the peer's environment", *base)
        pip = ("uv", "pip", "install", "--python", python, "--requirement", str(REQUIREMENTS), "--override", str(MORE))
        with_uv("Installing the peer, Ray Serve LLM", *pip, "pyarrow", "pandas", "jsonref", "hf-transfer")
        (directory / PACKAGES / "vllm.pth").write_text(f"{VLLM.directory / PACKAGES}\n")
        run("Importing Ray Serve LLM", [python, "-c", "import ray.serve.llm"], {})
        (directory / "complete").touch()
    os.environ["PIERHEAD_BENCH_LLM_PEER_PYTHON"] = python


def main() -> int:
    """Return the exit status where the bench cannot run."""
    words = sys.argv[1:]
    try:
        prepare(read(words))
    except (OptionsError, NotMade) as error:
        print(f"bench-llm: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionsError) else 1
    return become("tests.bench.llm", *words)


if __name__ == "__main__":
    sys.exit(main())
