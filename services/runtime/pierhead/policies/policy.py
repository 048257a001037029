"""Which replica gets a call.

A policy is a class with one method, `choose(candidates, call)`. It is asked with the replicas that may be called now
and have room: never with a draining, disconnected, ejected or full one, and never with none. It reads them and the
call, chooses one, and does nothing else: no I/O, no clock, no logging. Randomness is handed to its constructor.

A policy that keeps something of its own about replicas may have two more methods; one that has neither pays nothing.
The three are those that Ray Serve's request routers have:

    choose(candidates, call)      Ray's choose_replicas: but one replica, at once, and without awaiting
    on_routed(candidate, call)    on_request_routed: the call is given to this candidate now: the one that `choose` has
                                  just returned
    on_replica_gone(name)         on_replica_actor_died: no list has the replica any more: forget what is kept of it

A constructor's keyword arguments are what `policy_kwargs` says: of `handle`, or of the service's `x-serve.router`.

To use one: `register_policy("name", Class)` and `handle(..., policy="name")`, or without registering it
`handle(..., policy="my_package.my_module:MyPolicy")`; for all callers of a service, `x-serve.router.policy` of that
service takes such an import path, too. Each handle gets an object of its own, used in one event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar


class Candidate(Protocol):
    """What a policy may know of a replica."""

    @property
    def name(self) -> str:
        """The replica's name; unique among the candidates, which come sorted by it."""
        ...

    @property
    def load(self) -> int:
        """Calls in flight there: this process's own, plus what the replica's replies say of others'."""
        ...

    @property
    def models(self) -> frozenset[str]:
        """Ids of the models that it holds, by its own last word; empty for a service that is not multiplexed."""
        ...

    @property
    def node(self) -> str:
        """The machine that it runs on; "" = not known."""
        ...

    @property
    def stats(self) -> Mapping[str, float]:
        """Numbers that it publishes (`pierhead.routing_stats`), the newest ones; {} where it publishes nothing. New
        numbers are a new object, so `is` says whether they have changed.
        """
        ...


class RoutedCall(Protocol):
    """What a policy may know of the call it chooses for."""

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

    def choose(self, candidates: Sequence[C], call: RoutedCall) -> C:
        """One of `candidates`, which holds at least one and must not be changed."""
        ...
