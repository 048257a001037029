"""Outlier ejection: leaves a replica out for a while when its calls fail and other replicas' calls do not.

    in service --FAILURES in a row--> left out --some seconds--> on probation --a call is taken--> on trial
         ^                               ^                           ^                                |
         |                               |                           `---- ended without a verdict ---|
         |                               `---- failed: left out for longer ---------------------------|
         `---- answered ------------------------------------------------------------------------------'

A failure is a lost connection, a deadline that passed while the replica answered no call, or a status that means that
the service is broken; never overload, draining, a cancellation, or a wrong request. `failures` classifies them.
A failing dependency makes all replicas fail alike: none is an outlier, and leaving some out would only overload the

rest. So a replica is left out only while the last call of another replica in service did not fail. At most half of the
callable replicas, rounded down, are left out: a single replica never is.

Pure: the time (monotonic seconds) and the randomness are passed in.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

FAILURES = 5
"""Consecutive failures that leave a replica out; Envoy's default. One or two happen by chance."""

SHORTEST_S = 5.0
"""The first time out: longer than a stall of a busy machine, short enough to cost little when it was a mistake."""

LONGEST_S = 60.0
"""Each time out is twice as long as the last, up to this."""

FIRST_AGAIN_S = 60.0
"""After this time in service, the next time out is a first one again."""

JITTER = 0.2
"""Times are shorter by up to this share, so that the callers of a broken replica do not return all at once."""

TRIAL_PAUSE_S = 0.05
"""Shortest pause before the next trial when one ended without a verdict (its caller went away, the replica was full).
Also because a call's failure is classified a moment after its end."""


@dataclass(slots=True, eq=False)
class Standing:
    """How one replica's calls have gone, as this process saw them."""

    failures: int = 0
    answered_at: float = 0.0
    judged_at: float = 0.0
    """Calls begun before this time are ignored: the last verdict, or the lost connection, covered them too."""
    until: float = 0.0
    """When the time out ends; 0 = in service. Stays until the verdict of a call begun after it."""
    next_trial_at: float = 0.0
    on_trial: bool = False
    times_out: int = 0
    """Consecutive times out, which set the length of the next one."""
    back_at: float = 0.0
    """When the last one ended well."""

    @property
    def in_service(self) -> bool:
        """Neither left out, nor on probation or trial."""
        return self.until == 0

    def unwanted(self, now: float) -> bool:
        """Whether no call should go there."""
        return self.until != 0 and (self.on_trial or now < self.next_trial_at)

    def begin_trial(self) -> None:
        """A call was taken there after its time out; no second call is taken until it has ended."""
        self.on_trial = True

    def end_trial(self, now: float) -> None:
        """The trial's call has ended; its verdict may follow."""
        if self.on_trial:
            self.on_trial = False
            self.next_trial_at = now + TRIAL_PAUSE_S

    def answered(self, began: float, now: float) -> None:
        """A call begun at `began` was answered as a working replica answers."""
        self.answered_at = now
        if began >= self.judged_at:
            self.failures = 0
            if not self.in_service:
                self.reinstate(now)

    def leave_out(self, now: float, share: float) -> None:
        """Begin a time out of `share` of its full length, twice as long as that of the last one."""
        if self.in_service and now - self.back_at > FIRST_AGAIN_S:
            self.times_out = 0
        full = min(LONGEST_S, SHORTEST_S * 2.0 ** min(self.times_out, 10))
        self.until = self.next_trial_at = now + full * share
        self.times_out += 1
        self.on_trial = False
        self.judged_at = now

    def reinstate(self, now: float) -> None:
        """End the time out."""
        self.until = self.next_trial_at = 0.0
        self.on_trial = False
        self.judged_at = self.back_at = now


class Outliers:
    """The rules for the replicas of one service. `peers`: the standings of all replicas that are connected and take
    calls, left out or not; the replica in question may be among them.
    """

    def __init__(self, rng: Random) -> None:
        self._random = rng.random

    def failed(self, standing: Standing, began: float, now: float, peers: Collection[Standing]) -> None:
        """A call begun at `began` failed."""
        if began < standing.judged_at or began < standing.until:
            return
        standing.failures += 1
        if standing.in_service and standing.failures < FAILURES:
            return
        others = [peer for peer in peers if peer is not standing]
        if not any(other.in_service and other.failures == 0 for other in others):
            if not standing.in_service:
                standing.reinstate(now)
            return
        out = sum(not other.in_service for other in others)
        if not standing.in_service or out < most_out(len(others) + 1):
            standing.leave_out(now, 1 - JITTER * self._random())

    def timed_out(self, standing: Standing, began: float, now: float, peers: Collection[Standing]) -> None:
        """A call's deadline passed before its answer. No failure if the replica has answered another call since: it is
        then slow or full, or the deadline was short.
        """
        if began > standing.answered_at:
            self.failed(standing, began, now, peers)

    def lost_connection(self, standing: Standing, now: float, peers: Collection[Standing]) -> None:
        """The connection broke: one failure, however many calls were under way there."""
        standing.judged_at = now
        self.failed(standing, now, now, peers)


def most_out(callable_replicas: int) -> int:
    """How many of the callable replicas may be left out at a time."""
    return callable_replicas // 2


def left_out(peers: Collection[Standing], now: float) -> list[Standing]:
    """The replicas to leave out now: at most the allowed number of the unwanted ones, the longest time left first.

    Computed again at each change: when other replicas drain, what was half of them may now be all.
    """
    unwanted = sorted((peer for peer in peers if peer.unwanted(now)), key=lambda peer: peer.until, reverse=True)
    return unwanted[: most_out(len(peers))]


def next_change(peers: Collection[Standing], now: float) -> float:
    """When the next replica goes to probation because its time is over; infinity when none will."""
    return min((peer.next_trial_at for peer in peers if peer.next_trial_at > now), default=float("inf"))
