"""The DLRM as a model of Triton's Python backend: weights, checks and forward pass of services/recsys/ranker.

Triton makes the batches; see models/dlrm/config.pbtxt.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton_python_backend_utils as backend  # a module that exists only inside Triton

from services.recsys.ranker.rows import MAX_BATCH_ROWS, Rows, check_scores, checked_rows
from services.recsys.ranker.scorer import Scorer
from services.recsys.ranker.threads import default_threads
from services.recsys.ranker.weights import load_weights, seeded_weights


class TritonPythonModel:
    """What Triton's Python backend calls, by the names that it gives."""

    def initialize(self, args: dict[str, str]) -> None:
        """Make the model; takes seconds. What it raises is why the model does not load, in Triton's log."""
        self._watcher = _end_server_with_this_process()
        written = json.loads(args["model_config"]).get("parameters", {})
        parameters = {name: value["string_value"] for name, value in written.items()}
        torch.set_num_threads(int(parameters.get("threads") or default_threads()))
        weights = parameters.get("weights")
        model = load_weights(Path(weights)) if weights else seeded_weights()
        on_gpu = args["model_instance_kind"] == "GPU"
        device = torch.device(f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu")
        self._scorer = Scorer(model, device, MAX_BATCH_ROWS)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Score the rows of all requests in one pass. A request that cannot be scored fails alone."""
        taken = [_rows_of(request) for request in requests]
        blocks = [rows for rows in taken if isinstance(rows, Rows)]
        scores = iter(self._scorer.score_now(blocks) if blocks else ())
        return [_response(rows, next(scores)) if isinstance(rows, Rows) else _refusal(rows) for rows in taken]

    def finalize(self) -> None:
        """End the scorer. This process ends after it, and the server goes on."""
        self._scorer.close()
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
        return checked_rows(dense, sparse)
    except ValueError as error:
        return error


def _response(rows: Rows, scores: npt.NDArray[np.float32]) -> Any:
    try:
        check_scores(scores, rows.dense)
    except ValueError as error:
        return _refusal(error)
    return backend.InferenceResponse([backend.Tensor("scores", scores.reshape(-1, 1))])


def _refusal(error: ValueError) -> Any:
    return backend.InferenceResponse(error=backend.TritonError(str(error), backend.TritonError.INVALID_ARG))
