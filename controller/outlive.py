"""Restarts a background task after an exception that nothing expected, and logs the exception once.

All tasks belong to one TaskGroup, which ends with the first task that raises. Without a restart, one answer or one file
that triggers a defect would end the controller, and again after each start, because the answer is still there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Pause after a defect, as between two looks."""


async def outlive(
    what: str,
    work: Callable[[], Coroutine[Any, Any, None]],
    *,
    ends_with: tuple[type[Exception], ...] = (),
    tell: Callable[[str], None] = lambda words: None,
) -> None:
    """Run `work` until it returns or raises one of `ends_with`; restart it after any other exception.

    `what` names it in the log, which gets the traceback of the first of equal exceptions. `tell` is called with each.
    """
    logged = ""
    while True:
        try:
            await work()
        except ends_with:
            raise
        except Exception as error:
            words = f"internal: {what} raised {type(error).__name__}: {error}"
            if words != logged:
                logger.exception("internal: %s raised, it begins again", what)
            logged = words
            tell(words)
            await asyncio.sleep(AGAIN_S)
        else:
            return


Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task and owns it."""


@dataclass(frozen=True, slots=True)
class Background:
    """Where parts of the controller work apart from the loop, so that no tick waits for them."""

    spawn: Spawn
    wake: Callable[[], None]
    """Makes the loop look again: there is news."""
    clock: Callable[[], float] = time.time
    """The loop's."""

    def begin(
        self, what: str, work: Callable[[], Coroutine[Any, Any, None]], tell: Callable[[str], None] = lambda words: None
    ) -> asyncio.Task[None]:
        """Start a task that a defect does not end. The arguments are those of `outlive`."""
        return self.spawn(outlive(what, work, tell=tell))
