"""`python -m tests.bench.llm.prepare NAME=VALUE...`: installs what only this bench needs, and becomes the bench."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from tests.bench.llm.cases import Options, OptionsError, read
from tests.bench.prepare import INTO_OURS
from tests.environments.made import NotMade, become, with_uv
from tests.environments.ray_serve import RAY_SERVE_LLM, make_llm
from tests.environments.vllm import VLLM, make


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
    """Its engine is the mock one on both sides."""
    RAY_SERVE_LLM.make(make_llm)
    os.environ["PIERHEAD_BENCH_LLM_PEER_PYTHON"] = RAY_SERVE_LLM.python


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
