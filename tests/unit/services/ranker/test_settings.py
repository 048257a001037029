from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pierhead.errors import SettingsError

from services.recsys.ranker.settings import RankerSettings
from services.recsys.ranker.threads import default_threads


def test_nothing_set_means_the_seed_and_whatever_there_is() -> None:
    settings = RankerSettings.from_env({"PIERHEAD_RANKER_WEIGHTS": "", "PIERHEAD_TORCH_THREADS": " "})
    assert settings.weights is None
    assert settings.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert settings.threads >= 1


def test_one_error_names_all_that_is_wrong() -> None:
    with pytest.raises(SettingsError) as caught:
        RankerSettings.from_env(
            {
                "PIERHEAD_RANKER_WEIGHTS": "/nowhere",
                "PIERHEAD_RANKER_DEVICE": "tpu",
                "PIERHEAD_TORCH_THREADS": "0",
            }
        )
    assert str(caught.value).splitlines() == [
        (
            "PIERHEAD_RANKER_WEIGHTS: expected a safetensors file inside the container, found none at /nowhere; mount "
            "it with `volumes`, or leave the variable out for weights from a fixed seed"
        ),
        'PIERHEAD_RANKER_DEVICE: expected auto, cpu or cuda, found "tpu"',
        'PIERHEAD_TORCH_THREADS: expected an integer >= 1, found "0"',
    ]


def test_a_missing_gpu_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(SettingsError, match="expected a GPU, found none: PyTorch finds no GPU"):
        RankerSettings.from_env({"PIERHEAD_RANKER_DEVICE": "cuda"})
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SettingsError, match="this image holds a CPU build of PyTorch"):
        RankerSettings.from_env({"PIERHEAD_RANKER_DEVICE": "cuda"})


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "150000 100000"}, 1),
        ({"cpu.max": "6400000 100000"}, 16),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
)
def test_threads_stay_within_the_quota_of_the_containers_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], threads: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    assert default_threads(tmp_path) == threads
