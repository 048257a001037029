"""The model that Triton runs, called as Triton's Python backend calls it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.recsys.model import seeded
from tests.unit.services.recsys.small_model import random_rows


@dataclass
class Tensor:
    name: str
    array: Any

    def as_numpy(self) -> Any:
        return self.array


@dataclass
class Response:
    tensors: Any = ()
    error: Any = None


class TritonError(Exception):
    INVALID_ARG = "invalid"


BACKEND = SimpleNamespace(
    Tensor=Tensor,
    InferenceResponse=Response,
    TritonError=TritonError,
    get_input_tensor_by_name=lambda request, name: Tensor(name, request[name]),
)


@pytest.fixture
def model(small_tables: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", BACKEND)
    made = importlib.import_module("services.recsys.triton.model").TritonPythonModel()
    monkeypatch.setattr("os.getppid", lambda: 0)  # no server: the watcher must have nothing to end
    config = {"parameters": {"threads": {"string_value": "1"}}}
    made.initialize({"model_config": json.dumps(config), "model_instance_kind": "CPU", "model_instance_device_id": "0"})
    yield made
    made.finalize()
    sys.modules.pop("services.recsys.triton.model")


def test_a_batch_is_scored_as_the_ranker_does_and_a_bad_request_fails_alone(model: Any) -> None:
    requests: list[dict[str, Any]] = [
        dict(zip(("dense", "sparse"), random_rows(rows, rows), strict=True)) for rows in (3, 2, 1, 1)
    ]
    requests[1]["sparse"][1, 4] = -1
    requests[2]["dense"][:] = 3e38 * np.array([1, -1] * 6 + [1], np.float32)
    first, bad_id, too_large, last = model.execute(requests)
    for request, response in ((requests[0], first), (requests[3], last)):
        [expected] = seeded().score([(request["dense"], request["sparse"])])
        (scores,) = response.tensors
        assert scores.name == "scores"
        np.testing.assert_allclose(scores.array, expected.reshape(-1, 1), atol=1e-5)
    assert bad_id.error.args == ("sparse: expected ids from 0 to 99999", "invalid")
    assert "dense: expected numbers from" in str(too_large.error)
    assert [response.error for response in model.execute(requests[1:2])] != [None]
