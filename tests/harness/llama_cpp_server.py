"""llama.cpp's own server, as a process: `python -m tests.harness.llama_cpp_server NAME FILE`, with its environment on
the path. Prints its address when it serves, and ends with its input.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from tests.environments.llama_cpp import LLAMA_CPP, MODEL
from tests.harness.imports import ROOT

CONTEXT, AT_A_TIME = 2048, 4


@contextlib.contextmanager
def llama_cpp(name: str) -> Iterator[str]:
    """Serve the small model by this name; yields the URL."""
    command = [sys.executable, "-m", "tests.harness.llama_cpp_server", name, str(MODEL)]
    paths = {"PYTHONPATH": f"{ROOT}:{LLAMA_CPP.directory}"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=paths, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()


def main(name: str, file: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = file, {name}
    params.n_ctx, params.n_parallel, params.kv_unified = CONTEXT * AT_A_TIME, AT_A_TIME, False
    params.endpoint_metrics = True
    params.cpuparams.n_threads = 2
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
