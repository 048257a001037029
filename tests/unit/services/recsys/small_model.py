"""A model with tables of 50 rows: everything else is as large as ever."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

TABLE_ROWS: Final = 50


def random_rows(rows: int, seed: int = 1) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    dense = random.uniform(-1, 1, (rows, 13)).astype(np.float32)
    return dense, random.integers(0, TABLE_ROWS, (rows, 26), dtype=np.int64)
