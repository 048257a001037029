"""Flow control of one stream of messages in one direction. Sizes are bytes."""

from __future__ import annotations

WINDOW_BYTES = 256 * 1024
"""The window of one stream: about the bytes that are under way to a consumer that keeps up."""

MESSAGE_BYTES = 64
"""Cost of a message besides its size, so that the window bounds empty messages, too."""

LARGE_BYTES = 256 * 1024
"""A larger message is sent outside the lane."""


def cost(size: int) -> int:
    """The cost of a message of `size` bytes: at most a whole window, so that a large parcel can be sent."""
    return (size if size < WINDOW_BYTES else WINDOW_BYTES) + MESSAGE_BYTES


class SendWindow:
    """The bytes that a sender may still send. One message may take it below zero: no message is too large to send."""

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
        """The other side returned credit, as its consumer took messages."""
        self.left += credit


class ReceiveWindow:
    """The bytes that a receiver holds, and the credit that it owes to the sender."""

    __slots__ = ("_owed", "_window", "left")

    def __init__(self, window: int) -> None:
        self._window = window
        self._owed = 0
        self.left = window
        """Bytes that the sender may still send with the credit that it has."""

    def arrive(self, size: int) -> bool:
        """A message came; False if the sender exceeded its window."""
        allowed = self.left > 0
        self.left -= cost(size)
        return allowed

    def consume(self, size: int) -> int:
        """The consumer took a message: returns the credit to send now, or 0. Sent per half window, not per message."""
        self._owed += cost(size)
        if self._owed * 2 < self._window:
            return 0
        credit, self._owed = self._owed, 0
        self.left += credit
        return credit
