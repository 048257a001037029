from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead import BadRequest
from pierhead.tensor.v1.tensor_pb2 import Tensor
from pierhead.tensors import BFLOAT16, FLOAT32, INT64, ITEM_BYTES, check, to_proto


@given(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=4))
def test_every_dtype_and_shape_passes_when_data_fits(dtype: Tensor.DType.ValueType, shape: list[int]) -> None:
    data = Random(7).randbytes(math.prod(shape) * ITEM_BYTES[dtype])
    for packed in (data, bytearray(data), memoryview(data)):
        tensor = to_proto(dtype, shape, packed)
        assert tensor.data == data
    assert check("x", tensor, dtype, shape) == tuple(shape)
    assert check("x", tensor, dtype, [None] * len(shape)) == tuple(shape)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (to_proto(FLOAT32, (1, 12), bytes(48)), "dense: expected float32 [*, 13], found float32 [1, 12]"),
        (to_proto(FLOAT32, (13,), bytes(52)), "dense: expected float32 [*, 13], found float32 [13]"),
        (to_proto(INT64, (1, 13), bytes(104)), "dense: expected float32 [*, 13], found int64 [1, 13]"),
        (Tensor(), "dense: expected float32 [*, 13], found dtype_unspecified []"),
        (
            Tensor(dtype=FLOAT32, shape=[1, 13], data=bytes(51)),
            "dense: expected 52 bytes of data for float32 [1, 13], found 51 bytes",
        ),
        (Tensor(dtype=FLOAT32, shape=[-1, 13], data=b""), "dense: expected float32 [*, 13], found float32 [-1, 13]"),
    ],
)
def test_what_does_not_fit_is_named(tensor: Tensor, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check("dense", tensor, FLOAT32, (None, 13))
    assert str(caught.value) == message


def test_a_shape_of_a_million_dimensions_makes_no_long_message() -> None:
    tensor = Tensor(dtype=FLOAT32, shape=[1] * 3_000_000)
    with pytest.raises(BadRequest) as caught:
        check("dense", tensor, FLOAT32, (None, 13))
    assert str(caught.value) == (
        "dense: expected float32 [*, 13], found float32 [1, 1, 1, 1, 1, 1, 1, 1, ... 3000000 dimensions]"
    )


def test_a_dtype_of_the_future_is_refused_not_guessed() -> None:
    tensor = Tensor(shape=[1], data=b"1")
    tensor.MergeFromString(b"\x08\x2a")  # dtype = 42
    with pytest.raises(BadRequest, match="found dtype 42"):
        check("x", tensor, FLOAT32, (1,))


def test_packing_refuses_data_of_the_wrong_length() -> None:
    with pytest.raises(BadRequest, match=r"scores: expected 4 bytes of data for bfloat16 \[2\], found 3 bytes"):
        to_proto(BFLOAT16, (2,), b"123", field="scores")
