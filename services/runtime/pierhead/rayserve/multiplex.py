"""`@serve.multiplexed`: models that are loaded when they are asked for, the least recently used one leaving."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Final

from pierhead.held import HELD
from pierhead.raised import is_answerable
from pierhead.rayserve.context import ReplicaContext, current_replica

logger = logging.getLogger("ray.serve")

_MODELS: Final = "__rayserve_models__"
"""The attribute of a replica's context that holds its models."""


class ReplicaModels:
    """The models of one object or function in a replica. One is loaded or unloaded at a time, as in Ray Serve."""

    def __init__(self, load: Callable[..., Any], owner: Any, most: int) -> None:
        HELD.begin()
        self._load = load
        self._owner = owner
        self._most = most
        self._models: OrderedDict[str, Any] = OrderedDict()
        self._loading: set[str] = set()
        self._lock = asyncio.Lock()

    def held(self) -> Iterable[str]:
        """The ids of models that are here or on their way."""
        return {*self._models, *self._loading}

    async def get(self, model_id: Any) -> Any:
        """A model; loads it if it is not here. Raises what the load raises, TypeError and ValueError for an id."""
        if not isinstance(model_id, str):
            raise TypeError("The model ID must be a string.")
        if not model_id:
            raise ValueError("The model ID cannot be empty.")
        if model_id in self._models:
            self._models.move_to_end(model_id)
            return self._models[model_id]
        self._loading.add(model_id)
        try:
            async with self._lock:
                if model_id in self._models:
                    return self._models[model_id]
                if 0 < self._most <= len(self._models):
                    await self._unload_one()
                owner = () if self._owner is None else (self._owner,)
                model = self._models[model_id] = await self._load(*owner, model_id)
                HELD.add(model_id)
                return model
        finally:
            self._loading.discard(model_id)

    async def close(self) -> None:
        """Unload every model."""
        while self._models:
            try:
                await self._unload_one()
            except BaseException as error:
                if not is_answerable(error):
                    raise
                logger.exception("a model could not be unloaded")

    async def _unload_one(self) -> None:
        """Unload the model that was used longest ago: its `__del__` is called at once, and by Python later."""
        model_id, model = self._models.popitem(last=False)
        HELD.remove(model_id)
        end = getattr(model, "__del__", None)
        if end is None:
            return
        if inspect.iscoroutinefunction(end):
            await end()
            return
        last = [end]
        del model, end
        await asyncio.get_running_loop().run_in_executor(None, _call_last, last)


def _call_last(functions: list[Callable[[], Any]]) -> None:
    """Call the function that the list alone refers to: its object goes in this thread, not after the next load."""
    functions.pop()()


def models_of(replica: ReplicaContext) -> list[ReplicaModels]:
    """What has loaded models in a replica."""
    return list(getattr(replica, _MODELS, {}).values())


def multiplexed(func: Callable[..., Any] | None = None, max_num_models_per_replica: int = 3) -> Any:
    """Keep the models that `async def load(self, model_id: str)` returns, at most so many; -1 = any number.

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
            replica = current_replica()
            if replica is None:
                raise RuntimeError("`@serve.multiplexed` can only be used within a deployment.")
            by_owner: dict[int, ReplicaModels] = replica.__dict__.setdefault(_MODELS, {})
            # Two methods of one object share its models, as in Ray Serve.
            key = id(function if owner is None else owner)
            if key not in by_owner:
                by_owner[key] = ReplicaModels(function, owner, max_num_models_per_replica)
            return await by_owner[key].get(model_id)

        return load

    return decorate if func is None else decorate(func)


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
