"""NumPy arrays in Tensor messages of any descriptor pool: written and read in place, shared content without a copy.

`pierhead.tensors` is the public part.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pierhead.errors import BadRequest, ContentGone
from pierhead.memory import process
from pierhead.tensor.v1.tensor_pb2 import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

DType: TypeAlias = "Tensor.DType.ValueType"

ITEM_BYTES: Final[dict[DType, int]] = {
    Tensor.FLOAT32: 4,
    Tensor.FLOAT64: 8,
    Tensor.INT32: 4,
    Tensor.INT64: 8,
    Tensor.BOOL: 1,
    Tensor.UINT8: 1,
    Tensor.FLOAT16: 2,
    Tensor.BFLOAT16: 2,
}
"""Bytes that one element takes in `Tensor.data`."""

CODES: Final[dict[DType, str]] = {
    Tensor.FLOAT32: "<f4",
    Tensor.FLOAT64: "<f8",
    Tensor.INT32: "<i4",
    Tensor.INT64: "<i8",
    Tensor.BOOL: "|b1",
    Tensor.UINT8: "|u1",
    Tensor.FLOAT16: "<f2",
    Tensor.BFLOAT16: "<u2",
}
"""numpy's names; it has no bfloat16, whose bits it gets."""

BY_CODE: Final[dict[str, DType]] = {code: dtype for dtype, code in CODES.items() if dtype != Tensor.BFLOAT16}

SPELT_DIMENSIONS: Final = 8


def write_array(tensor: Any, array: npt.NDArray[Any], dtype: DType | None, site: Hashable) -> None:
    """Copy an array into an empty Tensor message: into shared memory where there is some for it, else as bytes.

    `dtype`: as for `from_numpy`; `site`: the place in the code that makes the tensor. Raises TypeError for an array
    that no tensor can hold.
    """
    import numpy as np

    try:
        code = array.dtype.newbyteorder("<").str
    except AttributeError:  # not asked before: it is an array but for a mistake
        raise TypeError(f"expected an array, found {array!r:.60}") from None
    known = BY_CODE.get(code) if dtype is None else dtype
    if known is None or CODES.get(known) != code:
        names = ", ".join(dtype_name(each) for each in BY_CODE.values())
        raise TypeError(f"expected an array of one of {names}, or uint16 as bfloat16, found {array.dtype}")
    tensor.dtype = known
    tensor.shape.extend(array.shape)
    memory = process.MEMORY
    filled = memory.fill(array.nbytes, site) if memory is not None and array.nbytes >= memory.threshold else None
    if filled is None:
        tensor.data = array.astype(code, copy=False).tobytes()
        return
    region, room = filled
    np.copyto(np.frombuffer(room, code).reshape(array.shape), array)
    shared = tensor.shared
    shared.region, shared.generation, shared.length = region.name, region.generation, array.nbytes


def read_array(tensor: Any, field: str) -> npt.NDArray[Any]:
    """A Tensor message as a read-only array; see `to_numpy`."""
    import numpy as np

    shape = tuple(tensor.shape)
    check_size(field, tensor.dtype, shape, nbytes_of(tensor))
    code = CODES[tensor.dtype]
    if not tensor.HasField("shared"):
        return np.frombuffer(tensor.data, code).reshape(shape)
    memory = process.MEMORY
    if memory is None:
        raise ContentGone(f"{field}: its content is in shared memory, and this process shares none")
    return np.asarray(memory.content(tensor.shared).read()).view(code).reshape(shape)


def nbytes_of(tensor: Any) -> int:
    """Bytes of a Tensor message's content."""
    return tensor.shared.length if tensor.HasField("shared") else len(tensor.data)


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


def check_size(field: str, dtype: DType, shape: Sequence[int], nbytes: int) -> None:
    """Raise BadRequest naming `field` unless such a tensor has this many bytes."""
    item = ITEM_BYTES.get(dtype)
    if item is None:
        names = ", ".join(dtype_name(known) for known in ITEM_BYTES)
        raise BadRequest(f"{field}: expected one of {names}, found {dtype_name(dtype)}")
    if any(length < 0 for length in shape):
        raise BadRequest(f"{field}: expected dimensions >= 0, found {spell(dtype, shape)}")
    expected = math.prod(shape) * item
    if nbytes != expected:
        raise BadRequest(f"{field}: expected {expected} bytes of data for {spell(dtype, shape)}, found {nbytes} bytes")
