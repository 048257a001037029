"""Judges a replica by its answers: takes readings, returns the verdict and the pause until the next question. Pure.

Health: UNKNOWN until the first good reading; READY; FAILED after `probe.failures` bad readings in a row, or after one
in which the replica reports that it is broken, and READY again if it answers before it is replaced. "Draining" is an
answer too, neither good nor bad: the replica received a SIGTERM. A good reading of a replica that the controller has
told to sleep makes it UNKNOWN until it is awake again, and FAILED if it cannot wake up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ..model.spec import ProbeSpec
from ..model.world import ReplicaHealth, ReplicaReport, ReplicaVerdict, SleepReport

EAGER_S = 0.25
"""Between readings of a replica that was never ready, for its first EAGER_FOR_S."""
EAGER_FOR_S = 30.0
PATIENT_S = 1.0
"""The same afterwards: a model that loads for minutes need not be probed often."""
RETIRING_S = 0.1
"""Between readings of a replica that drains: the controller waits for its last request."""
EARLY = 0.9
"""A bad answer counts from this part of a period after the last one: timers are not exact."""


@dataclass(frozen=True, slots=True)
class ProbeReading(ReplicaReport):
    """The answer to one question."""

    ok: bool
    detail: str
    """In words."""
    progress: int | None = None
    """A number that differs whenever its work, or its start, has moved."""
    reason: str = ""
    """Why it is not ready, as the replica reports it."""


class ProbeJudge:
    """One replica's verdict, from its readings. Times are seconds of the caller's clock."""

    def __init__(
        self, spec: ProbeSpec, since: float, *, was_ready: bool = False, reports_progress: bool = False
    ) -> None:
        """`was_ready`: it was ready before this controller started, and counts as ready until it has failed.

        A controller that starts on a busy machine must not take a working replica out of rotation. `reports_progress`:
        the replica reports the progress of its start. Earlier reports are not known, so its progress counts from now.
        """
        self.spec = spec
        """May be replaced; the verdict stays."""
        self.contract: bytes | None = None
        """As in `ReplicaContainer`; set before the reading that it came with is recorded."""
        self._since = since
        self._was_ready = was_ready
        self._reports_progress = reports_progress
        self._bad_in_a_row = 0
        self._bad_at = since
        """When the last bad answer was counted."""
        self._progress: int | None = None
        self.verdict = ReplicaVerdict(
            health=ReplicaHealth.READY if was_ready else ReplicaHealth.UNKNOWN,
            health_detail="was ready when last asked" if was_ready else "not asked yet",
            ready_since=since if was_ready else None,
            progressed_at=since,
        )

    def record(self, reading: ProbeReading, now: float, *, retiring: bool = False) -> bool:
        """Record one reading; return whether the verdict changed in a way that the loop waits for."""
        before = self.verdict
        health = self._health_after(reading, now)
        detail = reading.detail
        if health is ReplicaHealth.FAILED and reading.broken:
            detail = f"the replica reports that it is broken: {reading.reason or reading.detail}"
        elif reading.ok and reading.sleep and health is not ReplicaHealth.READY:
            detail = f"it does not wake up: {reading.sleep.error}" if reading.sleep.error else "it wakes up"
        elif health is ReplicaHealth.FAILED:
            detail = f"{self._bad_in_a_row} bad answers in a row, the last: {reading.detail}"
        progressed_at = self._progressed_at(reading, now, retiring)
        ready_since = before.ready_since if before.health is ReplicaHealth.READY else now
        reported = {one.name: getattr(reading, one.name) for one in fields(ReplicaReport)}
        self.verdict = ReplicaVerdict(
            **reported
            | {"user_config": reading.user_config or before.user_config, "sleep": reading.sleep or before.sleep},
            health=health,
            health_detail=detail,
            ongoing_at=None if reading.ongoing is None else now,
            progressed_at=progressed_at,
            stalled_since=self._stalled_since(reading, progressed_at, now),
            ready_since=ready_since if health is ReplicaHealth.READY else None,
            contract=self.contract,
        )
        is_news = before.health is not health or before.contract is not self.contract
        return is_news or before.reported_draining is not reading.reported_draining

    def learn_sleep(self, report: SleepReport) -> None:
        """Record what it reported when it was told to sleep, or to wake up."""
        self.verdict = replace(self.verdict, sleep=report)
        if not report.is_awake and self.verdict.health is ReplicaHealth.READY:
            self.verdict = replace(self.verdict, health=ReplicaHealth.UNKNOWN, ready_since=None)

    def pause_s(self, now: float, *, retiring: bool) -> float:
        """Seconds until the next question."""
        is_asleep = self.verdict.sleep is not None and self.verdict.sleep.asleep
        if retiring and not is_asleep:
            return RETIRING_S
        config, sleep = self.verdict.user_config, self.verdict.sleep
        is_changing = config is not None and config.applied != config.wanted
        is_turning = sleep is not None and sleep.asleep != sleep.wanted and not sleep.error
        if self._was_ready and (is_changing or is_turning):
            return min(PATIENT_S, self.spec.period_s)
        if self._was_ready:
            return self.spec.period_s
        pause_s = EAGER_S if now - self._since < EAGER_FOR_S else PATIENT_S
        return min(pause_s, self.spec.period_s)

    def _progressed_at(self, reading: ProbeReading, now: float, retiring: bool) -> float | None:
        """When its progress last changed. The first reading does not count against the replica."""
        if not self._reports_progress and reading.progress is None:
            return None
        is_due = retiring or self.verdict.health is ReplicaHealth.READY
        if is_due and reading.sleep and reading.sleep.wanted:
            return now  # the time in which it has to wake up begins when it is no longer to sleep
        if reading.progress is None or reading.progress == self._progress:
            return self.verdict.progressed_at
        self._progress = reading.progress
        return now

    def _stalled_since(self, reading: ProbeReading, progressed_at: float | None, now: float) -> float | None:
        """Since when it has had work without progress. Calls that wait for another service do not count."""
        if not (reading.ok and reading.ongoing) or reading.queued or reading.progress is None or progressed_at == now:
            return None
        before = self.verdict.stalled_since
        return now if before is None else before

    def _health_after(self, reading: ProbeReading, now: float) -> ReplicaHealth:
        """The health after one more reading. Only about one bad reading a period counts: a draining replica is asked
        more often, and may fail for as long as any other.
        """
        if reading.ok:
            self._bad_in_a_row = 0
            self._was_ready = True
            return _health_of(reading.sleep)
        if reading.reported_draining:
            self._bad_in_a_row = 0
            return self.verdict.health
        if reading.broken:
            self._bad_in_a_row, self._bad_at = max(self._bad_in_a_row + 1, self.spec.failures), now
            return ReplicaHealth.FAILED
        if self._bad_in_a_row and now - self._bad_at < EARLY * self.spec.period_s:
            return self.verdict.health
        self._bad_in_a_row += 1
        self._bad_at = now
        if not self._was_ready:
            return ReplicaHealth.UNKNOWN
        return ReplicaHealth.FAILED if self._bad_in_a_row >= self.spec.failures else self.verdict.health


def _health_of(sleep: SleepReport | None) -> ReplicaHealth:
    """The health of a replica that answers: one that sleeps, or is being woken, takes no requests."""
    if sleep is None or sleep.is_awake:
        return ReplicaHealth.READY
    return ReplicaHealth.FAILED if sleep.error and not sleep.wanted else ReplicaHealth.UNKNOWN
