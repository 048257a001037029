"""Tensors as protobuf carries them: dtype, shape and packed little-endian bytes. Only arrays need numpy.

    check("dense", request.dense, FLOAT32, (None, 13))
    dense = to_numpy(request.dense)
    return RankReply(scores=from_numpy(scores))

Between replicas of one machine that share memory (x-serve.shared_memory), `from_numpy` writes large content there, and
`to_numpy` returns a view of it: one copy in all. `Tensor.data` is then empty.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from pierhead.errors import BadRequest
from pierhead.memory.arrays import ITEM_BYTES, DType, check_size, dtype_name, nbytes_of, read_array, spell, write_array
from pierhead.tensor.v1.tensor_pb2 import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "BFLOAT16",
    "BOOL",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "INT32",
    "INT64",
    "ITEM_BYTES",
    "UINT8",
    "DType",
    "check",
    "dtype_name",
    "from_numpy",
    "spell",
    "to_numpy",
    "to_proto",
]

FLOAT32: Final = Tensor.FLOAT32
FLOAT64: Final = Tensor.FLOAT64
INT32: Final = Tensor.INT32
INT64: Final = Tensor.INT64
BOOL: Final = Tensor.BOOL
UINT8: Final = Tensor.UINT8
FLOAT16: Final = Tensor.FLOAT16
BFLOAT16: Final = Tensor.BFLOAT16


def to_proto(
    dtype: DType, shape: Sequence[int], data: bytes | bytearray | memoryview, *, field: str = "tensor"
) -> Tensor:
    """Pack a tensor: `data` is row-major and little-endian, exactly product(shape) elements of `dtype`.

    Raises BadRequest naming `field` when the three do not fit each other.
    """
    check_size(field, dtype, shape, memoryview(data).nbytes)
    return Tensor(dtype=dtype, shape=shape, data=data if isinstance(data, bytes) else bytes(data))


def from_numpy(array: npt.NDArray[Any], *, dtype: DType | None = None) -> Tensor:
    """Pack an array, whose content is copied now: it may change afterwards. It need not be contiguous.

    `dtype`: BFLOAT16 for an array of uint16 with the bits of such numbers; None = the array's own.
    In shared memory the content stays until the request being served has ended: sending the tensor later raises
    ContentGone. Code outside of any request packs bytes.
    Raises TypeError for an array that no tensor can hold.
    """
    caller = sys._getframe(1)
    tensor = Tensor()
    try:
        write_array(tensor, array, dtype, (caller.f_code, caller.f_lasti))
    except TypeError as error:
        raise TypeError(f"from_numpy: {error}") from None
    return tensor


def to_numpy(tensor: Tensor, *, field: str = "tensor") -> npt.NDArray[Any]:
    """The tensor as a read-only array, without a copy of shared content: that stays as long as any such array does.

    Of a request it can be called until the request has ended, of a reply until the caller's own has, and of an item of
    a stream, too, but once: keep the array. Numbers of type bfloat16 come as their bits, in uint16.
    Raises BadRequest naming `field` when dtype, shape and size do not fit, ContentGone.
    """
    return read_array(tensor, field)


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
    check_size(field, dtype, found, nbytes_of(tensor))
    return found
