"""Calls to a servicer in the same process, for tests and notebooks, with the behaviour of calls between containers.

generated stub -> handle's channel -> lane in memory -> edge -> servicer
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc

from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.classes.methods import served_methods
from pierhead.classes.service import Service
from pierhead.edge.admission import Admission
from pierhead.edge.edge import Edge
from pierhead.edge.methods import ServedMethod, methods_of
from pierhead.lanes.in_memory import LocalReplica
from pierhead.metrics import RuntimeMetrics
from pierhead.settings import Settings

StubT = TypeVar("StubT")

_NUMBERS = itertools.count(1)


def local(
    servicer: object,
    stub: Callable[[grpc.aio.Channel], StubT],
    *,
    timeout_s: float | None = None,
    max_queued_requests: int | None = None,
    max_ongoing_requests: int | None = None,
    settings: Settings | None = None,
) -> StubT:
    """The unchanged generated stub, on a channel to a servicer in this process.

        ranker = local(Ranker(model), RankerStub)
        reply = await ranker.Rank(request, timeout=0.2)

    - timeout_s, max_queued_requests: as for `handle`.
    - max_ongoing_requests: how many requests the servicer takes at a time; None = any number.
    - settings: the settings of the servicer's side, as for `serve`; None = the defaults.
    Calls raise the errors that they would raise from another container. `check_health` is not called. `close_handles`
    ends the tasks that calls have started; so does the end of the event loop.
    Raises TypeError for an object that is no generated servicer.
    """
    replica = _replica((servicer,), max_ongoing_requests, settings)
    name = f"{type(servicer).__name__}#{next(_NUMBERS)}"
    Clients.override(name, replica)
    channel = _LocalChannel(name, timeout_s=timeout_s, max_queued_requests=max_queued_requests, metrics=replica.metrics)
    channel.replica = replica
    return stub(channel)


@contextmanager
def override_handle(
    service: str, *servicers: object, max_ongoing_requests: int | None = None, settings: Settings | None = None
) -> Iterator[LocalReplica]:
    """While the block runs, calls of every handle to `service` go to servicers in this process.

        with override_handle("ranker", FakeRanker()):
            response = await client.get("/?user_id=7")      # of an application that created its handle at import

    Blocks may be nested; the inner one counts. Raises TypeError for an object that is no generated servicer.
    """
    replica = _replica(servicers, max_ongoing_requests, settings)
    before = Clients.override(service, replica)
    try:
        yield replica
    finally:
        Clients.override(service, before)


class _LocalChannel(HandleChannel):
    """Keeps its replica alive: calls find the replica by name, through a weak reference."""

    replica: LocalReplica


def _replica(
    servicers: tuple[object, ...], max_ongoing_requests: int | None, settings: Settings | None
) -> LocalReplica:
    """Servicers behind the edge of a replica that has no port. Raises TypeError for what is none."""
    admission = Admission(sys.maxsize if max_ongoing_requests is None else max_ongoing_requests)
    edge = Edge(settings or Settings(), admission, RuntimeMetrics())
    return LocalReplica([method for servicer in servicers for method in _methods(servicer)], edge)


def _methods(servicer: object) -> list[ServedMethod]:
    """Its methods; an object of a service's class also answers calls to the classes that it derives from, as a fake."""
    if not isinstance(servicer, Service):
        return methods_of(servicer)
    classes = [base for base in type(servicer).__mro__ if issubclass(base, Service) and base is not Service]
    return [method for cls in classes for method in served_methods(servicer, cls.__contract__)]
