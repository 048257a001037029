"""Imports the user's autoscaling functions from the project's directory, and calls them outside the controller's loop.

Functions       imports a function and calls it, here and now
FunctionCalls   one call of each service at a time, with what the latest look has seen, and the last answers
in_thread       how the controller makes a call; tests and the simulator call functions directly

A function is the operator's own code, from the directory of the compose files: it gains no rights that its author does
not have.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import PolicyError
from ..model.spec import FunctionPolicy
from ..model.text import shown
from ..outlive import Background
from .autoscale import Policy, Situation

LIMIT_S = 5.0
"""How long the previous answer counts while a call has not returned."""
PAUSE_S = 0.5
"""Shortest time between the starts of two calls for a service: each new answer wakes the loop, which calls again."""
MOST_WANTED = 1e15
"""Replicas. More than any `max`; a larger integer may not even fit into a float."""

Call = Callable[[], int]
Run = Callable[[Call], Awaitable[int]]
"""Makes a call and waits until it returns or raises."""


async def in_thread(call: Call) -> int:
    """Make the call in a daemon thread: if it never returns, other calls continue, and the process can end."""
    returned: Future[int] = Future()
    returned.set_running_or_notify_cancel()  # it cannot be cancelled now, so the thread can always settle it

    def work() -> None:
        try:
            returned.set_result(call())
        except BaseException as error:
            returned.set_exception(error)

    threading.Thread(target=work, name="autoscaling function", daemon=True).start()
    return await asyncio.wrap_future(returned)


class Functions:
    """The users' functions by import path, each imported once."""

    def __init__(self, directory: Path | None, ahead: Callable[[], float] = lambda: 0.0) -> None:
        """`directory` is the project's; None = there is none. `ahead`: seconds by which the wall clock is ahead of the
        clock of situations: a function that decides by the hour of the day needs the wall clock."""
        self._directory = directory
        self._ahead = ahead
        self._loaded: dict[str, Policy] = {}

    def call(self, policy: FunctionPolicy, situation: Situation) -> int:
        """Return how many replicas the function wants. Raises PolicyError if it returns no number."""
        if policy.path not in self._loaded:
            self._loaded[policy.path] = self._import(policy.path)  # a module that failed is read again at each call
        function = self._loaded[policy.path]
        _check_arguments(function, policy)
        seen = replace(situation, now=situation.now + self._ahead())
        try:
            wanted: Any = function(seen, **policy.kwargs)
        except (Exception, SystemExit) as error:
            raise PolicyError(f"{policy.path} raised {_error_words(error)}") from error
        if not isinstance(wanted, int) or isinstance(wanted, bool):
            raise PolicyError(f"{policy.path} returned {_shown(wanted)}; a policy returns an integer")
        if abs(wanted) > MOST_WANTED:
            raise PolicyError(
                f"{policy.path} returned an integer beyond {MOST_WANTED:g}, which no number of replicas is"
            )
        return wanted

    def _import(self, path: str) -> Policy:
        module_name, _, name = path.partition(":")
        if self._directory is not None and str(self._directory) not in sys.path:
            sys.path.append(str(self._directory))  # last: no file of the project may shadow a module of the controller
        importlib.invalidate_caches()
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            where = f" (looked in {self._directory})" if isinstance(error, ModuleNotFoundError) else ""
            raise PolicyError(f"{path} cannot be imported: {_error_words(error)}{where}") from error
        function: Policy | None = getattr(module, name, None)
        if not callable(function):
            found = "nothing of that name" if function is None else shown(function)
            raise PolicyError(f"{path} is no function: {module.__file__ or module_name} has {found}")
        if inspect.iscoroutinefunction(function):
            raise PolicyError(f"{path} is an async function; a policy is a plain one, called in a thread")
        return function


def _check_arguments(function: Policy, policy: FunctionPolicy) -> None:
    try:
        inspect.signature(function).bind(None, **policy.kwargs)
    except TypeError as error:
        names = ", ".join(policy.kwargs) or "none"
        raise PolicyError(
            f"{policy.path} cannot be called with a situation and policy_kwargs ({names}): {error}"
        ) from error
    except ValueError:
        return  # written in C, without a signature: the call itself raises


def _error_words(error: BaseException) -> str:
    """What was raised, and the last line of the user's Python that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", str(Path(__file__).parent)))]
    where = f" at {own[-1].filename}:{own[-1].lineno}" if own and "importlib" not in own[-1].filename else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"


def _shown(value: object) -> str:
    """A value of any type, on one short line."""
    return shown(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"


@dataclass(slots=True)
class _Asked:
    """One service's function: the call in progress, and the result of the last one. Times are the loop's."""

    policy: FunctionPolicy
    asked_at: float
    """When the loop asked last."""
    began_at: float = -math.inf
    task: asyncio.Task[None] | None = None
    answer: int | None = None
    error: str = ""

    @property
    def is_under_way(self) -> bool:
        return self.task is not None and not self.task.done()


@dataclass(eq=False)
class FunctionCalls:
    """Owns one call at a time for each service whose policy is a function. A new answer wakes the loop."""

    _call: Callable[[FunctionPolicy, Situation], int]
    _run: Run
    _background: Background
    _asked: dict[str, _Asked] = field(default_factory=dict)

    def wanted(self, service: str, policy: FunctionPolicy, situation: Situation) -> int | None:
        """Return the last answer, and begin the next call with this situation unless one is in progress.

        None while the first call has not returned. Raises PolicyError if the last call returned no number, or if the
        current one takes too long.
        """
        asked, now = self._asked.get(service), situation.now
        if asked is None or asked.policy != policy or now - asked.asked_at > LIMIT_S:
            if asked is not None and asked.task is not None:
                asked.task.cancel()  # its answer is for other files
            asked = self._asked[service] = _Asked(policy, now)
        asked.asked_at = now
        waited_s = now - asked.began_at
        if asked.is_under_way:
            if waited_s >= LIMIT_S:
                raise PolicyError(f"{policy.path} has not returned for {waited_s:.0f} s")
        elif waited_s >= PAUSE_S:
            asked.began_at = now
            ask, fail = partial(self._ask, asked, situation), partial(self._note, asked, None)
            asked.task = self._background.begin(f"calling {policy.path}", ask, fail)
        if asked.error:
            raise PolicyError(asked.error)
        return asked.answer

    async def _ask(self, asked: _Asked, situation: Situation) -> None:
        try:
            answer = await self._run(partial(self._call, asked.policy, situation))
        except PolicyError as error:
            self._note(asked, None, str(error))
        else:
            self._note(asked, answer)

    def _note(self, asked: _Asked, answer: int | None, error: str = "") -> None:
        is_new = (asked.answer, asked.error) != (answer, error)
        asked.answer, asked.error = answer, error
        if is_new:
            self._background.wake()
