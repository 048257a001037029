"""Sorts what user code raises, for every edge and every hook: what is an error of it, and what passes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

ENDS_PROCESS: Final = (SystemExit, KeyboardInterrupt)


def is_answerable(error: BaseException) -> bool:
    """Whether what user code has raised is an error of it, which its caller is answered with and the log has.

    - SystemExit and KeyboardInterrupt are not: they end the process.
    - The cancellation of this task is not: its caller no longer waits. Nor is a GeneratorExit without a task, with
      which Python closes a coroutine that nobody awaits. Any other one comes from user code and needs an answer, or its
      caller would wait until its deadline.
    - Everything else is, whether it is an `Exception` or not: Rust code panics with a class of BaseException.
    """
    if isinstance(error, ENDS_PROCESS):
        return False
    if isinstance(error, asyncio.CancelledError) or type(error) is GeneratorExit:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs
            return False
        return task is not None and not task.cancelling()
    return True


def holdable(error: BaseException) -> BaseException:
    """What a future can hold of an error of user code.

    A future takes no StopIteration. Its exception is thrown into the code that waits, and Python takes a GeneratorExit
    there for the order to close that code: no `except` around the wait would see it.
    """
    if not isinstance(error, StopIteration | GeneratorExit):
        return error
    made = RuntimeError(f"user code raised {type(error).__name__}: {error}")
    made.__cause__ = error
    return made


async def as_holdable(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """What user code returns or raises, for a task that other code waits for."""
    try:
        return await function(*args)
    except GeneratorExit as error:
        if not is_answerable(error):
            raise
        raise holdable(error) from error


def end_process(error: BaseException) -> None:
    """Make the event loop raise an error of ENDS_PROCESS, where a server catches what its applications raise."""

    def end() -> None:
        raise error

    if isinstance(error, ENDS_PROCESS):
        asyncio.get_running_loop().call_soon(end)
