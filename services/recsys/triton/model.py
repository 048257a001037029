"""The DLRM as a model of Triton's Python backend: weights, checks and forward pass of services/recsys.

Triton makes the batches; see models/dlrm/config.pbtxt.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

import torch
import triton_python_backend_utils as backend  # a module that exists only inside Triton

from services.recsys.model import default_threads, loaded, seeded
from services.recsys.rows import Rows, Scores, checked


class TritonPythonModel:
    """What Triton's Python backend calls, by the names that it gives."""

    def initialize(self, args: dict[str, str]) -> None:
        """Make the model; takes seconds. What it raises is why the model does not load, in Triton's log."""
        self._watcher = _end_server_with_this_process()
        written = json.loads(args["model_config"]).get("parameters", {})
        parameters = {name: value["string_value"] for name, value in written.items()}
        torch.set_num_threads(int(parameters.get("threads") or default_threads()))
        weights = parameters.get("weights")
        on_gpu = args["model_instance_kind"] == "GPU"
        device = torch.device(f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu")
        self._model = (loaded(weights) if weights else seeded()).to(device)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Score the rows of all requests in one pass. A request that cannot be scored fails alone."""
        taken = [_rows_of(request) for request in requests]
        blocks = [rows for rows in taken if not isinstance(rows, ValueError)]
        scores = iter(self._model.score(blocks) if blocks else ())
        return [_refusal(rows) if isinstance(rows, ValueError) else _response(next(scores)) for rows in taken]

    def finalize(self) -> None:
        """This process ends after it, and the server continues."""
        self._watcher.communicate(b"finalized\n")


def _end_server_with_this_process() -> subprocess.Popen[bytes]:
    """Start a process that ends Triton if this one dies before it has written a line to it.

    Triton runs a Python model in a process of its own. Where that is killed (out of memory, say), the server answers
    every request for the model with an error and says that it is ready, so no readiness probe finds it.
    """
    script = 'read -r line || { echo "a process of a Python model died: ending the server" >&2; kill -TERM "$1"; }'
    return subprocess.Popen(["/bin/sh", "-c", script, "sh", str(os.getppid())], stdin=subprocess.PIPE)


def _rows_of(request: Any) -> Rows | ValueError:
    dense, sparse = (backend.get_input_tensor_by_name(request, name).as_numpy() for name in ("dense", "sparse"))
    try:
        return checked(dense, sparse)
    except ValueError as error:
        return error


def _response(scores: Scores) -> Any:
    return backend.InferenceResponse([backend.Tensor("scores", scores.reshape(-1, 1))])


def _refusal(error: ValueError) -> Any:
    return backend.InferenceResponse(error=backend.TritonError(str(error), backend.TritonError.INVALID_ARG))
