"""Reads the values of the Prometheus queries that services are autoscaled by, each in a task outside the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from ..errors import PolicyError, PrometheusError
from ..model.spec import PrometheusPolicy
from ..outlive import Background

FIRST_S = 30.0
"""How long a first value may take: Prometheus discovers the targets of a new or woken service every few seconds."""
AGAIN_S = 5.0
"""Pause after a query without a value: Prometheus starts after the controller, and a series after its replica."""
BREAK_S = 5.0
"""After this time without need for a value (no replica was ready) the query is not asked any more; ticks are a second
apart."""

Query = Callable[[str, PrometheusPolicy], Awaitable[float]]
"""Returns the value for a service (its name); raises PrometheusError."""


@dataclass(slots=True)
class _QueryWatch:
    """One query, for as long as the loop needs its value, and its last result. Times are the loop's."""

    policy: PrometheusPolicy
    needed_since: float
    needed_at: float
    task: asyncio.Task[None] | None = None
    value: float | None = None
    read_at: float = 0.0
    error: str = ""

    def fail(self, error: str) -> None:
        self.error = error


@dataclass(eq=False)
class Measurements:
    """Owns one task for each service whose query is needed: one that has ready replicas."""

    _query: Query
    _background: Background
    _watches: dict[str, _QueryWatch] = field(default_factory=dict)

    def value(self, service: str, policy: PrometheusPolicy, now: float) -> float | None:
        """The last good value; raises PolicyError when there is none or it is too old.

        None while a first value is waited for, FIRST_S at most.
        """
        watch = self._watches.get(service)
        if watch is None or watch.policy != policy or now - watch.needed_at > BREAK_S:
            watch = self._begin(service, policy, now)
        watch.needed_at = now
        if watch.value is not None and now - watch.read_at <= policy.stale_after_s:
            return watch.value
        if watch.value is None and now - watch.needed_since <= FIRST_S:
            return None
        error = watch.error or f"no answer from {policy.url}"
        if watch.value is None:
            raise PolicyError(error)
        raise PolicyError(f"its last value ({watch.value:.4g}) is {now - watch.read_at:.0f} s old; {error}")

    def _begin(self, service: str, policy: PrometheusPolicy, now: float) -> _QueryWatch:
        before = self._watches.get(service)
        if before is not None and before.task is not None:
            before.task.cancel()
        watch = self._watches[service] = _QueryWatch(policy, now, now)
        ask = partial(self._ask_while_needed, service, watch)
        watch.task = self._background.begin(f"asking for {service}'s value", ask, watch.fail)
        return watch

    async def _ask_while_needed(self, service: str, watch: _QueryWatch) -> None:
        while self._background.clock() - watch.needed_at <= BREAK_S:
            try:
                async with asyncio.timeout(watch.policy.timeout_s):
                    value = await self._query(service, watch.policy)
            except TimeoutError:
                watch.error = f"no answer from {watch.policy.url} within {watch.policy.timeout_s:g} s"
            except PrometheusError as error:
                watch.error = str(error)
            else:
                watch.value, watch.read_at, watch.error = value, self._background.clock(), ""
            await asyncio.sleep(min(watch.policy.period_s, AGAIN_S) if watch.error else watch.policy.period_s)
