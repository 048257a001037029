"""The rows of a request, and what makes rows and scores acceptable. Knows nothing of how they arrive."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from services.recsys.schema import MAX_ROWS, TABLE_ROWS

MAX_BATCH_ROWS: Final = MAX_ROWS
"""As many as the largest single request, so that no batch ever exceeds the scorer's buffers."""

_UNSIGNED_TABLE_ROWS: Final = np.uint64(TABLE_ROWS)


class Rows(NamedTuple):
    """The rows of one request; views into its message, never written to."""

    dense: npt.NDArray[np.float32]
    """[rows, 13]"""
    sparse: npt.NDArray[np.int64]
    """[rows, 26]"""


def checked_rows(dense: npt.NDArray[np.float32], sparse: npt.NDArray[np.int64]) -> Rows:
    """Check arrays of the right types and widths. Raises ValueError: field, expected, found."""
    if not 1 <= len(dense) <= MAX_ROWS:
        raise ValueError(f"dense: expected 1 to {MAX_ROWS} rows, found {len(dense)}")
    if len(sparse) != len(dense):
        raise ValueError(f"sparse: expected as many rows as dense, {len(dense)}, found {len(sparse)}")
    finite = np.isfinite(dense)
    if not finite.all():
        row, column = _first(~finite)
        raise ValueError(f"dense[{row}][{column}]: expected a finite number, found {dense[row, column]}")
    # Seen as unsigned, a negative id is a huge one: one pass finds both ends of the range.
    if sparse.view("<u8").max() >= _UNSIGNED_TABLE_ROWS:
        row, column = _first((sparse < 0) | (sparse >= TABLE_ROWS))
        raise ValueError(
            f"sparse[{row}][{column}]: expected an id from 0 to {TABLE_ROWS - 1}, found {sparse[row, column]}"
        )
    return Rows(dense, sparse)


def _first(wrong: npt.NDArray[np.bool_]) -> tuple[int, int]:
    row, column = np.unravel_index(wrong.argmax(), wrong.shape)
    return int(row), int(column)


def check_scores(scores: npt.NDArray[np.float32], dense: npt.NDArray[np.float32]) -> None:
    """Refuse finite features whose products are not: the model makes NaN of them. Raises ValueError."""
    unknown = np.isnan(scores)
    if unknown.any():
        row = int(unknown.argmax())
        raise ValueError(
            f"dense[{row}]: expected numbers that the model can compute with in float32, found some up to "
            f"{np.abs(dense[row]).max():g} either way: the row's score is not a number"
        )
