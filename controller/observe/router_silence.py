"""Reads HAProxy, and measures for how long it hangs: neither its runtime API nor its HTTP port answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import RoutingError, RoutingUnreachable
from ..model.world import RouterSilence, RoutingState
from ..outlive import Background
from ..routing.base import Router, RoutingAction
from .watch import Watch

ANSWER_S = 5.0
"""How long the runtime API may take to answer before the HTTP port is asked, too."""
STEADY_S = 60.0
"""After this time without a hang, the backoff of restarts starts over."""


class RouterWatch(Watch[None, RoutingState, RoutingAction]):
    """Reads HAProxy. `silence` and `problem` are of the last reading."""

    def __init__(self, router: Router, background: Background, took: Callable[[float], None] = lambda s: None) -> None:
        super().__init__("HAProxy", self._observe, background, limit_s=10.0, stale_s=2.0, took=took)
        self._of = router
        self.problem = ""
        """Why HAProxy's answers cannot be read; "" = they can, or there are none."""
        self.silence: RouterSilence | None = None
        """None = HAProxy does not hang."""
        self._restarts = 0
        self._steady_since: float | None = None
        """Since when every reading has found that HAProxy does not hang."""

    def restarted(self) -> None:
        """Record that a restart of HAProxy has ended, with or without success: its silence counts from zero again."""
        self._restarts += 1
        if self.silence is not None:
            self.silence = RouterSilence(self._clock(), self._restarts)

    async def _observe(self, _: None) -> RoutingState:
        """Return HAProxy's state. Raises RoutingUnreachable where it does not answer, RoutingError where its answer
        cannot be read.
        """
        begun = self._clock()
        self.problem = ""
        try:
            async with asyncio.timeout(ANSWER_S):
                state = await self._of.observe()
        except (TimeoutError, RoutingUnreachable) as error:
            self._note(begun, hangs=await self._of.http_is_silent())
            raise RoutingUnreachable("it does not answer") from error
        except RoutingError as error:
            self.problem = str(error)
            self._note(begun, hangs=False)
            raise
        self._note(begun, hangs=False)
        return state

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
