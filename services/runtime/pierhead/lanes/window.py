"""Flow control of one stream of messages in one direction, for each stream alone. Sizes are bytes."""

from __future__ import annotations

WINDOW_BYTES = 256 * 1024
"""What either side takes in advance of one stream: about what a consumer that keeps up has on its way."""

MESSAGE_BYTES = 64
"""What a message takes beyond its size, so that empty ones cannot be sent without end."""

LARGE_BYTES = 256 * 1024
"""A message above this travels beside the lane."""


def cost(size: int) -> int:
    """What a message of `size` bytes takes of a window: no more than a window has, also when it is a large parcel."""
    return (size if size < WINDOW_BYTES else WINDOW_BYTES) + MESSAGE_BYTES


class SendWindow:
    """What a sender may still send. One message may take it below zero: none is ever too large to be sent."""

    __slots__ = ("left",)

    def __init__(self, window: int) -> None:
        self.left = window

    @property
    def open(self) -> bool:
        """Whether a message may be sent now."""
        return self.left > 0

    def spend(self, size: int) -> None:
        """A message was sent."""
        self.left -= cost(size)

    def earn(self, credit: int) -> None:
        """The other side gave back what its consumer took."""
        self.left += credit


class ReceiveWindow:
    """The bytes that a receiver holds, and the credit that it owes to the sender."""

    __slots__ = ("_owed", "_window", "left")

    def __init__(self, window: int) -> None:
        self._window = window
        self._owed = 0
        self.left = window
        """Bytes that the sender may still send, by the credit that it was given."""

    def arrive(self, size: int) -> bool:
        """A message came; False when the sender had no right to send it."""
        allowed = self.left > 0
        self.left -= cost(size)
        return allowed

    def consume(self, size: int) -> int:
        """The consumer took a message: the credit to send now, or 0. Sent by the half window, not by the message."""
        self._owed += cost(size)
        if self._owed * 2 < self._window:
            return 0
        credit, self._owed = self._owed, 0
        self.left += credit
        return credit
