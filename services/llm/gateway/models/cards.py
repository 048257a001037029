"""What the services say of themselves: asked in the background, so that a list of models waits for nobody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from pierhead.errors import PierheadError
from pierhead.llm.v1.llm_pb2 import DescribeRequest, ModelCard

from services.llm.gateway.keys.limits import Clock
from services.llm.gateway.models.targets import Target

logger = logging.getLogger("pierhead.llm.gateway")

FIRST_S = 0.5
"""How soon a service that has not answered yet is asked again, at first; then twice as long each time."""

TIMEOUT_S = 2.0
"""For one answer."""

MAX_AGE_S = 600.0
"""An answer older than this counts no more: what it lists may be gone."""


class ModelCards:
    """The last answer of each service. `keep` asks; somebody has to own it."""

    def __init__(self, services: Collection[str], refresh_s: float, clock: Clock) -> None:
        # No call of these waits for a replica: one that waits wakes up a service that is scaled to zero.
        self._targets = [Target(service, timeout_s=TIMEOUT_S, max_queued_requests=0) for service in services]
        self._refresh_s = refresh_s
        self._clock = clock
        self._cards: dict[str, tuple[float, ModelCard]] = {}

    def card(self, service: str) -> ModelCard | None:
        """What a service said last, at most MAX_AGE_S ago."""
        at, card = self._cards.get(service, (0.0, None))
        return card if card is not None and self._clock() - at <= MAX_AGE_S else None

    async def keep(self) -> None:
        """Until cancelled: ask everybody again and again."""
        pause = FIRST_S
        while True:
            await asyncio.gather(*(self._ask(target) for target in self._targets))
            complete = len(self._cards) == len(self._targets)
            pause = self._refresh_s if complete else min(2 * pause, self._refresh_s)
            await asyncio.sleep(pause)

    async def _ask(self, target: Target) -> None:
        if not target.has_replica():
            return
        try:
            card = await target.stub.Describe(DescribeRequest())
        except PierheadError as error:  # it is full, or not started: nothing new
            logger.debug("%s does not say what it serves: %s", target.service, error)
        except Exception:  # an answer that is no card, say: the others are asked all the same
            logger.exception("internal: asking %s what it serves raised", target.service)
        else:
            self._cards[target.service] = (self._clock(), card)
