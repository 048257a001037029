"""The body of `POST /recsys/rank`: from JSON text to arrays, or one message that says where it is wrong.

A message is a path, what is expected there, and what was found: `dense[3]: expected 13 numbers, found 12`.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
from pierhead.errors import BadRequest

from services.recsys.schema import DENSE_FEATURES, MAX_ROWS, SPARSE_FEATURES, TABLE_ROWS

_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
_FORM: Final = 'an object {"dense": [[13 numbers], ...], "sparse": [[26 integers], ...]}'
_SHOWN: Final = 40
"""Characters of a wrong value that a message quotes."""


def parse_rank_body(body: bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Turn the body into dense float32 [rows, 13] and sparse int64 [rows, 26]; 1 to MAX_ROWS rows.

    Raises BadRequest for the first thing that is wrong.
    """
    fields = _fields(body)
    dense_rows = _rows("dense", fields["dense"], DENSE_FEATURES, "numbers")
    sparse_rows = _rows("sparse", fields["sparse"], SPARSE_FEATURES, "integers")
    if len(dense_rows) != len(sparse_rows):
        _refuse("sparse", f"as many rows as dense, {len(dense_rows)}", str(len(sparse_rows)))
    return _numbers(dense_rows), _ids(sparse_rows)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except ValueError as error:  # not JSON, or not UTF-8
        raise BadRequest(f"body: expected JSON, {_FORM}, found text that is not JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest(f"body: expected {_FORM}, found JSON that is nested too deeply") from error
    if not isinstance(fields, dict):
        _refuse("body", _FORM, _show(fields))
    for name in ("dense", "sparse"):
        if name not in fields:
            raise BadRequest(f"{name}: missing; expected {_FORM}")
    unknown = sorted(fields.keys() - {"dense", "sparse"})
    if unknown:
        raise BadRequest(f"{unknown[0][:_SHOWN]}: unknown field; expected {_FORM}")
    return fields


def _rows(name: str, rows: Any, width: int, kind: str) -> list[list[Any]]:
    """Check that `rows` is a list of 1 to MAX_ROWS lists of `width` values each."""
    if not isinstance(rows, list):
        _refuse(name, f"a list of rows of {width} {kind}", _show(rows))
    if not 1 <= len(rows) <= MAX_ROWS:
        _refuse(name, f"1 to {MAX_ROWS} rows", str(len(rows)))
    for index, row in enumerate(rows):
        if not isinstance(row, list):
            _refuse(f"{name}[{index}]", f"a list of {width} {kind}", _show(row))
        if len(row) != width:
            _refuse(f"{name}[{index}]", f"{width} {kind}", str(len(row)))
    return rows


def _numbers(rows: list[list[Any]]) -> npt.NDArray[np.float32]:
    # The types are asked for by exact class: to Python, true and false are integers as well.
    if all({*map(type, row)} <= {int, float} for row in rows):
        try:
            values = np.array(rows, dtype=np.float64)
        except OverflowError:
            pass  # an integer beyond float64: found again, with its place, below
        else:
            if np.abs(values).max() <= _FLOAT32_MAX:  # false for NaN
                return values.astype(np.float32)
    for row_index, row in enumerate(rows):
        for index, value in enumerate(row):
            _check_number(f"dense[{row_index}][{index}]", value)
    raise AssertionError("a row of numbers was refused as a whole and accepted one by one")


def _check_number(path: str, value: Any) -> None:
    if type(value) not in (int, float):
        _refuse(path, "a number", _show(value))
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(path, "a finite number", _show(value))
    if abs(value) > _FLOAT32_MAX:
        _refuse(path, f"a number that float32 can hold (at most {_FLOAT32_MAX:.7g} either way)", _show(value))


def _ids(rows: list[list[Any]]) -> npt.NDArray[np.int64]:
    if all({*map(type, row)} == {int} for row in rows):
        try:
            ids = np.array(rows, dtype=np.int64)
        except OverflowError:
            pass  # an integer beyond int64: found again, with its place, below
        else:
            if ids.min() >= 0 and ids.max() < TABLE_ROWS:
                return ids
    for row_index, row in enumerate(rows):
        for index, value in enumerate(row):
            if type(value) is not int or not 0 <= value < TABLE_ROWS:
                _refuse(f"sparse[{row_index}][{index}]", f"an integer from 0 to {TABLE_ROWS - 1}", _show(value))
    raise AssertionError("a row of ids was refused as a whole and accepted one by one")


def _show(value: Any) -> str:
    """A JSON value in a few characters: itself where it is short, else what kind of thing it is."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "an integer of more than 38 digits"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _refuse(path: str, expected: str, found: str) -> NoReturn:
    raise BadRequest(f"{path}: expected {expected}, found {found}")
