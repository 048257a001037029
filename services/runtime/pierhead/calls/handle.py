"""`handle()`: the caller's side of a call to another service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import grpc

from pierhead.calls.binding import service_name
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients

StubT = TypeVar("StubT")


def handle(
    stub: Callable[[grpc.aio.Channel], StubT],
    service: str,
    *,
    policy: str | None = None,
    policy_kwargs: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    max_queued_requests: int | None = None,
    transport: str | None = None,
    prefer_local: bool = False,
    eject_outliers: bool = True,
) -> StubT:
    """The unchanged generated stub, on a channel that finds a service's replicas and balances, bounds and times calls.

        ranker = handle(RankerStub, "ranker")                    # at import is fine: nothing is opened yet
        reply = await ranker.Rank(request, timeout=0.2)
        async for token in echo.Generate(request): ...

    - policy: how a replica is chosen: "power_of_two", "round_robin", "least_ongoing", "consistent_hash" (keeps a
      session at one replica), "prefix" (the replica that has read most of the prompt), "engine_load" (by the load that
      engines report), a name from `register_policy`, or "my_package.my_module:MyPolicy"; see
      `pierhead.policies`. None = the `router` of the service's x-serve block, which the controller sends with every
      change; without one, "power_of_two".
    - policy_kwargs: keyword arguments of the policy's constructor; only with a `policy`.
    - timeout_s: deadline of calls without a `timeout`, in seconds; None = PIERHEAD_REQUEST_TIMEOUT_S. A call made
      while working on a request never gets more time than that request has left.
    - max_queued_requests: how many calls of this handle may wait for a replica with room, -1 = no bound but the
      deadline. Further calls are refused with Backpressure. None = `max_queued_requests` of the service's x-serve
      block, which the controller sends; without one, PIERHEAD_MAX_QUEUED_REQUESTS.
    - transport: "lane" (calls to one replica share a stream) or "grpc" (plain gRPC); None = PIERHEAD_TRANSPORT. A
      replica that has no lanes is called by plain gRPC either way.
    - prefer_local: choose among the replicas on this process's machine (PIERHEAD_NODE) while any of them has room.
      Worth it where the network between machines costs more than an uneven load: a near replica is filled up to its
      `max_ongoing_requests` before a call goes to another machine.
    - eject_outliers: leave a replica out for a while when its calls fail and others' do not; see
      `pierhead.calls.outliers`.

    Calls raise PierheadErrors: the callee's own, or NoReplica, Backpressure, DeadlineExceeded, ReplicaDied. A call that
    is no longer referenced is cancelled.
    Raises ValueError for an unknown policy or transport, for an impossible bound or timeout, and for an invalid service
    name.
    """
    return stub(
        HandleChannel(
            service_name(service),
            policy=policy,
            policy_kwargs=policy_kwargs,
            timeout_s=timeout_s,
            max_queued_requests=max_queued_requests,
            transport=transport,
            prefer_local=prefer_local,
            eject_outliers=eject_outliers,
        )
    )


def has_replica(service: str) -> bool:
    """Whether handles of this process may call a replica of a service now, full or not.

    The first call begins to watch the service; until the first listing arrives this is False. Call it within an event
    loop.
    """
    clients = Clients.current()
    return clients.pool(service, clients.settings.transport).has_callable
