"""Tensors as protobuf carries them: dtype, shape and packed little-endian bytes. Needs no numpy.

With numpy a service reads and creates arrays without copying the numbers:

    rows, _ = check("dense", request.dense, FLOAT32, (None, 13))
    dense = np.frombuffer(request.dense.data, "<f4").reshape(rows, 13)
    reply = RankReply(scores=to_proto(FLOAT32, scores.shape, scores.tobytes()))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

from pierhead.errors import BadRequest
from pierhead.tensor.v1.tensor_pb2 import Tensor

DType: TypeAlias = "Tensor.DType.ValueType"

FLOAT32: Final = Tensor.FLOAT32
FLOAT64: Final = Tensor.FLOAT64
INT32: Final = Tensor.INT32
INT64: Final = Tensor.INT64
BOOL: Final = Tensor.BOOL
UINT8: Final = Tensor.UINT8
FLOAT16: Final = Tensor.FLOAT16
BFLOAT16: Final = Tensor.BFLOAT16

ITEM_BYTES: Final[dict[DType, int]] = {
    FLOAT32: 4,
    FLOAT64: 8,
    INT32: 4,
    INT64: 8,
    BOOL: 1,
    UINT8: 1,
    FLOAT16: 2,
    BFLOAT16: 2,
}
"""Bytes that one element takes in `Tensor.data`."""

SPELT_DIMENSIONS: Final = 8
"""Dimensions that a message lists."""


def to_proto(
    dtype: DType, shape: Sequence[int], data: bytes | bytearray | memoryview, *, field: str = "tensor"
) -> Tensor:
    """Pack a tensor: `data` is row-major and little-endian, exactly product(shape) elements of `dtype`.

    Raises BadRequest naming `field` when the three do not fit each other.
    """
    _check_size(field, dtype, shape, memoryview(data).nbytes)
    return Tensor(dtype=dtype, shape=shape, data=data if isinstance(data, bytes) else bytes(data))


def check(field: str, tensor: Tensor, dtype: DType, shape: Sequence[int | None]) -> tuple[int, ...]:
    """Check a received tensor and return its dimensions; None in `shape` allows any length there.

    Raises BadRequest that names the field, what was found and what was expected. Does not look at the elements: the
    service checks whether numbers are finite or in range.
    """
    # The number of dimensions comes first: a message may hold millions of them.
    fits = tensor.dtype == dtype and len(tensor.shape) == len(shape)
    if not fits or not all(
        length >= 0 and expected in (None, length) for length, expected in zip(tensor.shape, shape, strict=True)
    ):
        raise BadRequest(f"{field}: expected {spell(dtype, shape)}, found {spell(tensor.dtype, tensor.shape)}")
    found = tuple(tensor.shape)
    _check_size(field, dtype, found, len(tensor.data))
    return found


def spell(dtype: DType, shape: Sequence[int | None]) -> str:
    """A dtype and shape for messages: `float32 [*, 13]`; of very many dimensions the first ones and their number."""
    dimensions = ", ".join("*" if length is None else str(length) for length in shape[:SPELT_DIMENSIONS])
    if len(shape) > SPELT_DIMENSIONS:
        dimensions += f", ... {len(shape)} dimensions"
    return f"{dtype_name(dtype)} [{dimensions}]"


def dtype_name(dtype: DType) -> str:
    """`float32`, `int64`, ...; numbers that this version does not know as `dtype 42`."""
    known = Tensor.DType.DESCRIPTOR.values_by_number.get(dtype)
    return str(known.name).lower() if known is not None else f"dtype {dtype}"


def _check_size(field: str, dtype: DType, shape: Sequence[int], nbytes: int) -> None:
    item = ITEM_BYTES.get(dtype)
    if item is None:
        names = ", ".join(dtype_name(known) for known in ITEM_BYTES)
        raise BadRequest(f"{field}: expected one of {names}, found {dtype_name(dtype)}")
    if any(length < 0 for length in shape):
        raise BadRequest(f"{field}: expected dimensions >= 0, found {spell(dtype, shape)}")
    expected = math.prod(shape) * item
    if nbytes != expected:
        raise BadRequest(f"{field}: expected {expected} bytes of data for {spell(dtype, shape)}, found {nbytes} bytes")
