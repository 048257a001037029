"""What decides how many replicas a service needs: the formula, a function of the user's, or a query of Prometheus.

    policy: null                        autoscale.wanted_replicas
    policy: package.module:function     imported from the project's directory, called at every look, ended after LIMIT_S
    policy: {prometheus: {...}}         ceil(running * value / target), the value read beside the loop

The function is the operator's own code, from the directory that also says what the Docker Engine runs: it can do no
more than who wrote it could do anyway. A policy that gives no number raises PolicyError, and the target is held.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from ..errors import PolicyError
from ..model.spec import FunctionPolicy, PrometheusPolicy
from ..model.text import shown
from .autoscale import Answer, Policy, Situation, by_load, smoothed, wanted_replicas

LIMIT_S = 0.5
"""Most that one call of a function may take."""
IMPORT_LIMIT_S = 5.0
AGAIN_S = 30.0
"""After a failed import the function is left alone for so long; after a call that took too long, that call."""
LONGEST_QUERY = 80
MOST_WANTED = 1e15
"""Replicas. Whoever asks for more than any bound allows may; what no float counts any more is no answer."""

Ask = Callable[[str, Situation], Answer]
"""The answer for a service (its name) in a situation; raises PolicyError."""
Value = Callable[[str, PrometheusPolicy, float], float | None]
"""The value of a service's query at a time; None while there cannot be one yet. Raises PolicyError."""


def ask_formula(service: str, situation: Situation) -> Answer:
    """Ray Serve's formula, whatever the service says."""
    return by_load(situation)


class Policies:
    """Answers for every service, by the policy that it names."""

    def __init__(self, functions: Functions, value: Value) -> None:
        self._functions = functions
        self._value = value

    def ask(self, service: str, situation: Situation) -> Answer:
        """How many replicas the service's policy wants. Raises PolicyError."""
        match situation.spec.policy:
            case FunctionPolicy() as policy:
                wanted = self._functions.call(policy, situation)
                because = f"{policy.path} asks for {wanted}"
                # Without a running replica there is nothing to go a part of the way from.
                goal = smoothed(situation.spec, situation.running, wanted) if situation.running else wanted
                return Answer(_keeps_the_last(situation, goal), because)
            case PrometheusPolicy() as policy:
                return self._measured(service, policy, situation)
            case None:
                return by_load(situation)

    def _measured(self, service: str, policy: PrometheusPolicy, situation: Situation) -> Answer:
        if situation.running == 0:
            return Answer(wanted_replicas(situation), "no replica is ready, so the load decides")
        value = self._value(service, policy, situation.now)
        name = query_words(policy.query)
        if value is None:
            return Answer(situation.target, f"{name} gives nothing yet")
        goal = situation.running * value / policy.target
        if not abs(goal) <= MOST_WANTED:  # nor is what is no number at all
            raise PolicyError(f"{name} = {value:.4g} with a target of {policy.target:g} gives no number of replicas")
        wanted = smoothed(situation.spec, situation.running, goal)
        return Answer(_keeps_the_last(situation, wanted), f"{name} = {value:.4g}, {policy.target:g} wanted")


def _keeps_the_last(situation: Situation, wanted: int) -> int:
    """Whoever is at work is not sent away for nobody: the next request would bring a replica back."""
    return max(wanted, 1) if situation.load.total > 0 else wanted


def query_words(query: str) -> str:
    """A query on one line, cut where it is long."""
    line = " ".join(query.split())
    return line if len(line) <= LONGEST_QUERY else f"{line[:LONGEST_QUERY]}..."


_Key = tuple[str, str]
"""(import path, repr of the arguments of a call; "" = the import). A function may be too slow with the arguments of one
service, and fast with all others."""


@dataclass(frozen=True, slots=True)
class _Shut:
    """What is not tried again before `until`, and why."""

    error: PolicyError
    until: float


class Functions:
    """The users' functions by import path, imported once."""

    def __init__(
        self,
        directory: Path | None,
        clock: Callable[[], float] = time.monotonic,
        ahead: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`directory` is the project's; None = there is none. `ahead`: seconds by which the wall clock is ahead of the
        one that situations are of: what a function decides by the hour of the day goes by the wall clock."""
        self._directory = directory
        self._clock = clock
        self._ahead = ahead
        self._loaded: dict[str, Policy] = {}
        self._shut: dict[_Key, _Shut] = {}

    def call(self, policy: FunctionPolicy, situation: Situation) -> int:
        """What the function wants. Raises PolicyError for whatever else it does."""
        key = (policy.path, repr(policy.kwargs))
        self._refuse_shut((policy.path, ""), key)
        function = self._load(policy)
        shown_to_it = replace(situation, now=situation.now + self._ahead())
        try:
            wanted: Any = call_within(LIMIT_S, functools.partial(function, shown_to_it, **policy.kwargs))
        except TookTooLong as error:
            words = f"{policy.path} did not return within {LIMIT_S:g} s; it is asked again every {AGAIN_S:g} s"
            raise self._leave_alone(key, words) from error
        except (Exception, SystemExit) as error:
            raise PolicyError(f"{policy.path} raised {_error_words(error)}") from error
        if not isinstance(wanted, int) or isinstance(wanted, bool):
            raise PolicyError(f"{policy.path} returned {_shown(wanted)}; a policy returns an integer")
        if abs(wanted) > MOST_WANTED:
            raise PolicyError(
                f"{policy.path} returned an integer beyond {MOST_WANTED:g}, which no number of replicas is"
            )
        return wanted

    def _load(self, policy: FunctionPolicy) -> Policy:
        if policy.path not in self._loaded:
            try:
                self._loaded[policy.path] = call_within(IMPORT_LIMIT_S, lambda: self._import(policy.path))
            except PolicyError as error:
                raise self._leave_alone((policy.path, ""), str(error)) from error
            except TookTooLong as error:
                words = f"the import of {policy.path} took longer than {IMPORT_LIMIT_S:g} s"
                raise self._leave_alone((policy.path, ""), words) from error
        function = self._loaded[policy.path]
        _check_arguments(function, policy)
        return function

    def _import(self, path: str) -> Policy:
        module_name, _, name = path.partition(":")
        if self._directory is not None and str(self._directory) not in sys.path:
            sys.path.append(str(self._directory))  # last: no file of the project's may stand in for one of ours
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
            raise PolicyError(
                f"{path} is an async function; a policy is a plain one: it decides, and waits for nothing"
            )
        return function

    def _refuse_shut(self, *keys: _Key) -> None:
        now = self._clock()
        self._shut = {key: shut for key, shut in self._shut.items() if now < shut.until}
        for key in keys:
            if key in self._shut:
                raise self._shut[key].error

    def _leave_alone(self, key: _Key, words: str) -> PolicyError:
        error = PolicyError(words)
        self._shut[key] = _Shut(error, self._clock() + AGAIN_S)
        return error


def _check_arguments(function: Policy, policy: FunctionPolicy) -> None:
    try:
        inspect.signature(function).bind(None, **policy.kwargs)
    except TypeError as error:
        names = ", ".join(policy.kwargs) or "none"
        raise PolicyError(
            f"{policy.path} cannot be called with a situation and policy_kwargs ({names}): {error}"
        ) from error
    except ValueError:
        return  # written in C: it says itself what it does not take


def _error_words(error: BaseException) -> str:
    """What was raised, and the last line of Python that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", str(Path(__file__).parent)))]
    where = f" at {own[-1].filename}:{own[-1].lineno}" if own and "importlib" not in own[-1].filename else ""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}{f': {said}' if said else ''}{where}"


def _shown(value: object) -> str:
    """A value that may be anything, on one line and short."""
    return shown(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"


T = TypeVar("T")


# ----------------------------------------------------------------------------------------------------
# Ends a policy function that takes too long: the controller's event loop has to go on.


class TookTooLong(BaseException):
    """Raised inside the code that took too long. No Exception, so that a broad `except` there does not keep it."""


def call_within(limit_s: float, call: Callable[[], T]) -> T:
    """Return what `call` does; raises TookTooLong in it after `limit_s` seconds, and again as often as it is caught.

    It ends Python code, `time.sleep` and other calls of the system, not a single long call of C. Only the main thread
    can be interrupted: elsewhere nothing is bounded. A timer that somebody else has set goes on afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    armed = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        if armed:
            raise TookTooLong

    handler_before = signal.signal(signal.SIGALRM, interrupt)
    began = time.monotonic()
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    try:
        try:
            return call()
        finally:
            armed = False
    finally:
        # Twice, as the signal may come between the end of the call and the first time.
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler_before)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - began), 0.001), interval_s)
