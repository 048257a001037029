"""Candidates for a user: 32 rows made from the user id alone, the same in every process and on every platform."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from services.recsys.schema import DENSE_FEATURES, SPARSE_FEATURES, TABLE_ROWS

CANDIDATES: Final = 32
MAX_USER_ID: Final = 2**63 - 1

# SplitMix64 (Steele, Lea, Flood 2014): output k of a seed is a hash of seed + k * GAMMA, so all of them are computed at
# once. numpy's own generators promise no stable streams between versions.
_GAMMA: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_NUMBERS: Final = CANDIDATES * (DENSE_FEATURES + SPARSE_FEATURES)
_STEPS: Final = np.arange(1, _NUMBERS + 1, dtype=np.uint64) * np.uint64(_GAMMA)
_DENSE_NUMBERS: Final = CANDIDATES * DENSE_FEATURES


def candidates(user_id: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Make dense float32 [32, 13] in [-1, 1) and sparse int64 [32, 26] of a user, 0 <= user_id <= MAX_USER_ID."""
    bits = _STEPS + np.uint64(_spread(user_id))
    bits ^= bits >> np.uint64(30)
    bits *= _MIX_1
    bits ^= bits >> np.uint64(27)
    bits *= _MIX_2
    bits ^= bits >> np.uint64(31)
    # 24 bits fit a float32 exactly: no rounding that could differ between platforms.
    dense = (bits[:_DENSE_NUMBERS] >> np.uint64(40)).astype(np.float32)
    dense *= np.float32(2.0**-23)
    dense -= np.float32(1.0)
    sparse = (bits[_DENSE_NUMBERS:] % np.uint64(TABLE_ROWS)).astype(np.int64)
    return dense.reshape(CANDIDATES, DENSE_FEATURES), sparse.reshape(CANDIDATES, SPARSE_FEATURES)


def _spread(user_id: int) -> int:
    """Put neighbouring ids far apart: without it the numbers of user n + 1 could be those of user n, moved."""
    return (user_id ^ (user_id << 32) ^ 0x5851F42D4C957F2D) * 0xD1342543DE82EF95 & (2**64 - 1)
