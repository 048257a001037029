"""Inputs of `pierhead.triton` in GPU memory, which is not copied: a server maps the allocation that holds an array.

Needs the package cuda-bindings, and the same GPU here and at the server: docs/how-to/triton.md.
"""

from __future__ import annotations

import ctypes
import importlib
import math
from typing import Any, NamedTuple

import numpy as np

from pierhead.errors import BadRequest

HANDLE_BYTES = 64

UNKNOWN = 2
"""A stream that only the array's own thread can wait for: that thread's default one. Also where none is said."""


class Allocation(NamedTuple):
    """What another process maps: always a whole allocation."""

    handle: bytes
    """Of CUDA IPC."""
    device: int
    base: int
    size: int


class DeviceArray:
    """An input in GPU memory: what a request needs of an array, and the place."""

    allocation: Allocation

    def __init__(self, what: str, value: Any) -> None:
        """`what`: the input, for messages. Raises BadRequest."""
        interface = value.__cuda_array_interface__
        self._what, self._value = what, value  # which has the memory
        self.shape = tuple(interface["shape"])
        self.dtype = np.dtype(interface["typestr"])
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self._pointer, self._stream = interface["data"][0], interface.get("stream", UNKNOWN)
        if interface.get("strides") is not None:
            raise self.refused("it is not C-contiguous")

    @property
    def offset(self) -> int:
        """Where in the allocation it begins."""
        return int(self._pointer) - self.allocation.base

    def locate(self) -> None:
        """Wait until the array is complete, and find its allocation. Blocks. Raises BadRequest."""
        try:
            self.allocation = ipc_of(self._pointer, self._stream)
        except ImportError:
            raise self.refused("it is shared by the package cuda-bindings, which is missing") from None
        except (OSError, RuntimeError) as error:
            raise self.refused(f"CUDA cannot share it: {error}") from error

    def refused(self, why: str) -> BadRequest:
        """The error for an array that cannot be sent."""
        return BadRequest(f"{self._what} is in GPU memory: {why}. Copy it to the host: .get() (CuPy), .cpu() (PyTorch)")

    def tobytes(self) -> bytes:
        """Messages that carry bytes ask for them. Raises BadRequest."""
        raise self.refused("only `infer` can send it from there")


def ipc_of(pointer: int, stream: int | None) -> Allocation:
    """The allocation that holds an address, once a stream is through. `stream`: as `__cuda_array_interface__` has it.
    Raises ImportError without cuda-bindings, RuntimeError without a driver, OSError with CUDA's own words.
    """
    cuda: Any = importlib.import_module("cuda.bindings.driver")

    def ask(function: Any, *arguments: Any) -> Any:
        error, *values = function(*arguments)
        if error != cuda.CUresult.CUDA_SUCCESS:
            raise OSError(f"{function.__name__}: {error.name}")
        return values[0] if len(values) == 1 else values

    attribute = cuda.CUpointer_attribute
    ask(cuda.cuCtxPushCurrent, ask(cuda.cuPointerGetAttribute, attribute.CU_POINTER_ATTRIBUTE_CONTEXT, pointer))
    try:
        if stream == UNKNOWN:
            ask(cuda.cuCtxSynchronize)
        elif stream is not None:
            ask(cuda.cuStreamSynchronize, stream)
        base, size = ask(cuda.cuMemGetAddressRange, pointer)
        found = ask(cuda.cuIpcGetMemHandle, base)
        handle = ctypes.string_at(int(found.getPtr()), HANDLE_BYTES)
        device = ask(cuda.cuPointerGetAttribute, attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer)
    finally:
        cuda.cuCtxPopCurrent()
    return Allocation(handle, int(device), int(base), int(size))
