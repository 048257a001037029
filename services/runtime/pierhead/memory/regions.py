"""Memory for regions: sealed memfds, writable here and readable for their receivers. Content in it, until nothing in
this process reads it any more.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE (Linux 5.1), which Python's fcntl does not name: mappings made later are read-only."""

_SEAL, _SHRINK, _GROW = 0x1, 0x2, 0x4  # in Python's fcntl on Linux alone

SEALS = _SEAL | _SHRINK | _GROW | _FUTURE_WRITE

BLOCK = 512


class BadRegionError(Exception):
    """What another process passed as a region cannot be used as one."""


class Mapping:
    """Mapped memory. Lives until nothing refers to it."""

    __slots__ = ("_map", "size")

    def __init__(self, mapped: mmap.mmap) -> None:
        self._map = mapped
        self.size = len(mapped)

    def interface(self, length: int) -> dict[str, Any]:
        """The first bytes as numpy's `__array_interface__`: read-only, with no reference to this object."""
        import numpy as np

        address = np.frombuffer(self._map, np.uint8).ctypes.data
        return {"version": 3, "typestr": "|u1", "shape": (length,), "data": (address, True)}

    def view(self, length: int) -> memoryview:
        """The first bytes."""
        return memoryview(self._map)[:length]


class OwnMemory(Mapping):
    """A region's memory in the process that has made it."""

    __slots__ = ("fd",)

    def __init__(self, size: int) -> None:
        """Raises OSError: too many open files, no memory."""
        fd = os.memfd_create("pierhead", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            mapped = mmap.mmap(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(fd)
            raise
        super().__init__(mapped)
        self.fd = fd

    @property
    def kernel_bytes(self) -> int:
        """What the kernel counts for it: the pages that were written."""
        return os.fstat(self.fd).st_blocks * BLOCK

    def close(self) -> None:
        """Give it back: the kernel frees it once no receiver maps it any more."""
        with suppress(OSError):
            os.close(self.fd)


def receive(fd: int, size: int) -> Mapping:
    """Map a region of another process, and close `fd`. Raises BadRegionError, OSError."""
    try:
        found = os.fstat(fd).st_size
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise BadRegionError("a region that is no memfd") from error
        if seals & SEALS != SEALS:
            raise BadRegionError(f"a region with the seals {seals:#x}; {SEALS:#x} are needed")
        if not 0 < size == found:
            raise BadRegionError(f"a region of {found} bytes, announced with {size}")
        mapped = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(fd)
    return Mapping(mapped)


class Keeper(Protocol):
    """Keeps content: a request."""

    def drop(self, key: object) -> None:
        """Keep it no longer."""
        ...


class Content:
    """What a region holds, for as long as this object lives: requests keep it, and arrays have it as their base."""

    __slots__ = ("__weakref__", "key", "length", "mapping", "once")

    def __init__(self, key: tuple[bytes, int], mapping: Mapping, length: int) -> None:
        self.key = key
        self.mapping = mapping
        self.length = length
        self.once: tuple[Keeper, ...] = ()
        """Of an item of a stream: the requests that keep it until it is read the first time."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.mapping.interface(self.length)

    def read(self) -> Content:
        """The content, to be read: from now on only its reader keeps an item of a stream."""
        once, self.once = self.once, ()
        for keeper in once:
            keeper.drop(self)
        return self

    def view(self) -> memoryview:
        """The bytes, to be copied at once."""
        return self.read().mapping.view(self.length)


if TYPE_CHECKING:
    _Reference = ref[Content]
else:
    _Reference = ref


class ContentReference(_Reference):
    """A weak reference to content, and what is to be done when the content dies.

    `gone(reading)` runs in any thread, also in one that holds the lock of the process's memory: it must take no lock.
    """

    __slots__ = ("debts", "key")

    def __new__(cls, content: Content, gone: Callable[[Any], None]) -> ContentReference:
        """See `ref`."""
        return super().__new__(cls, content, gone)

    def __init__(self, content: Content, gone: Callable[[Any], None]) -> None:
        super().__init__(content, gone)  # type: ignore[call-arg]  # as `ref` has it
        self.key = content.key
        self.debts: dict[Hashable, int] = {}
        """By link: the messages that named it, to be released there. Empty for content of this process."""
