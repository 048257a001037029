"""What all requests of one gateway process share: its models, the services behind it and what keys are charged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version

from aiohttp import web
from pierhead import handle, has_replica
from pierhead.llm.gateway.charges import Charges
from pierhead.llm.gateway.errors import answer_error, unknown_model
from pierhead.llm.gateway.keys import CheckedKey, checked_key
from pierhead.llm.gateway.metrics import GatewayMetrics
from pierhead.llm.gateway.models.cards import ModelCards
from pierhead.llm.gateway.models.model_list import ModelList
from pierhead.llm.gateway.models.model_map import ModelRoute, Site
from pierhead.llm.gateway.settings import GatewaySettings
from pierhead.llm.v1.llm_pb2_grpc import LLMServerStub
from pierhead.tasks import end_tasks


class Gateway:
    """What all requests share."""

    def __init__(self, settings: GatewaySettings, metrics: GatewayMetrics, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.metrics = metrics
        self.charges = Charges()
        self.ongoing = 0
        """Requests for models that are in progress."""
        self.body_bytes = 0
        """Taken by the bodies of all requests, each from its first byte until its answer begins."""
        metrics.bodies.read = lambda: self.body_bytes
        self.models = settings.models
        services = dict.fromkeys((*self.models.services, *self.models.prefill_services))
        self.stubs = {service: handle(LLMServerStub, service) for service in services}
        self._cards = ModelCards(self.models.services, settings.models_refresh_s, clock)
        self._list = ModelList(self.models, self._cards.card, int(time.time()))

    async def live(self, _: web.Application) -> AsyncIterator[None]:
        """Runs the background tasks from the application's start to its end."""
        falling_back = [route.service for route in self.models.routes.values() if route.fallback is not None]
        for service in (*self.models.prefill_services, *falling_back):
            has_replica(service)  # begins to watch the service now, not at the first request
        refreshing = asyncio.create_task(self._cards.refresh(), name="what services say they serve")
        yield
        await end_tasks(refreshing)
        await self._cards.close()

    async def health_handler(self, request: web.Request) -> web.StreamResponse:
        """`/health`, `/ping`: the gateway takes requests. They wait while a model loads or is scaled to zero."""
        return web.Response()

    async def version_handler(self, request: web.Request) -> web.StreamResponse:
        """`GET /version`: Pierhead's."""
        return web.json_response({"version": version("pierhead")})

    async def load_handler(self, request: web.Request) -> web.StreamResponse:
        """`GET /load`: the requests that this gateway process is answering."""
        return web.json_response({"server_load": self.ongoing})

    async def models_handler(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/models`: the models, aliases and known adapters that the client may use."""
        return web.json_response({"object": "list", "data": self._models_of(request)})

    async def model_handler(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/models/{id}`: one of them."""
        asked = request.match_info["id"]
        found = next((entry for entry in self._models_of(request) if entry["id"] == asked), None)
        return answer_error(unknown_model(asked), {}) if found is None else web.json_response(found)

    def site(self, request: web.Request) -> Site:
        """Where a request came to."""
        return self.models.site(request.host, request.path)

    def available(self, route: ModelRoute) -> ModelRoute:
        """The route, or its fallback's while the fallback alone has a replica. Wakes the one that was asked for."""
        if route.fallback is None or has_replica(route.service):
            return route
        fallback = self.models.routes[route.fallback]
        if not has_replica(fallback.service):
            return route
        self._cards.wake(route.service)
        return fallback

    def names_for(self, key: CheckedKey, site: Site) -> list[str]:
        """The models that a client may use there, without aliases and adapters."""
        routes = self.models.routes.items()
        names = [name for name, route in routes if name == route.model and site.model in ("", route.base)]
        return [name for name in names if key.may_use((name,))]

    def _models_of(self, request: web.Request) -> list[dict[str, object]]:
        key, only = checked_key(request.headers), self.site(request).model
        return [
            entry
            for names, entry in self._list.entries()
            if key.may_use(names) and only in ("", entry["parent"] or entry["root"])
        ]
