from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.recsys.ranker.weights import WeightsError, load_weights, seeded_weights
from tests.unit.services.ranker.small_model import random_rows

pytestmark = pytest.mark.usefixtures("small_tables")


def parameters() -> dict[str, Tensor]:
    return dict(seeded_weights(seed=5).state_dict())


def test_a_file_makes_the_model_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(parameters(), path)
    dense, sparse = (torch.from_numpy(array) for array in random_rows(10))
    with torch.inference_mode():
        found, expected = load_weights(path)(dense, sparse), seeded_weights(seed=5)(dense, sparse)
    torch.testing.assert_close(found, expected)  # not equal to the bit: what is mapped is aligned differently


def test_one_error_names_everything_wrong_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    wrong = parameters()
    del wrong["bottom.0.bias"]
    wrong["top.0.weight"] = torch.zeros(256, 414)
    wrong["top.1.weight"] = wrong["top.1.weight"].to(torch.float16)
    wrong["emb.0"] = torch.zeros(1)
    save_file(wrong, path)
    with pytest.raises(WeightsError) as caught:
        load_weights(path)
    assert str(caught.value).splitlines() == [
        f"{path} does not hold this model's weights:",
        "bottom.0.bias: expected F32 [256], found nothing of that name",
        "top.0.weight: expected F32 [256, 415], found F32 [256, 414]",
        "top.1.weight: expected F32 [128, 256], found F16 [128, 256]",
        "emb.0: expected no tensor of that name",
    ]


@pytest.mark.parametrize("content", [None, b"", b"not safetensors at all"], ids=["a directory", "empty", "text"])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "weights.safetensors"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        load_weights(path)
    message = str(caught.value)
    assert message.startswith(f"{path} cannot be read as a safetensors file: ")
    assert "PIERHEAD_RANKER_WEIGHTS must name one inside the container" in message
