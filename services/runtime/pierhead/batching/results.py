"""Delivers results to the callers of a batch: one each from a list, or many each from a generator that yields lists."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from pierhead.batching.run import Arrival, BatchRunner, RunningBatch
from pierhead.errors import Backpressure
from pierhead.raised import holdable
from pierhead.tasks import wake

T = TypeVar("T")
R = TypeVar("R")


class Ended(Enum):
    """The type of `ENDED`."""

    ENDED = "ended"


ENDED: Final = Ended.ENDED
"""A generator yields this for an item without further results, from then on: its caller's stream ends."""


READER_PATIENCE_S = 1.0
"""How long a batch waits in all for one slow reader: the other members wait with it."""


class ReaderTooSlow(Backpressure):
    """The caller of a batched stream did not read its results; the batch's other members continue."""

    kind = "reader_too_slow"


class _Caller(Arrival):
    """Waits for one result."""

    __slots__ = ("future",)

    def __init__(self, item: Any, rows: int, now: float) -> None:
        super().__init__(item, rows, now)
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            self.future.cancel()
        elif not self.future.done():
            self.future.set_exception(holdable(error))


class Batcher(BatchRunner[_Caller], Generic[T, R]):
    """What `@batch` makes of a function that returns a list: a call with one item waits for that item's result."""

    _function: Callable[[list[T]], Awaitable[Sequence[R]]]

    async def __call__(self, item: T) -> R:
        """Wait for `item`'s result. Cancelling removes only this item; errors go to every member."""
        member = _Caller(item, self._rows(item), self._clock())
        self._join(member)
        try:
            return await member.future  # type: ignore[no-any-return]
        except BaseException:  # an error of the batch, a cancellation, or the end of a coroutine that was dropped
            self._leave(member)
            raise

    async def _compute(self, batch: RunningBatch, members: list[_Caller]) -> None:
        results = await self._function([member.item for member in members])
        self._check(results, len(members), "return")
        for member, result in zip(members, results, strict=True):
            if not member.future.done():
                member.future.set_result(result)
            batch._settle(member)


class _ItemReader(Arrival):
    """Reads one item's results as they come."""

    __slots__ = ("awake", "behind_s", "buffer", "error", "over", "room")

    def __init__(self, item: Any, rows: int, now: float) -> None:
        super().__init__(item, rows, now)
        self.buffer: deque[Any] = deque()
        self.over = False
        """No more results are added to the buffer."""
        self.error: BaseException | None = None
        """What to raise after the buffer's last result."""
        self.awake: asyncio.Future[None] | None = None
        """The future that the reader waits for, if it waits."""
        self.room: asyncio.Future[None] | None = None
        """The future that the batch waits for while this reader is behind."""
        self.behind_s = 0.0
        """How long the batch has waited for this reader in all, in seconds."""

    def add(self, result: Any) -> None:
        """Add a result."""
        self.buffer.append(result)
        wake(self.awake)

    def end(self) -> None:
        """No more results."""
        self.over = True
        wake(self.awake)

    def fail(self, error: BaseException) -> None:
        if not self.over:
            self.error = error
            self.end()


class StreamBatcher(BatchRunner[_ItemReader], Generic[T, R]):
    """Runs one async generator over batches; calling it with one item returns the stream of that item's results.

    `@batch` replaces an async generator with this. Each list that it yields has one element per item, in the items'
    order: `ENDED` for an item without further results.
    """

    _function: Callable[[list[T]], AsyncIterator[Sequence[R | Ended]]]

    def __call__(self, item: T) -> AsyncGenerator[R, None]:
        """The results of one item. The first read joins a batch; closing removes the item."""
        return self._results(item, None)

    def begin(self, item: T) -> AsyncGenerator[R, None]:
        """As calling it, but the item joins a batch at once."""
        return self._results(item, self._joined(item))

    def _joined(self, item: T) -> _ItemReader:
        member = _ItemReader(item, self._rows(item), self._clock())
        self._join(member)
        return member

    async def _results(self, item: T, joined: _ItemReader | None) -> AsyncGenerator[R, None]:
        member = joined or self._joined(item)
        try:
            while True:
                if member.buffer:
                    result = member.buffer.popleft()
                    wake(member.room)
                    yield result
                elif not member.over:
                    member.awake = asyncio.get_running_loop().create_future()
                    await member.awake
                elif member.error is not None:
                    raise member.error
                else:
                    return
        finally:
            member.buffer.clear()
            self._leave(member)
            wake(member.room)

    async def _compute(self, batch: RunningBatch, members: list[_ItemReader]) -> None:
        running = self._function([member.item for member in members])
        try:
            async for results in running:
                self._check(results, len(members), "yield")
                self._hand_out(batch, members, results)
                await self._let_read(batch, members)
                if not batch.is_wanted_by_any:
                    return
        finally:
            close = getattr(running, "aclose", None)
            if close is not None:
                await close()
        for member in members:
            member.end()
            batch._settle(member)

    @staticmethod
    def _hand_out(batch: RunningBatch, members: list[_ItemReader], results: Sequence[R | Ended]) -> None:
        for member, result in zip(members, results, strict=True):
            if member.settled:
                continue
            if result is ENDED:
                member.end()
                batch._settle(member)
            else:
                member.add(result)

    async def _let_read(self, batch: RunningBatch, members: list[_ItemReader]) -> None:
        """Let readers run before the next results are computed, and wait for slow readers."""
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        while behind := [member for member in members if self._is_behind(member)]:
            room: asyncio.Future[None] = loop.create_future()
            for member in behind:
                member.room = room
            began = loop.time()
            await asyncio.wait([room], timeout=max(0.0, READER_PATIENCE_S - max(member.behind_s for member in behind)))
            waited = loop.time() - began
            for member in behind:
                member.room = None
                member.behind_s += waited
                if member.behind_s >= READER_PATIENCE_S and self._is_behind(member):
                    member.fail(
                        ReaderTooSlow(
                            f"{self._name}: {self.limits.max_buffered_results} results were not read "
                            f"(max_buffered_results), and the batch had waited {READER_PATIENCE_S:g} s for this "
                            "reader; it gets no more"
                        )
                    )
                    batch._settle(member)

    def _is_behind(self, member: _ItemReader) -> bool:
        return not member.settled and len(member.buffer) >= self.limits.max_buffered_results
