from __future__ import annotations

import pytest

from services.recsys import model
from tests.unit.services.recsys.small_model import TABLE_ROWS


@pytest.fixture
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models made in this test have tables of 50 rows instead of 100,000 (0.3 MB instead of 666)."""
    monkeypatch.setattr(model, "TABLE_ROWS", TABLE_ROWS)
    monkeypatch.setenv("PIERHEAD_TORCH_THREADS", "1")
    monkeypatch.setenv("PIERHEAD_RANKER_DEVICE", "cpu")
