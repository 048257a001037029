"""How many calls may be tried again, so that retries never multiply an overload."""

from __future__ import annotations


class RetryBudget:
    """A tenth of the calls, and at least three a second, may be tried again. `now` is monotonic seconds, handed in."""

    SHARE = 0.1
    PER_SECOND = 3.0
    MOST = 100.0
    """The most that quiet times save up."""

    def __init__(self, now: float) -> None:
        self._tokens = self.PER_SECOND
        self._at = now

    def called(self) -> None:
        """A call was made for the first time: it earns its share."""
        if self._tokens < self.MOST:
            self._tokens += self.SHARE

    def spend(self, now: float) -> bool:
        """Whether one more retry is within the budget; counts it if so."""
        # Time alone fills only to the floor of one second; beyond that, calls have to have earned it.
        if self._tokens < self.PER_SECOND:
            self._tokens = min(self.PER_SECOND, self._tokens + (now - self._at) * self.PER_SECOND)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
