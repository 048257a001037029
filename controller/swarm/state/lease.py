"""The lease: which of a project's controllers acts. Pure; the caller reads and writes the head and its own clock.

    seeking -> acting <-> expired
                   \\         \\
                    +-> lost <-+

The holder renews the lease by raising `beat`. It acts for HOLD_S after it sent its last successful renewal. Another
controller takes the lease when it has seen no change for TAKE_S, by a write from the version that it read. Each counts
on its own clock; no time of one machine is compared with a time of another one.

Why there are never two: the write that takes the lease succeeds only if the last renewal came before the answer that
first showed it to the taker. So the holder's deadline, at most HOLD_S after that answer, is over when TAKE_S are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...model.text import whole_number

RENEW_S = 1.5
"""Between two renewals."""
HOLD_S = 5.0
TAKE_S = 7.5
"""Longer than HOLD_S by what a call that was sent in time may take, and by what clocks differ in speed."""
LOOK_S = 0.5
"""Between two looks at a lease that another controller holds."""
NOBODY = ""
"""The holder after a controller has ended by itself: the next one need not wait."""
UNKNOWN = "unknown"
"""The holder where the head was missing: some controller may still act."""

HOLDER, EPOCH, BEAT = "pierhead.holder", "pierhead.epoch", "pierhead.beat"
"""Labels of the head."""

State = Literal["seeking", "acting", "expired", "lost"]


@dataclass(frozen=True, slots=True)
class Claim:
    """What the head says about the lease."""

    holder: str
    epoch: int
    """The version that the lease was taken from, plus one: grows with every change of the holder."""
    beat: int

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> Claim:
        """The claim in the labels of a head."""
        numbers = (whole_number(labels.get(key, "")) or 0 for key in (EPOCH, BEAT))
        return cls(labels.get(HOLDER, UNKNOWN), *numbers)

    def labels(self) -> dict[str, str]:
        """The claim as labels."""
        return {HOLDER: self.holder, EPOCH: str(self.epoch), BEAT: str(self.beat)}


class StateLease:
    """One controller's view of the lease. `me` is unique to the process."""

    def __init__(self, me: str) -> None:
        self.me = me
        self.epoch = 0
        """The epoch that this controller has, or had; 0 = it never held the lease."""
        self._until = -math.inf
        self._is_lost = False
        self._seen = Claim(NOBODY, 0, 0)
        self._seen_at = math.inf

    def state(self, now: float) -> State:
        """Where this controller stands."""
        if self._is_lost:
            return "lost"
        if not self.epoch:
            return "seeking"
        return "acting" if now < self._until else "expired"

    def acts(self, now: float) -> bool:
        """Whether this controller may act."""
        return self.state(now) == "acting"

    def next_claim(self, found: Claim, version: int, now: float) -> Claim | None:
        """What to write over the claim that a head of that version showed; None = nothing now.

        `now`: when the answer had arrived.
        """
        if found.holder == self.me:  # also after a write that took the lease and was not answered
            self.epoch = found.epoch
            return Claim(self.me, found.epoch, found.beat + 1)
        if self.epoch:
            self._is_lost |= found.epoch > self.epoch  # a smaller one is an answer out of date
            return None
        if found != self._seen or self._seen_at > now:
            self._seen, self._seen_at = found, now
        if found.holder == NOBODY or now - self._seen_at >= TAKE_S:
            return Claim(self.me, version + 1, 0)
        return None

    def written(self, claim: Claim, sent_at: float) -> None:
        """The claim was written by a call that was sent then."""
        self.epoch = claim.epoch
        self._until = max(self._until, sent_at + HOLD_S)

    def give_up(self) -> None:
        """Stop acting for good: this controller ends."""
        self._is_lost = True
