"""One handle in one event loop: what its calls share.

A handle may be used in several loops, each in a thread of its own, as when user code has one. Nothing here is shared
between them: each has its own connections, its own policy object and its own line.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pierhead.calls.clients import Clients
from pierhead.calls.failures import RETRY_REASONS
from pierhead.deadlines import Deadlines
from pierhead.errors import Backpressure, NoReplica
from pierhead.lanes.client import TRANSPORTS
from pierhead.metrics import RuntimeMetrics
from pierhead.policies.router import PolicyRouter

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}(:[0-9]{1,5})?")
"""A service's name that both Compose and DNS accept, with a port where there is no Discovery."""


def service_name(service: str) -> str:
    """The name that a user gave. Raises ValueError where no service can have it."""
    if _NAME.fullmatch(service) is None or int(service.partition(":")[2] or 0) > 65535:
        raise ValueError(f'service: expected a service\'s name, or name:port, found "{service}"')
    return service


@dataclass(frozen=True, slots=True)
class HandleOptions:
    """The arguments of a handle; see `pierhead.handle`. Raises ValueError for those that cannot be."""

    service: str
    policy: str | None = None
    """None = the service's own."""
    policy_kwargs: Mapping[str, Any] | None = None
    """The keyword arguments of the policy's constructor."""
    timeout_s: float | None = None
    max_queued_requests: int | None = None
    transport: str | None = None
    prefer_local: bool = False
    eject_outliers: bool = True

    def __post_init__(self) -> None:
        if self.policy_kwargs and self.policy is None:
            raise ValueError("policy_kwargs: expected together with a policy that takes them, found none")
        if self.transport is not None and self.transport not in TRANSPORTS:
            raise ValueError(f'transport: expected one of {", ".join(sorted(TRANSPORTS))}, found "{self.transport}"')
        if self.max_queued_requests is not None and self.max_queued_requests < -1:
            raise ValueError(
                f"max_queued_requests: expected an integer >= -1 (-1 = no bound), found {self.max_queued_requests}"
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s: expected a number of seconds above 0, found {self.timeout_s}")


class Binding:
    """A handle in the running loop."""

    def __init__(self, options: HandleOptions, router: PolicyRouter, metrics: RuntimeMetrics) -> None:
        clients = Clients.current()
        settings = clients.settings
        self.loop = asyncio.get_running_loop()
        self.service = options.service
        self.pool = clients.pool(options.service, options.transport or settings.transport)
        self.router = router
        self.deadlines = Deadlines.current()
        self.timeout_s = settings.request_timeout_s if options.timeout_s is None else options.timeout_s
        self.queued = 0
        self.typical_s = 0.0
        """How long a unary call takes at a replica, by a moving average."""
        self._own_bound = options.max_queued_requests
        self._default_bound = settings.max_queued_requests
        self._metrics = metrics
        self._target = (options.service,)
        self._ok = (options.service, "ok")
        router.node = settings.node
        self.pool.watch(router)
        # The target's series are there before the first call: a panel shows 0 rather than nothing.
        metrics.queued.inc(self._target, 0)
        metrics.handle_requests.inc(self._ok, 0)
        metrics.handle_ejections.inc(self._target, 0)
        for reason in RETRY_REASONS:
            metrics.handle_retries.inc((self.service, reason), 0)

    def is_current(self) -> bool:
        """Whether the running loop, and so the thread, is the one that this binding belongs to."""
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    # ---- the line

    @property
    def max_queued(self) -> int:
        """How many calls may wait: the handle's own bound, else the service's, else this process's; -1 = no bound."""
        if self._own_bound is not None:
            return self._own_bound
        said = self.pool.listing.max_queued_requests
        return self._default_bound if said is None else said

    def patience(self, remaining: float, *, returned: bool) -> float:
        """How many seconds a call with `remaining` seconds left may wait in line. Raises Backpressure or NoReplica when
        the line is full, except for a call that has `returned` after a replica refused it: its place counted already.

        The wait ends before the deadline, so that the caller receives the reason and a call that starts can still
        finish: in an overload, work that ends after its deadline would crowd out work that is in time.
        """
        limit = self.max_queued
        if 0 <= limit <= self.queued and not returned:
            raise self.refusal(f"{self.queued} calls wait already (max_queued_requests = {limit})")
        margin = max(min(0.05, 0.1 * remaining), min(1.5 * self.typical_s, 0.5 * remaining))
        return max(0.0, remaining - margin)

    def joined(self, calls: int) -> None:
        """Count a call that joined the line, or -1 for one that left it."""
        self.queued += calls
        self._metrics.queued.inc(self._target, calls)

    def refusal(self, why: str) -> Backpressure | NoReplica:
        """The error of a call for which there is no replica."""
        hopeless = self.pool.hopeless()
        if hopeless is not None:
            return hopeless
        what = f"{self.pool.describe()}; {why}; try later"
        if self.pool.has_callable:
            return Backpressure(f"every replica of {self.service} is full: {what}")
        return NoReplica(f"no replica of {self.service} can be called: {what}")

    # ---- what calls report

    def succeeded(self, seconds: float) -> None:
        """Count a call that succeeded."""
        self._metrics.handle_requests.inc(self._ok)
        self._metrics.handle_duration.observe(self._target, seconds)

    def ended(self, outcome: str, seconds: float) -> None:
        """Count a call, however it ended."""
        self._metrics.handle_requests.inc((self.service, outcome))
        self._metrics.handle_duration.observe(self._target, seconds)

    def took(self, seconds: float) -> None:
        """Record how long a call was at a replica."""
        self.typical_s += 0.1 * (seconds - self.typical_s)

    def retried(self, reason: str) -> None:
        """Count a call that goes to another replica."""
        self._metrics.handle_retries.inc((self.service, reason))
