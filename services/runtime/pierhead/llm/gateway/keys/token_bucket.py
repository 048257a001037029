"""A token bucket for limits per minute. Pure: the time is an argument, in seconds of any monotonic clock."""

from __future__ import annotations


class TokenBucket:
    """Fills at a rate, holds a minute's worth and at least one, and begins full.

    Estimates are corrected later, so the level may be below zero; it then has to refill first.
    """

    __slots__ = ("_at", "_level", "capacity", "rate")

    def __init__(self, per_minute: float, now: float) -> None:
        self.rate = per_minute / 60.0
        """Units per second."""
        self.capacity = max(1.0, per_minute)
        self._level = self.capacity
        self._at = now

    def level(self, now: float) -> float:
        """Available units."""
        if now > self._at:
            self._level = min(self.capacity, self._level + (now - self._at) * self.rate)
            self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be spent; 0 = now. More than its size may be spent when it is full."""
        missing = min(amount, self.capacity) - self.level(now)
        return max(0.0, missing) / self.rate

    def spend(self, amount: float, now: float) -> None:
        """Spend `amount`, even if the level becomes negative; a negative amount refills, up to the bucket's size."""
        self._level = min(self.capacity, self.level(now) - amount)

    def full_in_s(self, now: float) -> float:
        """Seconds until it is full."""
        return (self.capacity - self.level(now)) / self.rate
