"""Runs user code on an event loop in a thread of its own, so that blocking user code does not block the server.

    server's loop, main thread                    user's loop, its thread
    ports, admission, deadlines, answers          servicer methods, check_health, @batch, handles
         method(request, context)  -------------->  runs there, in the request's context
         result, exception, replies  <------------
         context, stream of requests  <----------  the method's use of its call

Python runs the code of one thread at a time. Code that waits (for a file, a driver, `time.sleep`, a library that
releases the GIL while it computes) blocks only its own loop; code that computes in Python shares the GIL with the
server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from pierhead.calls.clients import Clients, close_handles
from pierhead.classes.threads import allow_threads
from pierhead.edge.methods import Context, ServedMethod
from pierhead.errors import Unavailable
from pierhead.multiplex.multiplexed import close_models
from pierhead.replica.thread.crossing import Crossing, HandOver, Mailbox
from pierhead.replica.thread.user_context import UserContext, user_requests
from pierhead.settings import Settings

logger = logging.getLogger("pierhead")

T = TypeVar("T")

END_S = 2.0
"""How long user code may take to end once it is cancelled, after the whole drain."""


class UserLoop:
    """The thread, its loop, and the calls between the loops. Created, started, used and closed on the server's loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._here = Mailbox(asyncio.get_running_loop())
        self._there: Mailbox
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=self._main, name="pierhead-user", daemon=True)
        self._started = asyncio.Event()
        self._ended = asyncio.Event()
        self._failure: BaseException | None = None
        self._closing = False
        self._outstanding: set[Crossing[Any]] = set()

    async def start(self) -> None:
        """Start the thread; user code can run from then on."""
        self._thread.start()
        await self._started.wait()

    async def run(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run `function(*args)` on the user's loop, in this task's context; returns or raises what it does.

        Cancelling the caller cancels it and waits for its end. Raises Unavailable when the loop ends.
        """
        crossing = self._begin(function, *args)
        try:
            return await crossing.result()
        finally:
            self._outstanding.discard(crossing)

    def served(self, method: ServedMethod) -> ServedMethod:
        """The same method, which runs on the user's loop."""
        return dataclasses.replace(method, behaviour=self.wrap(method.behaviour))

    def wrap(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        """A method `behaviour(request or requests, context)` of any of the four kinds, which runs on the user's loop.

        Its context and its stream of requests are wrapped for that loop.
        """
        if inspect.isasyncgenfunction(behaviour):

            def stream(request: Any, context: Context) -> AsyncIterator[Any]:
                return self._replies(lambda: behaviour(*self._given(request, context)))

            return stream

        async def one(request: Any, context: Context) -> Any:
            return await self.run(behaviour, *self._given(request, context))

        return one

    async def lives(self) -> None:
        """Return when the loop was closed. Raises RuntimeError if user code has ended it."""
        await self._ended.wait()
        if not self._closing:
            raise RuntimeError(f"user code has ended its thread with {self._failure!r}") from self._failure

    async def close(self) -> None:
        """Fail the waits for user code with Unavailable, cancel it, and wait for its end, END_S at most.

        Its handles are closed. Code that does not end in time keeps running: the thread ends with the process.
        """
        if self._closing or not self._started.is_set():
            return
        self._closing = True
        self._abandon()
        self._there.post(self._stop.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._ended.wait()
        if self._ended.is_set():
            self._thread.join()
        else:
            where = self._where()
            logger.warning("user code has not ended %g s after it was cancelled and is left behind:\n%s", END_S, where)

    # ---- calls to the user's loop

    def _begin(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> Crossing[T]:
        if self._closing or self._ended.is_set():
            raise Unavailable("this replica is ending; call another")
        crossing = Crossing(self._here, self._there, function, *args)
        self._outstanding.add(crossing)
        return crossing

    async def _replies(self, start: Callable[[], AsyncIterator[T]]) -> AsyncIterator[T]:
        """The items of an async generator on the user's loop. Closing this stream cancels it and waits for its end."""
        stream: HandOver[T] = HandOver(self._here, self._there)
        crossing = self._begin(stream.fill, start)
        ended = False
        try:
            while (reply := await stream.next()) is not stream.END:
                yield reply
            ended = True
            await crossing.result()
        finally:
            if not ended:
                crossing.cancel()
                with suppress(asyncio.CancelledError, Exception):  # the exception in progress here is the one to raise
                    await crossing.result()
            self._outstanding.discard(crossing)

    def _given(self, request: Any, context: Context) -> tuple[Any, UserContext]:
        """A method's arguments, wrapped for the user's loop."""
        if hasattr(request, "__aiter__"):
            request = user_requests(request, self.back)
        return request, UserContext(context, self.back, self._there.post)

    # ---- calls back, from the user's loop

    async def back(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run `function(*args)` on the server's loop, for code on the user's loop."""
        return await Crossing(self._there, self._here, function, *args).result()

    # ---- the thread

    def _main(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._live())
        except BaseException as error:  # SystemExit too: `lives` raises it
            self._failure = error
        finally:
            self._here.post(self._after)

    async def _live(self) -> None:
        self._there = Mailbox(asyncio.get_running_loop())
        self._stop = asyncio.Event()
        Clients.use(self._settings)
        allow_threads(self._settings)
        self._here.post(self._started.set)
        try:
            await self._stop.wait()
        finally:
            await close_models()
            await close_handles()

    def _after(self) -> None:
        """The thread has ended: no outcome will arrive from it."""
        self._ended.set()
        self._abandon()

    def _abandon(self) -> None:
        for crossing in self._outstanding:
            crossing.abandon(Unavailable("this replica ended before it had finished the request; call another"))

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "no frame"
