from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from services.recsys.ingress.candidates import MAX_USER_ID, candidates

DIGEST_OF_USER_7 = "cf249cd24c1dbe8ed77aecc3a4b5dcc680dbf69fb2e96a50f869ec0ac70de20a"


def digest(user_id: int) -> str:
    dense, sparse = candidates(user_id)
    return hashlib.sha256(dense.astype("<f4").tobytes() + sparse.astype("<i8").tobytes()).hexdigest()


def test_the_rows_of_a_user_never_change() -> None:
    assert digest(7) == DIGEST_OF_USER_7


@given(st.integers(0, MAX_USER_ID))
def test_rows_have_the_models_shape_and_bounds(user_id: int) -> None:
    dense, sparse = candidates(user_id)
    assert (dense.shape, dense.dtype.name) == ((32, 13), "float32")
    assert (sparse.shape, sparse.dtype.name) == ((32, 26), "int64")
    assert dense.min() >= -1
    assert dense.max() < 1
    assert sparse.min() >= 0
    assert sparse.max() < 100_000
