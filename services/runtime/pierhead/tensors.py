"""Tensors as protobuf carries them: dtype, shape and packed little-endian bytes. Only arrays need numpy.

    check("dense", request.dense, FLOAT32, (None, 13))
    dense = to_numpy(request.dense)
    return RankReply(scores=from_numpy(scores))

Between replicas of one machine that share memory (x-serve.shared_memory), `from_numpy` writes large content there, and
`to_numpy` returns a view of it: one copy in all. `Tensor.data` is then empty.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pierhead.errors import BadRequest, ContentGone
from pierhead.memory import process
from pierhead.tensor.v1.tensor_pb2 import SharedContent, Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

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

_CODES: Final[dict[DType, str]] = {
    FLOAT32: "<f4",
    FLOAT64: "<f8",
    INT32: "<i4",
    INT64: "<i8",
    BOOL: "|b1",
    UINT8: "|u1",
    FLOAT16: "<f2",
    BFLOAT16: "<u2",
}
"""numpy's names; it has no bfloat16, whose bits it gets."""

_BY_CODE: Final[dict[str, DType]] = {code: dtype for dtype, code in _CODES.items() if dtype != BFLOAT16}

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


def from_numpy(array: npt.NDArray[Any], *, dtype: DType | None = None) -> Tensor:
    """Pack an array, whose content is copied now: it may change afterwards. It need not be contiguous.

    `dtype`: BFLOAT16 for an array of uint16 with the bits of such numbers; None = the array's own.
    In shared memory the content stays until the request being served has ended: sending the tensor later raises
    ContentGone. Code outside of any request packs bytes.
    Raises TypeError for an array that no tensor can hold.
    """
    import numpy as np

    code = array.dtype.newbyteorder("<").str
    known = _BY_CODE.get(code) if dtype is None else dtype
    if known is None or _CODES.get(known) != code:
        names = ", ".join(dtype_name(each) for each in _BY_CODE.values())
        raise TypeError(f"from_numpy: expected an array of one of {names}, or uint16 as bfloat16, found {array.dtype}")
    memory = process.MEMORY
    if memory is not None and array.nbytes >= memory.threshold:
        caller = sys._getframe(1)
        filled = memory.fill(array.nbytes, (caller.f_code, caller.f_lasti))
        if filled is not None:
            region, room = filled
            np.copyto(np.frombuffer(room, code).reshape(array.shape), array)
            shared = SharedContent(region=region.name, generation=region.generation, length=array.nbytes)
            return Tensor(dtype=known, shape=array.shape, shared=shared)
    return Tensor(dtype=known, shape=array.shape, data=array.astype(code, copy=False).tobytes())


def to_numpy(tensor: Tensor, *, field: str = "tensor") -> npt.NDArray[Any]:
    """The tensor as a read-only array, without a copy of shared content: that stays as long as any such array does.

    Of a request it can be called until the request has ended, of a reply until the caller's own has, and of an item of
    a stream, too, but once: keep the array. Numbers of type bfloat16 come as their bits, in uint16.
    Raises BadRequest naming `field` when dtype, shape and size do not fit, ContentGone.
    """
    import numpy as np

    shape = tuple(tensor.shape)
    _check_size(field, tensor.dtype, shape, _nbytes(tensor))
    code = _CODES[tensor.dtype]
    if not tensor.HasField("shared"):
        return np.frombuffer(tensor.data, code).reshape(shape)
    memory = process.MEMORY
    if memory is None:
        raise ContentGone(f"{field}: its content is in shared memory, and this process shares none")
    return np.asarray(memory.content(tensor.shared).read()).view(code).reshape(shape)


def _nbytes(tensor: Tensor) -> int:
    return tensor.shared.length if tensor.HasField("shared") else len(tensor.data)


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
    _check_size(field, dtype, found, _nbytes(tensor))
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
