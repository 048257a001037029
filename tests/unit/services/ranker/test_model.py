"""The model's arithmetic, on tables small enough to be made in a test."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.recsys.ranker.model import Dlrm
from services.recsys.ranker.weights import seeded_weights
from tests.unit.services.ranker.small_model import TABLE_ROWS, random_rows


def test_it_has_as_many_parameters_as_the_benchmarks_model() -> None:
    model = Dlrm()
    assert all(parameter.is_meta for parameter in model.parameters()), "a new model takes no memory"
    assert sum(parameter.numel() for parameter in model.parameters()) == 166_567_745


@pytest.fixture
def small(small_tables: None) -> Dlrm:
    return seeded_weights()


def test_scores_are_those_of_the_definition(small: Dlrm) -> None:
    dense, sparse = random_rows(50)
    with torch.inference_mode():
        found = small(torch.from_numpy(dense), torch.from_numpy(sparse)).numpy()
    np.testing.assert_allclose(found, by_definition(small, dense, sparse), atol=1e-5)


def by_definition(model: Dlrm, dense: np.ndarray, sparse: np.ndarray) -> np.ndarray:
    """The model again, one row at a time, in numpy and float64."""
    parameters = {name: tensor.numpy().astype(np.float64) for name, tensor in model.state_dict().items()}

    def layers(name: str, values: np.ndarray, count: int) -> np.ndarray:
        for index in range(count):
            values = parameters[f"{name}.{index}.weight"] @ values + parameters[f"{name}.{index}.bias"]
            if (name, index) != ("top", 3):
                values = np.maximum(values, 0)
        return values

    scores = []
    for dense_row, ids in zip(dense, sparse, strict=True):
        hidden = layers("bottom", dense_row, 2)
        vectors = [hidden, *(parameters["embeddings"][table, id_] for table, id_ in enumerate(ids))]
        products = [vectors[i] @ vectors[j] for i in range(27) for j in range(i + 1, 27)]
        logit = layers("top", np.concatenate([hidden, products]), 4)[0]
        scores.append(1 / (1 + np.exp(-logit)))
    return np.array(scores)


@pytest.mark.usefixtures("small_tables")
def test_a_seed_always_makes_the_same_weights() -> None:
    one, again = seeded_weights(), seeded_weights()
    assert one.embeddings.shape == (26, TABLE_ROWS, 64)
    for (name, tensor), same in zip(one.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(tensor, same), name
