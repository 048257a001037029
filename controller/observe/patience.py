"""What a look may expect of a reading that goes on beside it: who waits in vain is late for nothing. Pure."""

from __future__ import annotations


def remaining_s(last_s: float, so_far_s: float) -> float:
    """Seconds that a reading can be expected to take still.

    As long in all as the last one took; one that has taken longer than that, as long again as so far.
    """
    return last_s - so_far_s if so_far_s < last_s else so_far_s
