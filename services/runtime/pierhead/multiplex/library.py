"""What loads and unloads models, and hands them out: the steps of a `Shelf` as tasks.

Whoever asks is woken when the model is loaded, or told why it cannot be. A task that loads belongs to all who wait for
it and is cancelled with the last of them; every task is owned by the library and its end is noticed however it ends.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import time
import weakref
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, ClassVar, Generic, TypeVar

from pierhead import metrics as runtime_metrics
from pierhead.errors import Backpressure, Unavailable
from pierhead.held import Held
from pierhead.multiplex.shelf import Entry, Shelf, State
from pierhead.request import CURRENT

M = TypeVar("M")

logger = logging.getLogger("pierhead")

CLOSE_TIMEOUT_S = 30.0
"""A model's `aclose` or `close` may take so long; then its place is given to another."""

PLACE_WAIT_S = 60.0
"""How long one who works on no request waits for a place; a request waits for as long as its deadline allows."""


class Library(Generic[M]):
    """The models of one multiplexed function. Belongs to one event loop at a time."""

    _all: ClassVar[weakref.WeakSet[Library[Any]]] = weakref.WeakSet()

    def __init__(
        self,
        function: Callable[[str], Awaitable[M]],
        bound: int | None,
        name: str,
        metrics: runtime_metrics.RuntimeMetrics,
        held: Held,
    ) -> None:
        self.shelf = Shelf(bound)
        self.name = name
        self._function = function
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
    def of_running_loop(cls) -> list[Library[Any]]:
        """Every library that belongs to the running loop."""
        loop = asyncio.get_running_loop()
        return [library for library in cls._all if library._loop is loop]

    async def acquire(self, model_id: str) -> Entry:
        """An entry whose model is loaded, counted as in use until `release`.

        Raises what loading it raised, and Backpressure when no place became free for it in time.
        """
        self._bind()
        entry = self.shelf.ask(model_id)
        if entry.state is State.LOADED:
            self._metrics.multiplex_hits.inc(self._label)
            return entry
        self._metrics.multiplex_misses.inc(self._label)
        self.go_on()
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        entry.waiters.add(waiter)
        timer = loop.call_later(_place_wait_s(), self._no_place, entry, waiter)
        try:
            await waiter
        except BaseException:
            self.release(entry)
            raise
        finally:
            timer.cancel()
            entry.waiters.discard(waiter)
        return entry

    def release(self, entry: Entry) -> None:
        """One who acquired it does not use it any more."""
        self.shelf.leave(entry)
        self.go_on()

    async def drop(self, model_id: str) -> bool:
        """Unload a model now, and return when it is gone; False where somebody uses it or waits for it."""
        step = self.shelf.drop(model_id)
        if step is not None:
            self._unload(step.entry)
        entry = self.shelf.entries.get(model_id)
        if entry is not None and entry.state is State.UNLOADING and entry.task is not None:
            await asyncio.wait([entry.task])
        return model_id not in self.shelf.entries

    def go_on(self) -> None:
        """Do what there is to do now."""
        while (step := self.shelf.next_step()) is not None:
            if step.state is State.LOADING:
                self._load(step.entry)
            elif step.state is State.UNLOADING:
                self._unload(step.entry)
            else:
                step.entry.task.cancel()

    async def close(self) -> None:
        """Unload every model, in use or not, and load none any more: those who wait for one get Unavailable."""
        for entry in self.shelf.clear():
            _wake(entry, Unavailable(f'{self.name}: model "{entry.model_id}" is not loaded any more: the replica ends'))
            if entry.state is State.LOADED:
                self._unload(entry)
            elif entry.task is not None and entry.state is not State.UNLOADING:
                entry.task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    # ---- inside

    def _bind(self) -> None:
        """Belong to the running loop. What was loaded in one that has ended is forgotten: it may be bound to that."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError(f"{self.name} works for another event loop: models belong to one loop at a time")
        for entry in self.shelf.clear():
            if entry.state is State.LOADED:
                self._metrics.multiplex_models.inc(self._label, -1)
            if entry.state in (State.LOADING, State.CANCELLING, State.LOADED):
                self._held.remove(entry.model_id)
        self._tasks = set()
        self._loop = loop

    def _load(self, entry: Entry) -> None:
        self._held.add(entry.model_id)
        context = contextvars.copy_context()
        request = CURRENT.get()
        if request is not None:  # others wait too: the deadline of the first one is not the model's
            context.run(CURRENT.set, request._replace(deadline=inf, model_id=entry.model_id, session_id=None))
        self._run(self._call(entry.model_id), context, entry, functools.partial(self._loaded, entry, time.monotonic()))

    async def _call(self, model_id: str) -> M:
        return await self._function(model_id)

    def _loaded(self, entry: Entry, started: float, task: asyncio.Task[M]) -> None:
        """Loading has ended, well or not."""
        error = self._error_of(entry, task)
        if error is None:
            self.shelf.loaded(entry, task.result())
            self._metrics.multiplex_loads.inc(self._label)
            self._metrics.multiplex_load_duration.observe(self._label, time.monotonic() - started)
            self._metrics.multiplex_models.inc(self._label)
            if self.shelf.knows(entry):
                _wake(entry, None)
            else:
                self._unload(entry)
            return
        self._held.remove(entry.model_id)
        failed = entry.state is State.LOADING and self.shelf.knows(entry)
        self.shelf.gone(entry, failed=failed)
        if failed:  # else nobody waited for it: who asked since then has it loaded anew
            self._metrics.multiplex_load_failures.inc(self._label)
            _wake(entry, error)

    def _error_of(self, entry: Entry, task: asyncio.Task[M]) -> BaseException | None:
        if task.cancelled():
            return RuntimeError(f'{self.name} was cancelled from within while it loaded "{entry.model_id}"')
        return task.exception()

    def _unload(self, entry: Entry) -> None:
        self._held.remove(entry.model_id)
        self._metrics.multiplex_unloads.inc(self._label)
        self._metrics.multiplex_models.inc(self._label, -1)
        model, entry.model = entry.model, None
        self._run(self._close(entry.model_id, model), contextvars.Context(), entry, lambda _: self.shelf.gone(entry))

    async def _close(self, model_id: str, model: Any) -> None:
        """Let the model go in its own way. Its failure is told in the log: there is nobody else to tell."""
        close = getattr(model, "aclose", None) or getattr(model, "close", None)
        if not callable(close):
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                result = close()
                if inspect.isawaitable(result):
                    await result
        except Exception:
            logger.exception('%s: closing model "%s" failed; its place is given to another', self.name, model_id)

    def _run(
        self, work: Any, context: contextvars.Context, entry: Entry, ended: Callable[[asyncio.Task[Any]], None]
    ) -> None:
        """Do `work` as a task, and go on when it has ended, however that was."""
        task = asyncio.get_running_loop().create_task(work, context=context, name=f"{self.name} {entry.model_id}")
        entry.task = task
        self._tasks.add(task)

        def done(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            entry.task = None
            ended(task)
            self.go_on()

        task.add_done_callback(done)

    def _no_place(self, entry: Entry, waiter: asyncio.Future[None]) -> None:
        if entry.state is State.WANTED and not waiter.done():
            others = [each for each in self.shelf.entries.values() if each.state is not State.WANTED]
            described = ", ".join(f"{each.model_id} {each.state.value}, users {each.users}" for each in others)
            waiter.set_exception(
                Backpressure(
                    f'{self.name}: no place became free in time for model "{entry.model_id}"; '
                    f"max_num_models_per_replica = {self.shelf.bound}: {described}; try later"
                )
            )


def _wake(entry: Entry, error: BaseException | None) -> None:
    for waiter in entry.waiters:
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)


def _place_wait_s() -> float:
    """Seconds that the current request may wait in line: it ends a moment before its deadline, and says why."""
    request = CURRENT.get()
    if request is None:
        return PLACE_WAIT_S
    remaining = request.remaining_s()
    return min(PLACE_WAIT_S, remaining - min(0.05, 0.1 * remaining))
