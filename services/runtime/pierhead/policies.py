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

import importlib
import inspect
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from random import Random
from typing import Any, Protocol, TypeVar, cast

from pierhead.hash_ring import BITS, HashRing, position


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
        """Numbers that it publishes (`pierhead.routing_stats`), by its newest word; {} where it tells nothing. Another
        object whenever it has told something new, so `is` says whether that is so.
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


class PowerOfTwo:
    """Draws two at random and takes the less loaded: nearly as even as asking all, and callers do not herd."""

    def __init__(self, rng: Random) -> None:
        self._random = rng.random

    def choose(self, candidates: Sequence[C], _: RoutedCall) -> C:
        """The less loaded of two; the first drawn when both are equal."""
        count = len(candidates)
        if count == 1:
            return candidates[0]
        first = int(self._random() * count)
        second = int(self._random() * (count - 1))
        if second >= first:
            second += 1
        one, other = candidates[first], candidates[second]
        return other if other.load < one.load else one


class RoundRobin:
    """Takes them in turn by name; replicas that come and go do not restart the round."""

    def __init__(self, _: Random) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[C], _: RoutedCall) -> C:
        """The first one after the one chosen last."""
        after = bisect_right(candidates, self._last, key=_name)
        chosen = candidates[after if after < len(candidates) else 0]
        self._last = chosen.name
        return chosen


class LeastOngoing:
    """Takes the least loaded of all; any of them when several are."""

    def __init__(self, rng: Random) -> None:
        self._random = rng.random

    def choose(self, candidates: Sequence[C], _: RoutedCall) -> C:
        """The least loaded one."""
        least = min(map(_load, candidates))
        equals = [candidate for candidate in candidates if candidate.load == least]
        return equals[int(self._random() * len(equals))]


class ConsistentHash:
    """Keeps each session at one replica, for what the replica remembers of it, as long as that one is not crowded.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018, arXiv:1608.01350): the session's
    place on the ring names its replica; one whose load has reached `ceil(BALANCE * calls / candidates)`, this call
    counted, is passed over for the next one on the ring. So no replica gets more than BALANCE times its share, and each
    session has a second choice of its own. Calls without a session go to a random place on the ring.
    """

    BALANCE = 1.25
    """How much more than its share of the calls a replica may have; what the paper calls 1 + epsilon."""

    NEVER_CROWDED = 2
    """A replica with fewer calls is never passed over. The paper's bound is 1 while there are fewer calls than
    replicas: a session would lose what its replica remembers because a single other call is there."""

    def __init__(self, rng: Random) -> None:
        self._getrandbits = rng.getrandbits
        self._ring = HashRing()

    def choose(self, candidates: Sequence[C], call: RoutedCall) -> C:
        """The first one from the session's place on that is not crowded."""
        ring = self._ring
        if not ring.names.issuperset(map(_name, candidates)):
            ring.add(map(_name, candidates))
        calls = sum(map(_load, candidates)) + 1
        bound = max(self.NEVER_CROWDED, math.ceil(self.BALANCE * calls / len(candidates)))
        session = call.session_id
        start = position(session) if session else self._getrandbits(BITS)
        for name in ring.walk(start):
            at = bisect_left(candidates, name, key=_name)
            # The ring also has those that are full or away just now.
            if at < len(candidates) and candidates[at].name == name and candidates[at].load < bound:
                return candidates[at]
        raise AssertionError("every candidate is at the bound, so there are more calls than there are")

    def on_replica_gone(self, name: str) -> None:
        """Take it off the ring."""
        self._ring.remove(name)


_name = attrgetter("name")
_load = attrgetter("load")

DEFAULT_POLICY = "power_of_two"
"""Where neither the handle nor the service says anything."""

Make = Callable[..., Policy]
"""Takes a random.Random, and the policy's keyword arguments."""

_REGISTRY: dict[str, Make] = {}


def register_policy(name: str, make: Callable[..., Policy]) -> None:
    """Make a policy known to `handle(..., policy=name)`. Each handle gets an object of its own, made with a
    random.Random and the keyword arguments that `policy_kwargs` gives.
    """
    if name in _REGISTRY:
        raise ValueError(f'policy "{name}" is already registered')
    if not name or ":" in name:
        raise ValueError(f'policy: expected a name without a colon, which marks an import path, found "{name}"')
    _REGISTRY[name] = make


def make_policy(policy: str, rng: Random, kwargs: Mapping[str, Any] | None = None) -> Policy:
    """A new policy object, of a registered name or of an import path `package.module:Class`; `kwargs` are its
    constructor's keyword arguments.

    Raises ValueError that says what was looked for and what there is.
    """
    if ":" in policy:
        return _made(policy, _imported(policy), rng, kwargs or {})
    make = _REGISTRY.get(policy)
    if make is None:
        known = ", ".join(sorted(_REGISTRY))
        raise ValueError(f'policy: expected one of {known}, or package.module:Class, found "{policy}"')
    return _made(policy, make, rng, kwargs or {})


def _imported(path: str) -> Make:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module's own code raises
        raise ValueError(
            f'policy "{path}": the module "{module_name}" cannot be imported: {type(error).__name__}: {error}'
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        has = ", ".join(name for name, value in vars(module).items() if hasattr(value, "choose")) or "none"
        what = f"no {attribute}" if found is None else f"{attribute} = {found!r}, which cannot be called"
        raise ValueError(  # noqa: TRY004 - of the argument, not of a type
            f'policy "{path}": expected a class {attribute} in {module.__file__ or module_name}, found {what}; '
            f"classes with a method `choose` there: {has}"
        )
    return cast("Make", found)


def _made(policy: str, make: Make, rng: Random, kwargs: Mapping[str, Any]) -> Policy:
    try:
        made = make(rng, **kwargs)
    except Exception as error:
        given = f" and policy_kwargs {json.dumps(dict(kwargs), default=repr)}" if kwargs else ""
        raise ValueError(
            f'policy "{policy}": made with one argument, a random.Random{given}, it raised '
            f"{type(error).__name__}: {error}"
        ) from error
    choose = getattr(made, "choose", None)
    if not callable(choose) or inspect.iscoroutinefunction(choose):
        raise ValueError(
            f'policy "{policy}": expected an object with a plain method `choose(candidates, call)`, found {made!r}'
        )
    return made


def _prefix_aware(rng: Random, **kwargs: Any) -> Policy:
    from pierhead.prefix_policy import PrefixAware  # which takes power of two from here

    return PrefixAware(rng, **kwargs)


def _engine_load(rng: Random, **kwargs: Any) -> Policy:
    from pierhead.engine_load_policy import EngineLoad  # likewise, and only where it is asked for

    return EngineLoad(rng, **kwargs)


register_policy("power_of_two", PowerOfTwo)
register_policy("round_robin", RoundRobin)
register_policy("least_ongoing", LeastOngoing)
register_policy("consistent_hash", ConsistentHash)
register_policy("prefix", _prefix_aware)
register_policy("engine_load", _engine_load)
