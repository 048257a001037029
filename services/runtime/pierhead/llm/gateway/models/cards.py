"""Fetches the model cards of the LLM services in the background, so that listing models never waits for a service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pierhead import handle, has_replica
from pierhead.errors import PierheadError
from pierhead.llm.v1.llm_pb2 import DescribeRequest, ModelCard
from pierhead.llm.v1.llm_pb2_grpc import LLMServerStub
from pierhead.tasks import end_tasks

logger = logging.getLogger("pierhead.llm.gateway")

FIRST_S = 0.5
"""The first backoff after a failed fetch; doubled at each further failure."""

TIMEOUT_S = 2.0
"""Of one call."""

MAX_AGE_S = 600.0
"""Older cards are not shown: the adapters that they list may be gone."""


class ModelCards:
    """The last card of each service. `refresh` fetches them."""

    def __init__(self, services: Collection[str], refresh_s: float, clock: Callable[[], float]) -> None:
        # These calls do not wait for a replica: a waiting call would wake up a service that is scaled to zero.
        self._stubs = {
            service: handle(LLMServerStub, service, timeout_s=TIMEOUT_S, max_queued_requests=0) for service in services
        }
        self._waiting = {service: handle(LLMServerStub, service) for service in services}
        self._waking: dict[str, asyncio.Task[None]] = {}
        self._refresh_s = refresh_s
        self._clock = clock
        self._cards: dict[str, tuple[float, ModelCard]] = {}

    def card(self, service: str) -> ModelCard | None:
        """The service's last card, if it is at most MAX_AGE_S old."""
        at, card = self._cards.get(service, (0.0, None))
        return card if card is not None and self._clock() - at <= MAX_AGE_S else None

    def wake(self, service: str) -> None:
        """Wake a service without a replica: one call waits for its card, as requests for its model would."""
        if service not in self._waking:
            task = self._waking[service] = asyncio.create_task(self._fetch(self._waiting, service))
            task.add_done_callback(lambda _: self._waking.pop(service, None))

    async def close(self) -> None:
        """End the calls that wait."""
        await end_tasks(*self._waking.values())

    async def refresh(self) -> None:
        """Fetch the cards of all services again and again, until cancelled."""
        pause = FIRST_S
        while True:
            await asyncio.gather(*(self._ask(service) for service in self._stubs))
            complete = len(self._cards) == len(self._stubs)
            pause = self._refresh_s if complete else min(2 * pause, self._refresh_s)
            await asyncio.sleep(pause)

    async def _ask(self, service: str) -> None:
        if has_replica(service):
            await self._fetch(self._stubs, service)

    async def _fetch(self, stubs: Mapping[str, Any], service: str) -> None:
        try:
            card = await stubs[service].Describe(DescribeRequest())
        except PierheadError as error:  # such as a full or starting replica: the last card stays
            logger.debug("no model card from %s: %s", service, error)
        except Exception:  # such as an answer that is no card: it must not end the task
            logger.exception("internal: fetching the model card of %s raised", service)
        else:
            self._cards[service] = (self._clock(), card)
