"""The rows that the model scores: what they may hold, and those that are made of a user's id."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Dense: TypeAlias = npt.NDArray[np.float32]
Sparse: TypeAlias = npt.NDArray[np.int64]
Scores: TypeAlias = npt.NDArray[np.float32]
Rows: TypeAlias = tuple[Dense, Sparse]

DENSE_FEATURES, SPARSE_FEATURES = 13, 26
TABLE_ROWS = 100_000  # an id is less
MAX_ROWS = 4096  # of one request: 1 MiB on the wire
MAX_DENSE = 1e6  # either way: the model computes with it in float32

CANDIDATES = 32
# SplitMix64 (Steele, Lea, Flood 2014): output k of a seed is a hash of seed + k * GAMMA, so all are computed at once.
GAMMA, MIX_1, MIX_2 = (np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
DENSE_NUMBERS, NUMBERS = CANDIDATES * DENSE_FEATURES, CANDIDATES * (DENSE_FEATURES + SPARSE_FEATURES)
STEPS = np.arange(1, NUMBERS + 1, dtype=np.uint64) * GAMMA


def checked(dense: Dense, sparse: Sparse) -> Rows:
    """The rows of one request. Raises ValueError."""
    rows = len(sparse) if sparse.ndim else 0
    if dense.shape != (rows, DENSE_FEATURES) or sparse.shape != (rows, SPARSE_FEATURES) or not 1 <= rows <= MAX_ROWS:
        raise ValueError(
            f"expected dense [rows, {DENSE_FEATURES}] and sparse [rows, {SPARSE_FEATURES}] of 1 to {MAX_ROWS} rows, "
            f"found dense {list(dense.shape)} and sparse {list(sparse.shape)}"
        )
    if not np.abs(dense).max() <= MAX_DENSE:  # so for NaN, too
        raise ValueError(f"dense: expected numbers from {-MAX_DENSE:g} to {MAX_DENSE:g}")
    if sparse.view("<u8").max() >= TABLE_ROWS:  # seen as unsigned, a negative id is a huge one
        raise ValueError(f"sparse: expected ids from 0 to {TABLE_ROWS - 1}")
    return dense, sparse


def candidates(user_id: int) -> Rows:
    """Dense [32, 13] in [-1, 1) and sparse [32, 26], the same in every process and on every platform."""
    # Neighbouring ids are put far apart: else the numbers of user n + 1 could be those of user n, moved.
    bits = STEPS + np.uint64((user_id ^ (user_id << 32) ^ 0x5851F42D4C957F2D) * 0xD1342543DE82EF95 & (2**64 - 1))
    bits = (bits ^ (bits >> np.uint64(30))) * MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * MIX_2
    bits ^= bits >> np.uint64(31)
    # 24 bits fit a float32 exactly: no rounding that could differ between platforms.
    dense = (bits[:DENSE_NUMBERS] >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    sparse = (bits[DENSE_NUMBERS:] % np.uint64(TABLE_ROWS)).astype(np.int64)
    return dense.reshape(CANDIDATES, DENSE_FEATURES), sparse.reshape(CANDIDATES, SPARSE_FEATURES)
