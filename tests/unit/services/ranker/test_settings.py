from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pierhead.errors import SettingsError

from services.recsys.ranker.settings import RankerSettings, default_threads


def test_nothing_set_means_the_seed_and_whatever_there_is() -> None:
    settings = RankerSettings.from_env({"PIERHEAD_RANKER_WEIGHTS": "", "PIERHEAD_TORCH_THREADS": " "})
    assert settings.weights is None
    assert settings.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert settings.threads >= 1


def test_values_are_taken(tmp_path: Path) -> None:
    weights = tmp_path / "ranker.safetensors"
    weights.touch()
    settings = RankerSettings.from_env(
        {
            "PIERHEAD_RANKER_WEIGHTS": f" {weights}",
            "PIERHEAD_RANKER_DEVICE": "cpu",
            "PIERHEAD_TORCH_THREADS": "3",
        }
    )
    assert settings == RankerSettings(weights, torch.device("cpu"), 3)


def test_all_that_is_wrong_is_told_at_once() -> None:
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


def test_a_gpu_that_is_asked_for_and_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(SettingsError, match="expected a GPU, found none: PyTorch finds no GPU"):
        RankerSettings.from_env({"PIERHEAD_RANKER_DEVICE": "cuda"})
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SettingsError, match="this image holds a CPU build of PyTorch"):
        RankerSettings.from_env({"PIERHEAD_RANKER_DEVICE": "cuda"})


@pytest.mark.parametrize(
    ("cpu_max", "cpus"),
    [("max 100000", 8), ("150000 100000", 1), ("50000 100000", 1), ("400000 100000", 4), ("6400000 100000", 16)],
)
def test_threads_stay_within_the_containers_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_max: str, cpus: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    (tmp_path / "cpu.max").write_text(f"{cpu_max}\n")
    assert default_threads(tmp_path) == cpus


def test_the_quota_of_cgroups_version_1_counts_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert default_threads(tmp_path) == 8
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, cpus in (("-1", 8), ("250000", 2)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert default_threads(tmp_path) == cpus
