"""Puts a replica to sleep and wakes it up: its process stays, and its part gives back what it holds of the GPUs.

    PUT /sleep --> wanted --> sleep() or wake() of the part --+-- returns: asleep, or awake
                                                              `-- raises: `error` says why; the next PUT tries again

The part that is asked is the first that has both methods, plain or `async`. It refuses by an attribute or a property
`can_sleep` that is False, which may change. While it sleeps, `check_health` is still called, and has to pass.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from pierhead.raised import is_answerable
from pierhead.replica.user_config import call_hook, ended, in_one_line

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

    def __init__(self, parts: Iterable[object], run: Callable[..., Coroutine[Any, Any, None]]) -> None:
        self.part = next((each for each in parts if hasattr(each, "sleep") and hasattr(each, "wake")), None)
        """The part that is asked; None = nobody can be."""
        self._run = run
        self._wanted = self._asleep = False
        self._error = ""
        self._news = asyncio.Event()

    def offer(self, text: str) -> None:
        """Want what `{"sleep": true}` or `{"sleep": false}` says from now on. Raises ValueError for anything else."""
        said = json.loads(text)
        if not (isinstance(said, dict) and said.keys() == {"sleep"} and isinstance(said["sleep"], bool)):
            raise ValueError(f'expected {{"sleep": true}} or {{"sleep": false}}, found {text[:100]}')
        if said["sleep"] is not self._wanted or self._error:
            self._wanted, self._error = said["sleep"], ""
            self._news.set()

    def report(self) -> SleepState | None:
        """The current state; None where nobody can be asked."""
        if self.part is None:
            return None
        return SleepState(bool(getattr(self.part, "can_sleep", True)), self._wanted, self._asleep, self._error)

    async def keep(self) -> None:
        """Do what is wanted, one call of the part after another, until cancelled. The caller of PUT /sleep bounds the
        time: it ends a replica that takes too long."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._wanted is not self._asleep:
                await self._turn(self._wanted)

    async def _turn(self, wanted: bool) -> None:
        name = "sleep" if wanted else "wake"
        try:
            await ended(asyncio.ensure_future(self._run(call_hook, getattr(self.part, name))))
        except BaseException as error:
            if not is_answerable(error):
                raise
            logger.exception("%s.%s raised", type(self.part).__name__, name)
            if wanted is self._wanted:
                self._error = in_one_line(f"{type(self.part).__name__}.{name} raised {type(error).__name__}: {error}")
            return
        self._asleep = wanted
        logger.info("the replica %s", "sleeps" if wanted else "is awake")
