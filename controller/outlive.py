"""What runs beside the loop outlives a defect of its own: told once, begun anew.

All tasks belong to one TaskGroup, which ends with the first that raises. A defect that one answer or one file brings
out would end everything, and again at the next start, as the answer is still there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
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
    again_s: float = AGAIN_S,
) -> None:
    """Run `work` until it returns, or raises one of `ends_with`; begin it anew after anything else that it raises.

    `what` names it in the log, which gets the traceback the first time; `tell` hears each time, in words.
    """
    told = ""
    while True:
        try:
            await work()
        except ends_with:
            raise
        except Exception as error:
            words = f"internal: {what} raised {type(error).__name__}: {error}"
            if words != told:
                logger.exception("internal: %s raised, it begins anew", what)
            told = words
            tell(words)
            await asyncio.sleep(again_s)
        else:
            return
