"""`handle()`: the caller's side of a call to another service."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import grpc

from pierhead.channel import HandleChannel
from pierhead.transports import TRANSPORTS

StubT = TypeVar("StubT")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}(:[0-9]{1,5})?")
"""What Compose takes for a service, as far as DNS does too, and a port where there is no Discovery."""


def handle(
    stub: Callable[[grpc.aio.Channel], StubT],
    service: str,
    *,
    policy: str = "power_of_two",
    timeout_s: float | None = None,
    max_queued_requests: int | None = None,
    transport: str | None = None,
) -> StubT:
    """The unchanged generated stub, on a channel that finds, balances, bounds and times calls to a service's replicas.

        ranker = handle(RankerStub, "ranker")                    # at import is fine: nothing is opened yet
        reply = await ranker.Rank(request, timeout=0.2)
        async for token in echo.Generate(request): ...

    - policy: how a replica is chosen; see `pierhead.policies`.
    - timeout_s: deadline of calls that give no `timeout`, in seconds; None = PIERHEAD_REQUEST_TIMEOUT_S. A call made
      while working on a request never gets longer than that request has left.
    - max_queued_requests: how many calls may wait for a replica with room; None = PIERHEAD_MAX_QUEUED_REQUESTS, -1 = no
      bound but the deadline. One more is refused with Backpressure.
    - transport: "lane" (calls to one replica share a stream) or "grpc" (plain gRPC); None = PIERHEAD_TRANSPORT. A
      replica that has no lanes is called by plain gRPC either way.

    Calls raise PierheadErrors: the callee's own, or NoReplica, Backpressure, DeadlineExceeded, ReplicaDied.
    Raises ValueError for an unknown policy or transport, and for what cannot be a service's name.
    """
    if _NAME.fullmatch(service) is None or int(service.partition(":")[2] or 0) > 65535:
        raise ValueError(f'service: expected a service\'s name, or name:port, found "{service}"')
    if transport is not None and transport not in TRANSPORTS:
        raise ValueError(f'transport: expected one of {", ".join(sorted(TRANSPORTS))}, found "{transport}"')
    return stub(
        HandleChannel(
            service, policy=policy, timeout_s=timeout_s, max_queued_requests=max_queued_requests, transport=transport
        )
    )
