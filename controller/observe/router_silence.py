"""Reads HAProxy, and measures for how long it hangs: neither its runtime API nor its HTTP port answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ..errors import RoutingError, RoutingUnreachable
from ..model.world import RouterSilence, RoutingState
from ..routing.base import Router

ANSWER_S = 5.0
"""How long the runtime API may take to answer before the HTTP port is asked, too."""
STEADY_S = 60.0
"""After so long without a hang, the backoff of restarts starts over."""


class SilenceWatch:
    """Reads HAProxy for the observer. `silence` and `problem` are of the last reading."""

    def __init__(self, router: Router, clock: Callable[[], float] = time.time) -> None:
        self._router = router
        self._clock = clock
        self.problem = ""
        """Why HAProxy's answers cannot be read; "" = they can, or there are none."""
        self.silence: RouterSilence | None = None
        """None = HAProxy does not hang."""
        self._restarts = 0
        self._steady_since: float | None = None
        """Since when every reading has found that HAProxy does not hang."""

    async def read(self, _: None) -> RoutingState:
        """Return HAProxy's state. Raises RoutingUnreachable where it does not answer, RoutingError where its answer
        cannot be read.
        """
        begun = self._clock()
        state: RoutingState | None = None
        self.problem = ""
        try:
            async with asyncio.timeout(ANSWER_S):
                state = await self._router.observe()
        except (TimeoutError, RoutingUnreachable):
            pass  # the same as no answer
        except RoutingError as error:
            self.problem = str(error)
            self._note(begun, hangs=False)
            raise
        self._note(begun, hangs=state is None and await self._router.http_is_silent())
        if state is None:
            raise RoutingUnreachable("it does not answer")
        return state

    def restarted(self) -> None:
        """Record that a restart of HAProxy has ended, whether it succeeded or not: its silence is measured anew."""
        self._restarts += 1
        if self.silence is not None:
            self.silence = RouterSilence(self._clock(), self._restarts)

    def _note(self, begun: float, *, hangs: bool) -> None:
        if hangs:
            self._steady_since = None
            self.silence = self.silence or RouterSilence(begun, self._restarts)
            return
        now = self._clock()
        self.silence = None
        self._steady_since = now if self._steady_since is None else self._steady_since
        if now - self._steady_since >= STEADY_S:
            self._restarts = 0
