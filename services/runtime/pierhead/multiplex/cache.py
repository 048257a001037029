"""An LRU cache of models: loads a model once for all callers, and evicts the least recently used one for another.

A model's life:

    WANTED ----------> LOADING ----------> LOADED -----------------------> UNLOADING ----> (gone)
      ^   it has a place    |  its load is over  |  unused, least recently      |  closed
      |                     |                    |  used, its place is needed   |
      |                     `-> (gone): failed   `                              |
      `-------------------------------------------------------------------------'  requested again

Models that are LOADING, LOADED or UNLOADING have a place each; WANTED ones wait for a place in order of arrival.
A model in use is never unloaded.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, ClassVar, Generic, TypeVar, cast

from pierhead import metrics as runtime_metrics
from pierhead.errors import Backpressure, Unavailable
from pierhead.held import HeldModels
from pierhead.raised import holdable, is_answerable
from pierhead.request import CURRENT

M = TypeVar("M")

logger = logging.getLogger("pierhead")

CLOSE_TIMEOUT_S = 30.0
"""How long a model's `aclose` or `close` may take; then its place goes to another model."""

PLACE_WAIT_S = 60.0
"""How long code outside a request waits for a place; a request waits for as long as its deadline allows."""


class ModelState(Enum):
    """Where a model is in its life."""

    WANTED = "waits for a place"
    LOADING = "is being loaded"
    LOADED = "is loaded"
    UNLOADING = "is being unloaded"


@dataclass(eq=False)
class Entry(Generic[M]):
    """One model of the cache."""

    model_id: str
    state: ModelState = ModelState.WANTED
    users: int = 0
    """Callers that use the model or wait for it."""
    model: M | None = None
    task: asyncio.Task[Any] | None = None
    waiters: set[asyncio.Future[None]] = field(default_factory=set)

    def wake(self, error: BaseException | None = None) -> None:
        """End the wait of all callers: it is loaded, or it failed with `error`."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None) if error is None else waiter.set_exception(holdable(error))


class ModelCache(Generic[M]):
    """The models of one multiplexed function. Belongs to one event loop at a time."""

    _all: ClassVar[weakref.WeakSet[ModelCache[Any]]] = weakref.WeakSet()

    def __init__(
        self,
        function: Callable[[str], Awaitable[M]],
        bound: int | None,
        name: str,
        metrics: runtime_metrics.RuntimeMetrics,
        held: HeldModels,
    ) -> None:
        """`bound` is how many models may have a place at a time; None = any number."""
        self.bound = bound
        self.entries: OrderedDict[str, Entry[M]] = OrderedDict()
        """Least recently used first."""
        self._queue: list[Entry[M]] = []
        self._function = function
        self._name = name
        self._label = (name,)
        self._metrics = metrics
        self._held = held
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._all.add(self)
        for metric in (
            metrics.multiplex_models,
            metrics.multiplex_loads,
            metrics.multiplex_load_failures,
            metrics.multiplex_unloads,
            metrics.multiplex_hits,
            metrics.multiplex_misses,
        ):
            metric.inc(self._label, 0)

    @classmethod
    def of_running_loop(cls) -> list[ModelCache[Any]]:
        """Every cache that belongs to the running loop."""
        loop = asyncio.get_running_loop()
        return [cache for cache in cls._all if cache._loop is loop]

    async def acquire(self, model_id: str) -> Entry[M]:
        """An entry whose model is loaded, in use until `release`. Raises the error of its load, and Backpressure."""
        self._bind()
        entry = self.entries.get(model_id)
        if entry is None:
            entry = self.entries[model_id] = Entry(model_id)
            self._queue.append(entry)
        loaded = self.acquire_loaded(model_id)
        if loaded is not None:
            return loaded
        self.entries.move_to_end(model_id)
        entry.users += 1
        self._metrics.multiplex_misses.inc(self._label)
        self._fill_places()
        try:
            await self._loaded(entry)
        except BaseException:
            self.release(entry)
            raise
        return entry

    def acquire_loaded(self, model_id: str) -> Entry[M] | None:
        """The same at once; None = the model is not loaded."""
        entry = self.entries.get(model_id)
        if entry is None or entry.state is not ModelState.LOADED:
            return None
        self.entries.move_to_end(model_id)
        entry.users += 1
        self._metrics.multiplex_hits.inc(self._label)
        return entry

    def release(self, entry: Entry[M]) -> None:
        """The caller of `acquire` no longer uses it."""
        entry.users -= 1
        if not entry.users and entry.state is ModelState.WANTED and self._knows(entry):
            self._queue.remove(entry)
            del self.entries[entry.model_id]
        self._fill_places()

    async def drop(self, model_id: str) -> bool:
        """Unload a model now, and return when it is gone; False if a caller uses it or waits for it."""
        entry = self.entries.get(model_id)
        if entry is not None and entry.state is ModelState.LOADED and not entry.users:
            self._unload(entry)
        if entry is not None and entry.state is ModelState.UNLOADING and entry.task is not None:
            await asyncio.wait([entry.task])
        return model_id not in self.entries

    async def close(self) -> None:
        """Unload every model, in use or not. Callers that wait for one get Unavailable."""
        for entry in self._forget():
            entry.wake(Unavailable(f'{self._name}: model "{entry.model_id}" is not loaded: the replica ends'))
            if entry.state is ModelState.LOADED:
                self._unload(entry)
            elif entry.state is ModelState.LOADING and entry.task is not None:
                entry.task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    # ---- inside

    def _bind(self) -> None:
        """Belong to the running loop. Models of a loop that has ended are dropped: they may be bound to it."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError(f"{self._name} works for another event loop: models belong to one loop at a time")
        for entry in self._forget():
            if entry.state is ModelState.LOADED:
                self._metrics.multiplex_models.inc(self._label, -1)
            if entry.state in (ModelState.LOADING, ModelState.LOADED):
                self._held.remove(entry.model_id)
        self._tasks = set()
        self._loop = loop

    def _forget(self) -> list[Entry[M]]:
        entries = list(self.entries.values())
        self.entries.clear()
        self._queue.clear()
        return entries

    def _fill_places(self) -> None:
        """Load the waiting models for which there are places, and evict unused models for the rest."""
        while self._queue and (self.bound is None or len(self.entries) - len(self._queue) < self.bound):
            self._load(self._queue.pop(0))
        if not self._queue:
            return
        ending = sum(entry.state is ModelState.UNLOADING for entry in self.entries.values())
        unused = [each for each in self.entries.values() if each.state is ModelState.LOADED and not each.users]
        for entry in unused[: max(0, len(self._queue) - ending)]:
            self._unload(entry)

    async def _loaded(self, entry: Entry[M]) -> None:
        """Wait until it is loaded. Raises Backpressure if it has no place shortly before the request's deadline."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        entry.waiters.add(waiter)
        timer = loop.call_later(_place_wait_s(), self._no_place, entry, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            entry.waiters.discard(waiter)

    def _no_place(self, entry: Entry[M], waiter: asyncio.Future[None]) -> None:
        if entry.state is ModelState.WANTED and not waiter.done():
            others = [each for each in self.entries.values() if each.state is not ModelState.WANTED]
            described = ", ".join(f"{each.model_id} {each.state.value}, users {each.users}" for each in others)
            waiter.set_exception(
                Backpressure(
                    f'{self._name}: no place became free in time for model "{entry.model_id}"; '
                    f"max_num_models_per_replica = {self.bound}: {described}; try later"
                )
            )

    def _load(self, entry: Entry[M]) -> None:
        entry.state = ModelState.LOADING
        self._held.add(entry.model_id)
        context = contextvars.copy_context()
        request = CURRENT.get()
        if request is not None:  # other callers wait too: the first one's deadline must not bound the load
            context.run(CURRENT.set, request._replace(deadline=inf, model_id=entry.model_id, session_id=None))
        started = time.monotonic()
        self._run(self._call(entry.model_id), context, entry, lambda task: self._load_ended(entry, started, task))

    async def _call(self, model_id: str) -> M:
        return await self._function(model_id)

    def _load_ended(self, entry: Entry[M], started: float, task: asyncio.Task[M]) -> None:
        error: BaseException | None
        if task.cancelled():
            error = RuntimeError(f'{self._name} was cancelled from within while it loaded "{entry.model_id}"')
        else:
            error = task.exception()
        if error is None:
            entry.model, entry.state = task.result(), ModelState.LOADED
            self._metrics.multiplex_loads.inc(self._label)
            self._metrics.multiplex_load_duration.observe(self._label, time.monotonic() - started)
            self._metrics.multiplex_models.inc(self._label)
            entry.wake()
            if not self._knows(entry):  # `close` ran first, and the load ignored its cancellation
                self._unload(entry)
            return
        self._held.remove(entry.model_id)
        if not self._knows(entry):
            return
        del self.entries[entry.model_id]
        self._metrics.multiplex_load_failures.inc(self._label)
        if not entry.users:
            logger.error(
                '%s: loading model "%s" failed; no caller waits for it', self._name, entry.model_id, exc_info=error
            )
        entry.wake(error)

    def _unload(self, entry: Entry[M]) -> None:
        self._held.remove(entry.model_id)
        self._metrics.multiplex_unloads.inc(self._label)
        self._metrics.multiplex_models.inc(self._label, -1)
        model, entry.model = cast("M", entry.model), None
        entry.state = ModelState.UNLOADING
        self._run(self._close(entry.model_id, model), contextvars.Context(), entry, lambda _: self._unloaded(entry))

    def _unloaded(self, entry: Entry[M]) -> None:
        if not self._knows(entry):
            return
        if entry.users:  # requested while it was unloaded
            entry.state = ModelState.WANTED
            self._queue.append(entry)
        else:
            del self.entries[entry.model_id]

    async def _close(self, model_id: str, model: M) -> None:
        """Close the model. A failure is only logged: no caller waits for it."""
        close = getattr(model, "aclose", None) or getattr(model, "close", None)
        if not callable(close):
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                result = close()
                if inspect.isawaitable(result):
                    await result
        except BaseException as error:
            if not is_answerable(error):
                raise
            logger.exception('%s: closing model "%s" failed; its place is given to another', self._name, model_id)

    def _run(
        self,
        work: Coroutine[Any, Any, Any],
        context: contextvars.Context,
        entry: Entry[M],
        ended: Callable[[asyncio.Task[Any]], None],
    ) -> None:
        """Run `work` as a task, and call `ended` when it has ended in any way."""
        task = asyncio.get_running_loop().create_task(work, context=context, name=f"{self._name} {entry.model_id}")
        entry.task = task
        self._tasks.add(task)

        def done(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            entry.task = None
            ended(task)
            self._fill_places()

        task.add_done_callback(done)

    def _knows(self, entry: Entry[M]) -> bool:
        return self.entries.get(entry.model_id) is entry


def _place_wait_s() -> float:
    """Seconds that the current request may wait for a place: until a moment before its deadline."""
    request = CURRENT.get()
    if request is None:
        return PLACE_WAIT_S
    remaining = request.remaining_s()
    return min(PLACE_WAIT_S, remaining - min(0.05, 0.1 * remaining))
