from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.http.poll import NOT_YET, NoItemYet, Polled


async def everything(source: Polled[Any]) -> list[Any]:
    """All items, as `sse` takes them."""
    items = []
    try:
        while True:
            item = source.poll()
            items.append(await source.wait() if isinstance(item, NoItemYet) else item)
    except StopAsyncIteration:
        return items


async def paced(turns: list[int]) -> AsyncIterator[int]:
    """Numbers, each after so many turns of the loop."""
    for number, count in enumerate(turns):
        for _ in range(count):
            await asyncio.sleep(0)
        yield number


@given(st.lists(st.integers(0, 3), max_size=30))
def test_it_gives_what_an_async_for_gives_and_knows_what_is_there(turns: list[int]) -> None:
    async def run() -> None:
        source = Polled(paced(turns))
        for number, count in enumerate(turns):
            item = source.poll()
            assert isinstance(item, NoItemYet) == (count > 0)
            assert (await source.wait() if isinstance(item, NoItemYet) else item) == number
        with pytest.raises(StopAsyncIteration):
            source.poll()

    asyncio.run(run())


class Futures:
    """An iterator whose steps are futures, as those of libraries in C are."""

    def __init__(self) -> None:
        self.next: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def __aiter__(self) -> Futures:
        return self

    def __anext__(self) -> asyncio.Future[int]:
        return self.next


async def test_steps_that_are_futures() -> None:
    futures = Futures()
    source = Polled(futures)
    assert source.poll() is NOT_YET
    asyncio.get_running_loop().call_soon(futures.next.set_result, 7)
    assert await source.wait() == 7
    assert source.poll() == 7


async def test_a_cancellation_reaches_what_waits_within_the_source() -> None:
    seen: list[str] = []

    async def source() -> AsyncIterator[int]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        yield 1

    task = asyncio.create_task(everything(Polled(source())))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled"]


async def test_a_source_may_have_timeouts_of_its_own() -> None:
    async def source() -> AsyncIterator[str]:
        try:
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        except TimeoutError:
            yield "too late"

    assert await everything(Polled(source())) == ["too late"]


async def test_a_failure_between_looking_and_waiting_is_raised_in_the_source() -> None:
    seen: list[BaseException] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            await asyncio.Event().wait()
        except OSError as error:
            seen.append(error)
            await asyncio.sleep(0)  # it may still wait while it cleans up
            raise
        yield 1

    source = Polled(numbers())
    assert source.poll() is NOT_YET
    error = ConnectionResetError("gone")
    with pytest.raises(ConnectionResetError, match="gone"):
        await source.fail(error)
    assert seen == [error]


async def test_an_error_of_the_source_comes_out_of_either() -> None:
    async def source(turns: int) -> AsyncIterator[int]:
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns < 2:
            raise ValueError("boom")
        yield 1

    with pytest.raises(ValueError, match="boom"):
        Polled(source(0)).poll()
    waiting = Polled(source(1))
    assert waiting.poll() is NOT_YET
    with pytest.raises(ValueError, match="boom"):
        await waiting.wait()
