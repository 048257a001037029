"""`@multiplexed`: one replica serves many models, loads each on demand, and keeps the most recently used ones.

`cache.py` loads and unloads the models. `pierhead.held` reports to callers which models a replica holds.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast, overload

from pierhead import metrics as runtime_metrics
from pierhead.errors import BadRequest
from pierhead.held import HELD, HeldModels
from pierhead.multiplex.cache import Entry, ModelCache, ModelState
from pierhead.request import CURRENT, MODEL_KEY

M = TypeVar("M")


class ModelUse(Generic[M]):
    """A requested model: await it, or use it with `async with`. See `Multiplexed`."""

    __slots__ = ("_entry", "_model_id", "_models", "_task")

    def __init__(self, models: Multiplexed[M], model_id: str, task: asyncio.Task[Any]) -> None:
        self._models = models
        self._model_id = model_id
        self._task = task
        self._entry: Entry[M] | None = None

    def __await__(self) -> Generator[Any, None, M]:
        """The model; it is not unloaded before the requesting task has ended."""
        return self._models._keep(self._model_id, self._task).__await__()

    async def __aenter__(self) -> M:
        """The model; it is not unloaded before the block is left."""
        if self._entry is not None:
            raise RuntimeError("this use was entered already: call the multiplexed function again for another use")
        self._entry = await self._models._cache.acquire(self._model_id)
        return cast("M", self._entry.model)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entry is not None:
            self._models._cache.release(self._entry)


class Multiplexed(Generic[M]):
    """Loads models with one function and keeps the most recently used. Each instance of a class has its own models.

        model = await self.get_model()              # the current request's; in use until this task ends
        async with self.get_model("fr") as model:   # in use until the block ends

    The task is the one that calls `get_model(...)`: a request's, or a batch's. A model in use is never unloaded. Work
    that continues in another task should call `get_model` there.
    """

    def __init__(
        self,
        function: Callable[..., Awaitable[M]],
        max_num_models_per_replica: int,
        *,
        name: str | None = None,
        metrics: runtime_metrics.RuntimeMetrics | None = None,
        held: HeldModels = HELD,
    ) -> None:
        functools.update_wrapper(cast("Any", self), function)
        self._name = name or function.__qualname__
        self._attribute = function.__name__
        self._bound = max_num_models_per_replica
        self._metrics = metrics or runtime_metrics.PROCESS
        self._held = held
        self._function = function
        self._cache: ModelCache[M] = ModelCache(
            function, places(max_num_models_per_replica), self._name, self._metrics, held
        )
        self._kept: dict[asyncio.Task[Any], dict[str, Entry[M]]] = {}
        """The models that each task has awaited, until the task ends."""
        held.begin()

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, instance: Any, owner: type | None = None) -> Self:
        """The models of one instance, which holds them from then on."""
        if instance is None:
            return self
        function = self._function.__get__(instance)
        made = type(self)(function, self._bound, name=self._name, metrics=self._metrics, held=self._held)
        # Python finds the entry in the instance's dictionary before this descriptor.
        vars(instance)[self._attribute] = made
        return made

    def __call__(self, model_id: str | None = None) -> ModelUse[M]:
        """A model, which is loaded if necessary: await the result, or use it with `async with`.

        Without an id: the current request's model; raises BadRequest when it names none. Awaiting raises
        what the function raises, and Backpressure when no place became free in time.
        """
        if model_id is None:
            request = CURRENT.get()
            model_id = None if request is None else request.model_id
            if model_id is None:
                raise BadRequest(
                    f"{MODEL_KEY}: expected the id of a model in this header (HTTP) or metadata key (gRPC), found none"
                )
        elif not isinstance(model_id, str) or not model_id:
            raise ValueError(f"{self._name}: expected the id of a model, some text, found {model_id!r}")
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError(
                f"{self._name} was called outside of a task: a model is in use until the task that asked for it ends"
            )
        return ModelUse(self, model_id, task)

    @property
    def models(self) -> tuple[str, ...]:
        """The ids of the loaded models, least recently used first."""
        entries = self._cache.entries.values()
        return tuple(entry.model_id for entry in entries if entry.state is ModelState.LOADED)

    async def drop(self, model_id: str) -> bool:
        """Unload a model, and return when it is gone; False if a caller uses it or waits for it."""
        return await self._cache.drop(model_id)

    async def close(self) -> None:
        """Unload every model, in use or not."""
        await self._cache.close()

    async def _keep(self, model_id: str, task: asyncio.Task[Any]) -> M:
        """A model that is in use until `task` ends."""
        self._reject_more_than_fit(model_id, self._kept.get(task, {}))
        entry = await self._cache.acquire(model_id)
        model = cast("M", entry.model)
        if task.done():
            self._cache.release(entry)
            return model
        kept = self._kept.get(task)
        if kept is None:
            kept = self._kept[task] = {}
            task.add_done_callback(self._release_all)
        if model_id in kept:
            self._cache.release(entry)
        else:
            kept[model_id] = entry
        return model

    def _release_all(self, task: asyncio.Task[Any]) -> None:
        for entry in self._kept.pop(task).values():
            self._cache.release(entry)

    def _reject_more_than_fit(self, model_id: str, kept: dict[str, Entry[M]]) -> None:
        """Refuse a task that keeps every place and requests another model: it would wait for itself."""
        bound, known = self._cache.bound, self._cache.entries.get(model_id)
        if bound is None or len(kept) < bound or (known is not None and known.state is not ModelState.WANTED):
            return
        raise RuntimeError(
            f'{self._name}: this task keeps {", ".join(sorted(kept))} until it ends and asks for "{model_id}", but '
            f"max_num_models_per_replica is {bound}: raise that, or release models earlier with `async with`"
        )


def multiplexed(*, max_num_models_per_replica: int = 3) -> _MultiplexedDecorator:
    """Decorate `async def get_model(self, model_id: str) -> Model`, which loads a model.

        class Translator(TranslatorServicer):
            @multiplexed(max_num_models_per_replica=3)
            async def get_model(self, model_id: str) -> Model: ...

            async def Translate(self, request, context):
                model = await self.get_model()      # the model that x-multiplexed-model-id names

    - max_num_models_per_replica: models held at a time by each instance; models that are loading or unloading count.
      -1 = any number. When another model is requested, the least recently used one is evicted; its `aclose()` or
      `close()` is awaited.

    A model is loaded once for all waiting callers, several models concurrently. A failure raises in all of them and is
    not cached. Callers' handles send calls for a model to replicas that hold it.
    Raises ValueError and TypeError at import for a bound or a function that cannot work.
    """
    places(max_num_models_per_replica)
    return _MultiplexedDecorator(max_num_models_per_replica)


class _MultiplexedDecorator:
    """Typed twice: for a method and for a plain function."""

    def __init__(self, bound: int) -> None:
        self._bound = bound

    @overload
    def __call__(self, function: Callable[[str], Awaitable[M]]) -> Multiplexed[M]: ...
    @overload
    def __call__(self, function: Callable[[Any, str], Awaitable[M]]) -> Multiplexed[M]: ...

    def __call__(self, function: Callable[..., Awaitable[Any]]) -> Multiplexed[Any]:
        """Wrap the function."""
        if not inspect.iscoroutinefunction(function):
            raise TypeError(
                f"@multiplexed: {function.__qualname__} must be `async def`: it takes a model's id and loads the model"
            )
        return Multiplexed(function, self._bound)


async def close_models() -> None:
    """Unload every model that multiplexed functions of the running loop hold. `serve` does it at its end."""
    await asyncio.gather(*[cache.close() for cache in ModelCache.of_running_loop()])


def places(value: int) -> int | None:
    """The bound of a cache by `max_num_models_per_replica`. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise ValueError(f"max_num_models_per_replica: expected an integer >= 1, or -1 for any number, found {value!r}")
    return None if value == -1 else value
