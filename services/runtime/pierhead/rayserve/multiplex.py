"""`@serve.multiplexed`: `pierhead.multiplexed` with Ray Serve's rules for who shares models, and how a model ends."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextvars import copy_context
from functools import wraps
from typing import Any, Final

from pierhead.multiplex.multiplexed import Multiplexed
from pierhead.rayserve.context import ReplicaContext, current_replica

_MODELS: Final = "__rayserve_models__"
"""The attribute of a replica's context that holds its models."""


class _LoadedModel:
    """A loaded model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._context = copy_context()

    async def aclose(self) -> None:
        """Call its `__del__`, at once; Python calls it later, in the same thread."""
        model, self.model = self.model, None
        end = getattr(model, "__del__", None)
        if inspect.iscoroutinefunction(end):
            await asyncio.get_running_loop().create_task(end(), context=self._context)
        elif end is not None:
            last = [end]
            del model, end
            await asyncio.get_running_loop().run_in_executor(None, self._context.run, _call_last, last)


def _call_last(functions: list[Callable[[], Any]]) -> None:
    """Call the function that the list alone refers to: its object goes in this thread, not after the next load."""
    functions.pop()()


def _models_of(load: Callable[..., Any], owner: Any, most: int) -> Multiplexed[_LoadedModel]:
    """The models of one object or function in this replica. One is loaded at a time, as in Ray Serve."""
    replica = current_replica()
    if replica is None:
        raise RuntimeError("`@serve.multiplexed` can only be used within a deployment.")
    by_owner: dict[int, Multiplexed[_LoadedModel]] = replica.__dict__.setdefault(_MODELS, {})
    # Two methods of one object share its models, as in Ray Serve.
    key = id(load if owner is None else owner)
    if key in by_owner:
        return by_owner[key]
    lock, own = asyncio.Lock(), () if owner is None else (owner,)

    async def loaded(model_id: str) -> _LoadedModel:
        async with lock:
            return _LoadedModel(await load(*own, model_id))

    models = by_owner[key] = Multiplexed(loaded, most, name=load.__qualname__, held=replica._reports.held)
    return models


async def close_models(replica: ReplicaContext) -> None:
    """Unload every model of a replica."""
    for models in getattr(replica, _MODELS, {}).values():
        await models.close()


def multiplexed(func: Callable[..., Any] | None = None, max_num_models_per_replica: int = 3) -> Any:
    """Keep the models that `async def load(self, model_id: str)` returns, at most this many; -1 = any number.

    Raises TypeError and ValueError for a function or a number that cannot work.
    """
    if func is not None:
        _check_function(func)
    if not isinstance(max_num_models_per_replica, int):
        raise TypeError("max_num_models_per_replica must be an integer.")
    if max_num_models_per_replica != -1 and max_num_models_per_replica <= 0:
        raise ValueError("max_num_models_per_replica must be positive.")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _check_function(function)

        @wraps(function)
        async def load(*args: Any) -> Any:
            if len(args) not in (1, 2):
                raise TypeError(f"The model ID must be the only argument of {function.__name__}")
            owner, model_id = (None, args[0]) if len(args) == 1 else args
            _check_id(model_id)
            async with _models_of(function, owner, max_num_models_per_replica)(model_id) as found:
                return found.model

        return load

    return decorate if func is None else decorate(func)


def _check_id(model_id: Any) -> None:
    if not isinstance(model_id, str):
        raise TypeError("The model ID must be a string.")
    if not model_id:
        raise ValueError("The model ID cannot be empty.")


def _check_function(function: Any) -> None:
    if not callable(function):
        raise TypeError("The `multiplexed` decorator must be used with a function or method.")
    if not inspect.iscoroutinefunction(function):
        raise TypeError("@serve.multiplexed can only be used to decorate async functions or methods.")
    if len(inspect.signature(function).parameters) not in (1, 2):
        raise TypeError(
            "@serve.multiplexed can only be used to decorate functions or methods with at least one 'model_id: str' "
            "argument."
        )
