"""The rows that are made of a user's id, and what makes rows acceptable."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.recsys.rows import candidates, checked

DIGEST_OF_USER_7 = "cf249cd24c1dbe8ed77aecc3a4b5dcc680dbf69fb2e96a50f869ec0ac70de20a"


def test_the_rows_of_a_user_never_change() -> None:
    dense, sparse = candidates(7)
    assert (
        hashlib.sha256(dense.astype("<f4").tobytes() + sparse.astype("<i8").tobytes()).hexdigest() == DIGEST_OF_USER_7
    )


@given(st.integers())
def test_rows_have_the_models_shape_and_bounds(user_id: int) -> None:
    dense, sparse = candidates(user_id)
    assert (dense.shape, dense.dtype.name) == ((32, 13), "float32")
    assert (sparse.shape, sparse.dtype.name) == ((32, 26), "int64")
    assert dense.min() >= -1
    assert dense.max() < 1
    checked(dense, sparse)


def with_dense(value: float) -> Any:
    dense = np.zeros((3, 13), np.float32)
    dense[2, 12] = value
    return dense


def with_sparse(value: int) -> Any:
    sparse = np.zeros((3, 26), np.int64)
    sparse[1, 25] = value
    return sparse


@pytest.mark.parametrize("rows", [0, 4097])
def test_the_number_of_rows_has_bounds(rows: int) -> None:
    with pytest.raises(ValueError, match=rf"of 1 to 4096 rows, found dense \[{rows}, 13\] and sparse \[{rows}, 26\]$"):
        checked(np.zeros((rows, 13), np.float32), np.zeros((rows, 26), np.int64))


@pytest.mark.parametrize(
    ("dense", "sparse", "message"),
    [
        (with_dense(0)[:2], with_sparse(0), r"found dense \[2, 13\] and sparse \[3, 26\]$"),
        (with_dense(0)[:, 1:], with_sparse(0), r"found dense \[3, 12\] and sparse \[3, 26\]$"),
        (with_dense(0), with_sparse(0)[0], r"found dense \[3, 13\] and sparse \[26\]$"),
        (with_dense(0), np.int64(3), r"found dense \[3, 13\] and sparse \[\]$"),
        (with_dense(float("nan")), with_sparse(0), r"^dense: expected numbers from -1e\+06 to 1e\+06$"),
        (with_dense(-3e38), with_sparse(0), r"^dense: expected numbers from -1e\+06 to 1e\+06$"),
        (with_dense(0), with_sparse(100_000), r"^sparse: expected ids from 0 to 99999$"),
        (with_dense(0), with_sparse(-1), r"^sparse: expected ids from 0 to 99999$"),
    ],
)
def test_wrong_rows_are_refused(dense: Any, sparse: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(dense, sparse)
