"""Finds policies by name or import path: the runtime's own, and the policies that users register."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, cast

from pierhead.policies.balanced import LeastOngoing, PowerOfTwo, RoundRobin
from pierhead.policies.engine_load import EngineLoad
from pierhead.policies.policy import Policy
from pierhead.policies.prefix import PrefixAware
from pierhead.policies.session import ConsistentHash

Make = Callable[..., Policy]
"""Takes a random.Random, and the policy's keyword arguments."""

_REGISTRY: dict[str, Make] = {}


def register_policy(name: str, make: Callable[..., Policy]) -> None:
    """Make a policy known to `handle(..., policy=name)`. Each handle gets an object of its own, created with a
    random.Random and the keyword arguments in `policy_kwargs`.
    """
    known = _REGISTRY.get(name)
    if known is not None and not _is_reloaded(known, make):
        raise ValueError(f'policy "{name}" is already registered')
    if not name or ":" in name:
        raise ValueError(f'policy: expected a name without a colon, which marks an import path, found "{name}"')
    _REGISTRY[name] = make


def _is_reloaded(known: Callable[..., Policy], make: Callable[..., Policy]) -> bool:
    """Whether a module that was imported again, as by `python -m pierhead dev`, registers its policy again."""
    if known is make:
        return False
    return all(getattr(known, key, known) == getattr(make, key, make) for key in ("__module__", "__qualname__"))


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
    if not callable(getattr(made, "choose", None)):
        raise ValueError(  # noqa: TRY004 - of the argument, not of a type
            f'policy "{policy}": expected an object with a method `choose(candidates, call)`, found {made!r}'
        )
    for hook in ("on_routed", "on_replica_gone"):
        if inspect.iscoroutinefunction(getattr(made, hook, None)):
            raise ValueError(
                f'policy "{policy}": expected a plain method {hook}, found an `async def`, which nothing would await'
            )
    return made


register_policy("power_of_two", PowerOfTwo)
register_policy("round_robin", RoundRobin)
register_policy("least_ongoing", LeastOngoing)
register_policy("consistent_hash", ConsistentHash)
register_policy("prefix", PrefixAware)
register_policy("engine_load", EngineLoad)
