"""The memory that bodies take: of all requests together, from a body's first byte until its answer begins. Pure.

Admission bounds how many requests there are, and a setting how large each is; the product of the two is more than any
machine has. Room is taken as bytes arrive: a request that announces a large body and sends nothing takes none.
"""

from __future__ import annotations


class BodyRoom:
    """How much there is, and how much of it is taken."""

    __slots__ = ("limit", "taken")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Bytes."""
        self.taken = 0

    def take(self, size: int) -> bool:
        """Take so many bytes; False, and none are taken, where they do not fit."""
        if self.taken + size > self.limit:
            return False
        self.taken += size
        return True

    def give_back(self, size: int) -> None:
        """Free so many bytes."""
        self.taken -= size
