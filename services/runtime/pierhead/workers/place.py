"""What a supervisor tells a process that it starts as a worker."""

from __future__ import annotations

from typing import NamedTuple

VARIABLE = "PIERHEAD_WORKER"
"""How a process knows that it is a worker. Taken out of the environment at once: processes that it starts are none."""

ASK = b"?"
"""What the supervisor sends for the metrics; the answer is their length in eight bytes, and they themselves."""

CONFIGURE = b"c"
"""What it sends with a user_config: its length in eight bytes, and its text. There is no answer: the board has it."""


class Place(NamedTuple):
    """What VARIABLE says."""

    seat: int
    """From 0 on."""
    workers: int
    port: int
    board: int
    """File descriptor of the shared memory."""
    line: int
    """File descriptor of the socket to the supervisor."""

    def text(self) -> str:
        """For the environment."""
        return " ".join(map(str, self))

    @classmethod
    def read(cls, text: str) -> Place:
        """What `text` has made."""
        return cls(*map(int, text.split()))
