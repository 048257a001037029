"""An LLM server with llama.cpp in its container: `serve.py FILE`, with the model's name in the variable MODEL."""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any


def start(name: str, file: str) -> Any:
    """It listens for as long as what is returned is kept."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = file, {name}
    params.port, params.n_ctx, params.n_parallel = 8081, 4096, 4
    params.cpuparams.n_threads = 1
    return xllamacpp.Server(params)


if __name__ == "__main__":
    engine = start(os.environ["MODEL"], sys.argv[1])
    runpy.run_module("pierhead.llm.server", run_name="__main__")
