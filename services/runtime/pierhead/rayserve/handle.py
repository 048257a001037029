"""Handles: calls of deployments from anywhere in the process, with or without an event loop.

    handle.method.remote(x) --> dispatcher of the deployment --> a replica, in this process or in another container

A dispatcher lives on one event loop. A response is a future of `concurrent.futures` around a task on that loop, so that
it can be awaited on every loop, and be waited for without one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import uuid
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pierhead.raised import is_answerable
from pierhead.rayserve.context import (
    CHILDREN,
    DEFAULT_APPLICATION,
    DeploymentID,
    _get_serve_request_context,
    _RequestContext,
)
from pierhead.rayserve.dispatch import Dispatcher, HandleCall, dispatcher_of, is_known
from pierhead.rayserve.exceptions import GetTimeoutError, RayServeException, RequestCancelledError
from pierhead.rayserve.items import END, ItemQueue
from pierhead.rayserve.options import DEFAULT

T = TypeVar("T")
R = TypeVar("R")


async def _resolved(call: HandleCall) -> HandleCall:
    """The call, with the result in the place of each response among its arguments."""
    waits: list[Any] = [each for each in (*call.args, *call.kwargs.values()) if isinstance(each, _Response)]
    if not waits:
        return call
    if any(isinstance(each, DeploymentResponseGenerator) for each in waits):
        raise RuntimeError(
            "Streaming deployment handle results cannot be passed to downstream handle calls: read the stream, and "
            "pass its items on."
        )
    results = dict(zip(map(id, waits), await asyncio.gather(*waits), strict=True))
    args = tuple(results.get(id(each), each) for each in call.args)
    return HandleCall(call.context, args, {name: results.get(id(each), each) for name, each in call.kwargs.items()})


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _reject_in_loop(instead: str) -> None:
    if _running_loop():
        raise RuntimeError(
            f"Sync methods should not be called from within an `asyncio` event loop. Use {instead} instead."
        )


async def _of(task: asyncio.Task[R]) -> R:
    return await task


class _Response(Generic[R]):
    """A call that has begun."""

    def __init__(self, dispatcher: Dispatcher, call: HandleCall, work: Any) -> None:
        self._loop = dispatcher.loop
        self._request = call.context
        self._cancelled = False
        self._begun: asyncio.Task[Any] | concurrent.futures.Future[Any]
        """A task where the call is made on the loop that runs it; else, for more, what every thread can wait for."""
        if _running_loop() is self._loop:
            self._begun = self._loop.create_task(work)
        else:
            self._begun = asyncio.run_coroutine_threadsafe(work, self._loop)
        siblings = CHILDREN.get()
        if siblings is not None:
            siblings.add(self._begun)
            self._begun.add_done_callback(siblings.discard)

    @property
    def request_id(self) -> str:
        """The id of the request that the call belongs to."""
        return self._request.request_id

    @property
    def by_reference(self) -> bool:
        """Always False: results travel as bytes."""
        return False

    def cancel(self) -> None:
        """Cancel the call, and what it has called. Later uses of the response raise RequestCancelledError."""
        if not self._cancelled:
            self._cancelled = True
            self._loop.call_soon_threadsafe(self._begun.cancel)

    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled or self._begun.cancelled()

    @property
    def _future(self) -> concurrent.futures.Future[Any]:
        """For other threads."""
        if isinstance(self._begun, asyncio.Task):
            self._begun = asyncio.run_coroutine_threadsafe(_of(self._begun), self._loop)
        return self._begun

    def _here(self) -> asyncio.Future[Any]:
        """For the running loop."""
        if isinstance(self._begun, asyncio.Task) and asyncio.get_running_loop() is self._loop:
            return self._begun
        return asyncio.wrap_future(self._future)

    async def _to_object_ref(self) -> Any:
        raise _no_references()

    def _to_object_ref_sync(self, *_: Any, **__: Any) -> Any:
        raise _no_references()


def _no_references() -> Exception:
    return RayServeException("there is no object store, and so no ObjectRef: pass the response itself on")


class DeploymentResponse(_Response[R]):
    """The result of a call: await it, call `result()`, or pass it on as an argument."""

    def __await__(self) -> Generator[Any, None, R]:
        return self._wait().__await__()

    async def _wait(self) -> R:
        try:
            # A wait that is cancelled (a timeout) does not change the call.
            result: R = await asyncio.shield(self._here())
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._begun.cancelled() and not (task is not None and task.cancelling()):
                raise RequestCancelledError(self.request_id) from None
            raise  # the caller itself is cancelled
        return result

    def result(self, *, timeout_s: float | None = None, _skip_asyncio_check: bool = False) -> R:
        """Wait for the result. Raises TimeoutError, and RuntimeError within an event loop: await it there."""
        if not _skip_asyncio_check:
            _reject_in_loop("`await response`")
        try:
            result: R = self._future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise RequestCancelledError(self.request_id) from None
        except TimeoutError:
            if self._future.done():
                raise  # the call's own
            raise GetTimeoutError("Timed out waiting for result.") from None
        return result

    def __reduce__(self) -> Any:
        raise RayServeException(
            "`DeploymentResponse` is not serializable. If you are passing the `DeploymentResponse` in a nested object "
            "(e.g. a list or dictionary) to a downstream deployment handle call, that is no longer supported. Please "
            "only pass `DeploymentResponse` objects as top level arguments."
        )


async def _result(dispatcher: Dispatcher, call: HandleCall) -> Any:
    return await dispatcher.call(await _resolved(call))


async def _fill(items: ItemQueue, dispatcher: Dispatcher, call: HandleCall) -> None:
    try:
        async with aclosing(dispatcher.stream(await _resolved(call))) as stream:  # type: ignore[type-var]
            async for item in stream:
                await items.put(item)
    except BaseException as error:
        if not is_answerable(error):
            raise
        items.error = error
    finally:
        items.end()


class DeploymentResponseGenerator(_Response[R]):
    """The results of a streaming call: an iterator, and an async iterator."""

    def __init__(self, dispatcher: Dispatcher, call: HandleCall) -> None:
        self._items = ItemQueue()
        super().__init__(dispatcher, call, _fill(self._items, dispatcher, call))

    def __del__(self) -> None:
        # Nobody can iterate any more.
        begun = getattr(self, "_begun", None)
        if begun is not None and not begun.done() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(begun.cancel)

    def cancel(self) -> None:
        """See DeploymentResponse."""
        super().cancel()
        self._loop.call_soon_threadsafe(self._items.end)

    async def _next(self) -> Any:
        """The next item, or END. On the dispatcher's loop."""
        item = await self._items.get()
        if item is not END:
            return item
        self._items.end()  # for the one that asks again
        if self.cancelled():
            raise RequestCancelledError(self.request_id)
        if self._items.error is not None:
            raise self._items.error
        return END

    def __await__(self) -> Any:
        raise TypeError(
            "`DeploymentResponseGenerator` cannot be awaited directly. Use `async for` or `await "
            "response.__anext__()` instead."
        )

    def __aiter__(self) -> AsyncIterator[R]:
        return self

    async def __anext__(self) -> R:
        if asyncio.get_running_loop() is self._loop:
            item = await self._next()
        else:
            item = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._next(), self._loop))
        if item is END:
            raise StopAsyncIteration
        found: R = item
        return found

    def __iter__(self) -> Iterator[R]:
        return self

    def __next__(self) -> R:
        _reject_in_loop("`async for` or `await response.__anext__()`")
        item = asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()
        if item is END:
            raise StopIteration
        found: R = item
        return found

    def result(self, **_: Any) -> Any:
        """Raises TypeError: a stream is iterated over."""
        raise TypeError(
            "`DeploymentResponseGenerator` doesn't support `.result()`. Use iteration instead: `for item in response` "
            "(outside deployments) or `async for item in response` (inside deployments)."
        )


class DeploymentBroadcastResponse:
    """The results of a call of every replica."""

    def __init__(self, dispatcher: Dispatcher, work: Any) -> None:
        self._future: concurrent.futures.Future[list[Any]] = asyncio.run_coroutine_threadsafe(work, dispatcher.loop)

    def results(self, *, timeout_s: float | None = None, return_exceptions: bool = False) -> list[Any]:
        """Wait for all results. Raises the first error unless errors are to be returned, and TimeoutError."""
        _reject_in_loop("`await response.results_async()`")
        return self._checked(self._future.result(timeout_s), return_exceptions)

    async def results_async(self, *, timeout_s: float | None = None, return_exceptions: bool = False) -> list[Any]:
        """As `results`, to be awaited."""
        async with asyncio.timeout(timeout_s):
            found = await asyncio.shield(asyncio.wrap_future(self._future))
        return self._checked(found, return_exceptions)

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self.results_async().__await__()

    @staticmethod
    def _checked(found: list[Any], return_exceptions: bool) -> list[Any]:
        for each in found:
            if isinstance(each, BaseException) and not return_exceptions:
                raise each
        return found


@dataclass(frozen=True)
class _Chosen:
    """What `options` has set."""

    method_name: str = "__call__"
    multiplexed_model_id: str = ""
    session_id: str = ""
    stream: bool = False


class DeploymentHandle(Generic[T]):
    """Calls of one deployment: `handle.remote(x)` is the function or `__call__`, `handle.method.remote(x)` a method."""

    def __init__(
        self,
        deployment_name: str,
        app_name: str = DEFAULT_APPLICATION,
        *,
        _chosen: _Chosen | None = None,
        _handle_id: str | None = None,
        _dispatcher: Dispatcher | None = None,
    ) -> None:
        self._dispatcher = _dispatcher
        """What sends its calls; None = what is found by name."""
        self.deployment_id = DeploymentID(deployment_name, app_name)
        self.handle_id = _handle_id or uuid.uuid4().hex[:8]
        self._chosen = _chosen or _Chosen()

    @property
    def deployment_name(self) -> str:
        """The deployment's name."""
        return self.deployment_id.name

    @property
    def app_name(self) -> str:
        """The application's name."""
        return self.deployment_id.app_name

    @property
    def is_initialized(self) -> bool:
        """Whether the deployment is known here."""
        return is_known(self.deployment_id)

    def running_replicas_populated(self) -> bool:
        """Whether the deployment is known here."""
        return is_known(self.deployment_id)

    def options(
        self,
        *,
        method_name: Any = DEFAULT,
        multiplexed_model_id: Any = DEFAULT,
        session_id: Any = DEFAULT,
        stream: Any = DEFAULT,
        _prefer_local_routing: Any = DEFAULT,
        _by_reference: Any = DEFAULT,
        request_serialization: Any = DEFAULT,
        response_serialization: Any = DEFAULT,
    ) -> DeploymentHandle[T]:
        """The same handle with other options. Those of serialization and locality have no effect."""
        given = {
            "method_name": method_name,
            "multiplexed_model_id": multiplexed_model_id,
            "session_id": session_id,
            "stream": stream,
        }
        chosen = replace(self._chosen, **{name: value for name, value in given.items() if value is not DEFAULT})
        return DeploymentHandle(
            self.deployment_name,
            self.app_name,
            _chosen=chosen,
            _handle_id=self.handle_id,
            _dispatcher=self._dispatcher,
        )

    def __getattr__(self, name: str) -> DeploymentHandle[T]:
        if name.startswith("__") and name != "__call__":  # asked for by `copy`, `inspect` and the like
            raise AttributeError(name)
        return self.options(method_name=name)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a call. The result is a DeploymentResponse, or with `stream=True` a DeploymentResponseGenerator."""
        dispatcher = self._dispatcher or dispatcher_of(self.deployment_id)
        call = HandleCall(self._context(), args, kwargs)
        if self._chosen.stream:
            return DeploymentResponseGenerator(dispatcher, call)
        return DeploymentResponse(dispatcher, call, _result(dispatcher, call))

    def broadcast(self, method_name: str, *args: Any, **kwargs: Any) -> DeploymentBroadcastResponse:
        """Call a method of every replica."""
        dispatcher = self._dispatcher or dispatcher_of(self.deployment_id)
        call = HandleCall(replace(self._context(), call_method=method_name), args, kwargs)
        return DeploymentBroadcastResponse(dispatcher, dispatcher.broadcast(call))

    def shutdown(self) -> None:
        """Does nothing: connections belong to the process."""

    async def shutdown_async(self) -> None:
        """Does nothing: connections belong to the process."""

    def _init(self, **_: Any) -> None:
        """Does nothing: a handle needs no start."""

    def _context(self) -> _RequestContext:
        request = _get_serve_request_context()
        chosen = self._chosen
        return _RequestContext(
            request.request_id or str(uuid.uuid4()),
            request.route,
            request.app_name or self.app_name,
            chosen.multiplexed_model_id,
            chosen.session_id,
            chosen.method_name,
        )

    def __repr__(self) -> str:
        return f"DeploymentHandle(deployment='{self.deployment_name}')"

    def __reduce__(self) -> Any:
        return _handle, (self.deployment_name, self.app_name, self._chosen)


def _handle(deployment_name: str, app_name: str, chosen: _Chosen) -> DeploymentHandle[Any]:
    return DeploymentHandle(deployment_name, app_name, _chosen=chosen)
