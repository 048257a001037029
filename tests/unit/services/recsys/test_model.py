"""The model's arithmetic, on tables small enough to be made in a test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from services.recsys.model import Dlrm, default_threads, loaded, seeded
from tests.unit.services.recsys.small_model import TABLE_ROWS, random_rows


def test_it_has_as_many_parameters_as_the_benchmarks_model() -> None:
    assert sum(parameter.numel() for parameter in Dlrm().parameters()) == 166_567_745


@pytest.fixture
def small(small_tables: None) -> Dlrm:
    return seeded()


def test_scores_are_those_of_the_definition(small: Dlrm) -> None:
    dense, sparse = random_rows(50)
    [found] = small.score([(dense, sparse)])
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


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 600), min_size=1, max_size=6))
def test_any_split_of_rows_into_blocks_scores_alike(small: Dlrm, sizes: list[int]) -> None:
    dense, sparse = random_rows(sum(sizes))
    [whole] = small.score([(dense, sparse)])
    cuts = np.cumsum(sizes)[:-1]
    parts = small.score(list(zip(np.split(dense, cuts), np.split(sparse, cuts), strict=True)))
    assert [len(part) for part in parts] == sizes
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-6)


def test_a_seed_and_a_file_always_make_the_same_weights(small: Dlrm, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(small.state_dict(), path)
    assert small.embeddings.shape == (26, TABLE_ROWS, 64)
    for again in (seeded(), loaded(str(path))):
        for (name, tensor), same in zip(small.state_dict().items(), again.state_dict().values(), strict=True):
            assert torch.equal(tensor, same), name
    wrong = dict(small.state_dict())
    wrong["emb.0"] = wrong.pop("bottom.0.bias")
    save_file(wrong, path)
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"bottom.0.bias".*Unexpected key.*"emb.0"'):
        loaded(str(path))


@pytest.mark.parametrize(
    ("limit", "threads"), [(None, 8), ("max 100000", 8), ("150000 100000", 1), ("250000 100000", 2)]
)
def test_threads_stay_within_the_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, threads: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    path = tmp_path / "cpu.max"
    if limit is not None:
        path.write_text(f"{limit}\n")
    assert default_threads(path) == threads
