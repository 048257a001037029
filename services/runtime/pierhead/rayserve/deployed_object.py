"""One replica's object of user code: it is constructed, called, reconfigured, checked and ended here.

Used by both ends: replicas of `serve.run`, which share a process, and those in containers of their own.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, closing, contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Final

from pierhead.classes.threads import allow_more_threads, in_thread_of
from pierhead.raised import as_holdable, is_answerable
from pierhead.rayserve.context import (
    REPLICAS,
    ReplicaContext,
    _RequestContext,
    cancel_children,
    enter_replica,
)
from pierhead.rayserve.daemon_threads import DaemonThreads
from pierhead.rayserve.deployment import ASGI, BUILD_ASGI, END_METHOD, BuiltDeployment
from pierhead.rayserve.exceptions import RayError, RayServeException, RequestCancelledError
from pierhead.rayserve.items import END, ItemQueue
from pierhead.rayserve.lifespan import Lifespan
from pierhead.rayserve.multiplex import close_models

logger = logging.getLogger("ray.serve")

_MOST_THREADS: Final = 1000


class DeployedObject:
    """The user's object, in the context of its replica. Belongs to one event loop."""

    def __init__(self, built: BuiltDeployment, context: ReplicaContext) -> None:
        self.built = built
        self._shares_process = context._shares_process
        self.context = context
        self.app: Any = None
        """The ASGI application of a class with `@serve.ingress`."""
        self._object: Any = None
        self._lifespan: Lifespan | None = None
        self._ended = False
        self._requests: set[asyncio.Task[Any]] = set()
        # One more than requests: those of slow readers do not hold up `check_health`.
        most = min(_MOST_THREADS, built.options.max_ongoing_requests + 1)
        self._threads = DaemonThreads(most, f"rayserve-{built.name}")

    # ---- life

    async def start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], user_config: Any) -> None:
        """Construct the object, start its ASGI application and hand over the settings. Raises what user code raises."""
        REPLICAS.append(self.context)
        try:
            await self._inside(self._start, args, kwargs, user_config)
        except BaseException:
            REPLICAS.remove(self.context)
            raise

    async def _start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], user_config: Any) -> None:
        definition: Any = self.built.deployment.func_or_class
        if inspect.isfunction(definition):
            self._object = self.context.servable_object = definition
        else:
            made: Any = definition.__new__(definition)
            await _awaited(made.__init__(*args, **kwargs))
            self._object = self.context.servable_object = made
            if hasattr(definition, ASGI):
                await self._start_asgi(definition)
        await self._reconfigure(user_config)

    async def _start_asgi(self, definition: Any) -> None:
        build = getattr(self._object, BUILD_ASGI, None)
        if build is not None:
            self.app = await _awaited(build())
            if self.app is None:
                raise TypeError(f"`{BUILD_ASGI}` must return an ASGI app.")
        else:
            app = getattr(definition, ASGI)
            self.app = app() if inspect.isfunction(app) else app
        if self._shares_process:  # else the process has allowed them
            allow_more_threads(self.built.options.max_ongoing_requests)
        self._lifespan = Lifespan(self.app)
        await self._lifespan.start()

    async def close(self) -> None:
        """End the application, the object (`__del__`) and its models. Requests that still run are cancelled."""
        self._ended = True
        for task in self._requests:
            task.cancel()
        try:
            await self._inside(self._close)
        finally:
            with suppress(ValueError):  # it has not started
                REPLICAS.remove(self.context)
            self._threads.close()

    async def _close(self) -> None:
        if self._lifespan is not None:
            await self._lifespan.stop()
            if self._shares_process:
                allow_more_threads(-self.built.options.max_ongoing_requests)
        end = getattr(self._object, "__del__", None) or getattr(self._object, END_METHOD, None)
        if end is not None and not inspect.isfunction(self._object):
            try:
                await _awaited(end())
            except BaseException as error:
                if not is_answerable(error):
                    raise
                logger.exception("%s: __del__ raised", self.built.name)
            _without_del(self._object)
        await close_models(self.context)

    async def reconfigure(self, user_config: Any) -> None:
        """Hand over settings. Raises what user code raises, and RayServeException where it cannot take any."""
        await self._inside(self._reconfigure, user_config)

    async def _reconfigure(self, user_config: Any) -> None:
        hook = None if inspect.isfunction(self._object) else getattr(self._object, "reconfigure", None)
        wants_rank = hook is not None and "rank" in inspect.signature(hook).parameters
        if user_config is None and not wants_rank:
            return
        if inspect.isfunction(self._object):
            raise ValueError("deployment_def must be a class to use user_config or rank")
        if hook is None:
            raise RayServeException(
                f"user_config or rank specified but deployment {self.context.replica_id.deployment_id} missing "
                "reconfigure method"
            )
        named = {"rank": self.context.rank} if wants_rank else {}
        await self._run(hook, (user_config,), named)

    async def check_health(self) -> None:
        """The user's `check_health`, where there is one. Raises what it raises. Cancellation waits for no thread."""
        check = getattr(self._object, "check_health", None)
        if check is not None and not inspect.isfunction(self._object):
            checking = asyncio.create_task(self._inside(self._run, check, (), {}))
            try:
                await asyncio.shield(checking)
            finally:
                checking.cancel()

    async def report_stats(self, put: Callable[[Mapping[str, Any]], None]) -> None:
        """Hand over what the user's `record_routing_stats` returns, for request routers, until cancelled."""
        config = self.built.options.request_router_config
        hook = getattr(self._object, "record_routing_stats", None)
        if config is None or hook is None or inspect.isfunction(self._object):
            return
        while True:
            await asyncio.sleep(config.request_routing_stats_period_s)
            if self._ended:
                return
            try:
                async with asyncio.timeout(config.request_routing_stats_timeout_s):
                    put(await self._inside(self._run, hook, (), {}) or {})
            except BaseException as error:
                if not is_answerable(error):
                    raise
                logger.exception("%s: record_routing_stats failed", self.built.name)

    # ---- calls

    async def call(self, call: _RequestContext, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a method. Raises what it raises, and TypeError for a generator."""
        return await self.work_on(call, self._call, call.call_method, args, kwargs)

    async def _call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        method = self._method(name)
        if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
            raise _is_a_generator(name)
        result = await self._run(method, args, kwargs)
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise _is_a_generator(name)
        return result

    async def stream(
        self, call: _RequestContext, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AsyncIterator[Any]:
        """The items that a method yields. Raises what it raises, and TypeError for one that yields nothing."""
        with self._of_request(call):
            items = await self._coroutine(self._items, (call.call_method, args, kwargs))
            async with AsyncExitStack() as ends:
                if hasattr(items, "aclose"):
                    await ends.enter_async_context(aclosing(items))
                while (item := await self._coroutine(anext, (items, END))) is not END:
                    yield item

    async def _items(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AsyncIterator[Any]:
        result = self._method(name)(*args, **kwargs)
        if inspect.iscoroutine(result):
            result = await result
        if inspect.isgenerator(result):
            return self._from_thread(result)
        if not hasattr(result, "__anext__"):
            raise TypeError(
                f"Called method '{name}' with `handle.options(stream=True)` but it did not return a generator."
            )
        found: AsyncIterator[Any] = result
        return found

    async def _from_thread(self, generator: Any) -> AsyncIterator[Any]:
        """The items of a generator, all of it in one thread, which waits for its reader."""
        loop, items = asyncio.get_running_loop(), ItemQueue()

        def fill() -> None:
            try:
                with closing(generator):
                    for item in generator:
                        items.put_from_thread(loop, item)
            finally:
                loop.call_soon_threadsafe(items.end)

        filling = asyncio.create_task(self._coroutine(self._in_thread, (fill,)))
        try:
            while (item := await items.get()) is not END:
                yield item
            await filling
        finally:
            items.leave()
            if not filling.done():
                filling.cancel()
                await asyncio.wait([filling])

    async def plain(self, request: Any) -> Any:
        """What the function or `__call__` returns for a Starlette request. Within `work_on`."""
        method = self._method("__call__")
        args = (request,) if inspect.signature(method).parameters else ()
        if inspect.isgeneratorfunction(method):
            logger.warning(
                "%s: the items of a generator are not sent, as in Ray Serve: return a StreamingResponse",
                self.built.name,
            )
            await self._in_thread(deque, method(*args), 0)
            return None
        if inspect.isasyncgenfunction(method):
            return method(*args)
        return await self._run(method, args, {})

    # ---- user code

    def _method(self, name: str) -> Callable[..., Any]:
        if inspect.isfunction(self._object):
            return self._object
        method = getattr(self._object, name, None)
        if method is None:
            public = [each for each in dir(self._object) if not each.startswith("__")]
            methods = [each for each in public if callable(getattr(self._object, each, None))]
            raise RayServeException(
                f"Tried to call a method '{name}' that does not exist. Available methods: {methods}."
            )
        found: Callable[..., Any] = method
        return found

    async def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function: a `def` in a thread, anything else here."""
        is_plain = inspect.isfunction(function) or inspect.ismethod(function)
        kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
        if is_plain and not any(is_kind(function) for is_kind in kinds):
            result = await self._in_thread(function, *args, **kwargs)
        else:
            result = function(*args, **kwargs)
        return await result if inspect.iscoroutine(result) else result

    async def _in_thread(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A function in a thread. Cancellation waits for its end: until then its request is in flight."""
        return await in_thread_of(self._threads.submit, partial(function, *args, **kwargs))

    async def work_on(self, request: _RequestContext, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Run a coroutine function as user code of a request, whose task this is."""
        with self._of_request(request):
            return await self._coroutine(function, args)

    @contextmanager
    def _of_request(self, request: _RequestContext) -> Iterator[None]:
        """The running task works on a request; the request's own calls are cancelled with it."""
        enter_replica(self.context, request)
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - as of every coroutine
        self._requests.add(task)
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit) as error:
            cancel_children()
            if isinstance(error, asyncio.CancelledError) and self._ended and task.uncancel() == 0:
                raise RequestCancelledError(request.request_id) from None
            raise
        finally:
            self._requests.discard(task)

    async def _inside(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Run a coroutine function as user code without a request."""
        context = copy_context()
        context.run(enter_replica, self.context)
        return await asyncio.get_running_loop().create_task(self._coroutine(function, args), context=context)

    async def _coroutine(self, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> Any:
        try:
            return await as_holdable(function, *args)
        except SystemExit as error:
            if not self._shares_process:
                raise
            raise RayError(f"{self.built.name}: user code raised {error!r}") from error


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _is_a_generator(name: str) -> TypeError:
    return TypeError(
        f"Method '{name}' returned a generator. You must use `handle.options(stream=True)` to call generators on a "
        "deployment."
    )


def _without_del(found: Any) -> None:
    """Make the garbage collector call no `__del__` of this object: it has run."""
    kind = type(found)
    try:
        found.__class__ = type(kind.__name__, (kind,), {"__del__": lambda _: None, "__module__": kind.__module__})
    except (AttributeError, TypeError):
        logger.debug("%s keeps its __del__", kind.__name__)
