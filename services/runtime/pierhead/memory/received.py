"""Content in shared memory, until nothing in this process reads it any more."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from pierhead.memory.regions import Mapping


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
        """The region's name, and the generation."""
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


class Reading(_Reference):
    """A weak reference to content, and what is to be done when the content dies.

    `gone(reading)` runs in any thread, also in one that holds the lock of the process's memory: it must take no lock.
    """

    __slots__ = ("debts", "key")

    def __new__(cls, content: Content, gone: Callable[[Any], None]) -> Reading:
        """See `ref`."""
        return super().__new__(cls, content, gone)

    def __init__(self, content: Content, gone: Callable[[Any], None]) -> None:
        super().__init__(content, gone)  # type: ignore[call-arg]  # as `ref` has it
        self.key = content.key
        self.debts: dict[Hashable, int] = {}
        """By link: the messages that named it, to be released there. Empty for content of this process."""
