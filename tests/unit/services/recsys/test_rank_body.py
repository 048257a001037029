"""What `POST /recsys/rank` says of a wrong body, word for word."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead import BadRequest

from services.recsys.ingress.rank_body import parse_rank_body

FORM = 'an object {"dense": [[13 numbers], ...], "sparse": [[26 integers], ...]}'
NO_JSON = f"body: expected JSON, {FORM}, found text that is not JSON"
FLOAT32 = "a number that float32 can hold (at most 3.402823e+38 either way)"
DENSE_ROW: list[Any] = [0.5] * 13
SPARSE_ROW: list[Any] = list(range(26))


def body(dense: Any = None, sparse: Any = None, **more: Any) -> bytes:
    fields = {
        "dense": [DENSE_ROW] if dense is None else dense,
        "sparse": [SPARSE_ROW] if sparse is None else sparse,
    }
    return json.dumps(fields | more).encode()


def dense_with(value: Any) -> list[list[Any]]:
    return [[*DENSE_ROW[:4], value, *DENSE_ROW[5:]]]


def sparse_with(value: Any) -> list[list[Any]]:
    return [[*SPARSE_ROW[:4], value, *SPARSE_ROW[5:]]]


def test_rows_become_arrays() -> None:
    dense, sparse = parse_rank_body(body([DENSE_ROW, *dense_with(3)], [SPARSE_ROW, *sparse_with(99_999)]))
    assert (dense.shape, dense.dtype.name) == ((2, 13), "float32")
    assert (sparse.shape, sparse.dtype.name) == ((2, 26), "int64")
    assert (dense[1, 4], sparse[1, 4]) == (3, 99_999)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (body(dense=[DENSE_ROW] * 3 + [DENSE_ROW[:12]]), "dense[3]: expected 13 numbers, found 12"),
        (body(sparse=[SPARSE_ROW, []]), "sparse[1]: expected 26 integers, found 0"),
        (body(dense=[]), "dense: expected 1 to 4096 rows, found 0"),
        (body(dense=[DENSE_ROW] * 4097), "dense: expected 1 to 4096 rows, found 4097"),
        (body(sparse=[SPARSE_ROW] * 2), "sparse: expected as many rows as dense, 1, found 2"),
        (body(dense=DENSE_ROW), "dense[0]: expected a list of 13 numbers, found 0.5"),
        (body(sparse=7), "sparse: expected a list of rows of 26 integers, found 7"),
        (body(dense=dense_with("1")), 'dense[0][4]: expected a number, found "1"'),
        (body(dense=dense_with("x" * 100)), f'dense[0][4]: expected a number, found "{"x" * 39}...'),
        (body(dense=dense_with(float("nan"))), "dense[0][4]: expected a finite number, found NaN"),
        (body(dense=dense_with(1e39)), f"dense[0][4]: expected {FLOAT32}, found 1e+39"),
        (body(dense=dense_with(10**400)), f"dense[0][4]: expected {FLOAT32}, found an integer of more than 38 digits"),
        (body(sparse=sparse_with(100_000)), "sparse[0][4]: expected an integer from 0 to 99999, found 100000"),
        (body(sparse=sparse_with(-1)), "sparse[0][4]: expected an integer from 0 to 99999, found -1"),
        (body(sparse=sparse_with(3.0)), "sparse[0][4]: expected an integer from 0 to 99999, found 3.0"),
        (body(weights=[]), f"weights: unknown field; expected {FORM}"),
        (b"[]", f"body: expected {FORM}, found a list of 0"),
        (b"{}", f"dense: missing; expected {FORM}"),
        (b"", f"{NO_JSON}: Expecting value: line 1 column 1 (char 0)"),
        (b"\xff", f"{NO_JSON}: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"[" * 100_000, f"body: expected {FORM}, found JSON that is nested too deeply"),
    ],
)
def test_a_wrong_body_gets_one_message(wrong: bytes, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_rank_body(wrong)
    assert str(caught.value) == message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(("dense", "sparse", "x")), inner),
    max_leaves=20,
)


@given(json_values)
def test_any_json_is_either_parsed_or_refused(value: Any) -> None:
    with pytest.raises(BadRequest, match=r"^[^:]+: "):
        parse_rank_body(json.dumps(value).encode())


@given(st.integers(0, 12), json_values)
def test_any_value_within_a_row_is_a_float32_or_refused_by_its_place(column: int, value: Any) -> None:
    row = [*DENSE_ROW]
    row[column] = value
    try:
        dense, _ = parse_rank_body(body(dense=[row]))
    except BadRequest as error:
        assert str(error).startswith(f"dense[0][{column}]: expected a ")  # noqa: PT017 - either outcome is right
    else:
        assert np.isfinite(dense).all()
        assert dense[0, column] == np.float32(value)
