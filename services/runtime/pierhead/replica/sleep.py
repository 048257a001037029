"""Puts a replica to sleep and wakes it up: its process stays, and its part gives back what it holds of the GPUs.

    PUT /sleep --> wanted --> sleep() or wake() of the part --+-- returns: asleep, or awake
                                                              `-- raises: `error` says why; the next PUT tries again

From the wish to sleep until it is awake again, the replica admits no request; `sleep` is called once those in flight
have ended. The part that is asked is the first that has both methods, `async`, or plain and then called in a thread. It
refuses by an attribute or a property `can_sleep` that is False, which may change, or that raises. While it sleeps,
`check_health` is still called, and has to pass.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from pierhead.classes.threads import in_thread
from pierhead.edge.admission import Admission
from pierhead.raised import is_answerable
from pierhead.replica.user_config import ended, in_one_line

logger = logging.getLogger("pierhead")


@dataclass(frozen=True, slots=True)
class SleepState:
    """Whether a replica sleeps, and is to."""

    can: bool
    """Its part does not refuse."""
    wanted: bool
    asleep: bool
    """Differs from `wanted` while the part's method runs."""
    error: str = ""
    """Why `wanted` did not come about; "" while it has, or may."""


class Sleep:
    """Whether one replica is to sleep, and does. Only one task may run `keep`; `run` is as UserConfig's."""

    def __init__(
        self, parts: Iterable[object], run: Callable[..., Coroutine[Any, Any, None]], admission: Admission
    ) -> None:
        self.part = next((each for each in parts if hasattr(each, "sleep") and hasattr(each, "wake")), None)
        """The part that is asked; None = nobody can be."""
        self._run = run
        self._admission = admission
        self._wanted = self._asleep = self._is_turning = False
        self._why_not = ""
        """What `can_sleep` raised last."""
        self._error = ""
        self._news = asyncio.Event()

    def offer(self, text: str) -> None:
        """Want what `{"sleep": true}` or `{"sleep": false}` says from now on. Raises ValueError for anything else."""
        said = json.loads(text)
        if not (isinstance(said, dict) and said.keys() == {"sleep"} and isinstance(said["sleep"], bool)):
            raise ValueError(f'expected {{"sleep": true}} or {{"sleep": false}}, found {text[:100]}')
        if said["sleep"] is not self._wanted or self._error:
            self._wanted, self._error = said["sleep"], ""
            self._admission.asleep = self._wanted or self._asleep or self._is_turning
            self._news.set()

    def report(self) -> SleepState | None:
        """The current state; None where nobody can be asked."""
        if self.part is None:
            return None
        asleep = not self._wanted if self._is_turning else self._asleep
        return SleepState(self._can(), self._wanted, asleep, self._error)

    def _can(self) -> bool:
        try:
            can, why_not = bool(getattr(self.part, "can_sleep", True)), ""
        except BaseException as error:
            if not is_answerable(error):
                raise
            can, why_not = False, in_one_line(f"{type(error).__name__}: {error}")
        if why_not and why_not != self._why_not:
            logger.warning("it cannot sleep: %s.can_sleep raised %s", type(self.part).__name__, why_not)
        self._why_not = why_not
        return can

    async def keep(self) -> None:
        """Do what is wanted, one call of the part after another, until cancelled. The caller of PUT /sleep bounds the
        time: it ends a replica that takes too long."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._wanted:
                await self._admission.wait_idle()
            if self._wanted is not self._asleep and not self._admission.draining:
                self._is_turning = True
                try:
                    await self._turn(self._wanted)
                finally:
                    self._is_turning = False
                self._admission.asleep = self._wanted or self._asleep

    async def _turn(self, wanted: bool) -> None:
        name = "sleep" if wanted else "wake"
        try:
            await ended(asyncio.ensure_future(self._run(_call, getattr(self.part, name))))
        except BaseException as error:
            if not is_answerable(error):
                raise
            logger.exception("%s.%s raised", type(self.part).__name__, name)
            if wanted is self._wanted:
                self._error = in_one_line(f"{type(self.part).__name__}.{name} raised {type(error).__name__}: {error}")
            return
        self._asleep = wanted
        logger.info("the replica %s", "sleeps" if wanted else "is awake")


async def _call(method: Callable[[], Any]) -> None:
    result = await in_thread(method)
    if inspect.isawaitable(result):
        await result
