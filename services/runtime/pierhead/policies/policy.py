"""The interface of a policy, which chooses the replica for each call.

A policy is a class with one method, `choose(candidates, call)`. The candidates are the replicas that may be called now
and have room: never a draining, disconnected, ejected or full one, and at least one. The policy reads them and the
call, chooses, and does nothing else: no I/O, no clock, no logging. Its constructor receives the randomness.

`choose` returns one candidate, or ranked groups of them: a list of lists, best first. The call goes to the less loaded
of two of the first group that has a candidate; to the less loaded of two of all candidates if no group has one.

`choose` may be `async def`, for a policy that has to ask elsewhere (`pierhead.shared_store`). It is awaited once for a
call, before the call takes a replica, and until the call's deadline. Two differences follow:

- The candidates also include replicas that are full: they may have room when `choose` returns, and others none.
- The groups count until the call is at a replica: where those of one group are full, refuse or have gone, it goes to
  the next group, and at last to any replica. A call that has to wait in the queue takes its groups along.
- With `waits_for_named = True` in the class a call waits for the replicas of its groups, while one of them may be
  called; it holds up no call that waits for another replica.

A policy that keeps state about replicas may have two more methods, which are plain ones also with an `async def
choose`; a policy without them costs nothing more. The three are those that Ray Serve's request routers have:

    choose(candidates, call)      choose_replicas
    on_routed(candidate, call)    on_request_routed: the call goes to this candidate
    on_replica_gone(name)         on_replica_actor_died: no source lists the replica any more: drop its state. It may be
                                  called while a `choose` that was given the replica still waits

The constructor's keyword arguments are `policy_kwargs` of `handle`, or of the service's `x-serve.router`.

To use a policy: `register_policy("name", Class)` and `handle(..., policy="name")`, or without registering it
`handle(..., policy="my_package.my_module:MyPolicy")`; for all callers of a service, `x-serve.router.policy` of that
service takes such an import path, too. Each handle gets an object of its own, used in one event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar


class Candidate(Protocol):
    """A replica as a policy sees it."""

    @property
    def name(self) -> str:
        """The replica's name; unique among the candidates, which come sorted by it."""
        ...

    @property
    def load(self) -> int:
        """Calls in flight there: this process's own, plus other callers' by the replica's replies."""
        ...

    @property
    def models(self) -> frozenset[str]:
        """Ids of the models that it holds, by its last report; empty for a service that is not multiplexed."""
        ...

    @property
    def node(self) -> str:
        """The machine that it runs on; "" = unknown."""
        ...

    @property
    def stats(self) -> Mapping[str, float]:
        """The newest numbers that it publishes (`pierhead.routing_stats`); {} if it publishes none. New numbers are a
        new object, so `is` shows whether they have changed.
        """
        ...


class RoutedCall(Protocol):
    """A call as a policy sees it."""

    @property
    def path(self) -> str:
        """/package.Service/Method"""
        ...

    @property
    def request(self) -> Any:
        """The request message; None when requests are a stream, and once a stream of replies has begun."""
        ...

    @property
    def session_id(self) -> str | None:
        """`x-session-id` of the call's metadata, else of the request that the caller works on."""
        ...

    @property
    def model_id(self) -> str | None:
        """`x-multiplexed-model-id`, likewise."""
        ...


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    """Chooses a replica for one call."""

    def choose(self, candidates: Sequence[C], call: RoutedCall) -> Any:
        """One of `candidates`, which holds at least one and must not be changed; or ranked groups of them
        (`Sequence[Sequence[C]]`, best first); or, of an `async def`, an awaitable of either.
        """
        ...
