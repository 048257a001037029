"""What all requests of one gateway process share: its models, keys, limits and the services behind it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from importlib.metadata import version

from aiohttp import hdrs, web
from pierhead import handle, has_replica
from pierhead.llm.gateway.errors import ApiError, answer_error, unknown_model
from pierhead.llm.gateway.keys.key_file import KeyFile, KeyHolder
from pierhead.llm.gateway.keys.limits import Clock
from pierhead.llm.gateway.metrics import GatewayMetrics
from pierhead.llm.gateway.models.cards import ModelCards
from pierhead.llm.gateway.models.model_list import ModelList
from pierhead.llm.gateway.models.model_map import ModelRoute, Site
from pierhead.llm.gateway.settings import GatewaySettings
from pierhead.llm.v1.llm_pb2_grpc import LLMServerStub
from pierhead.tasks import end_tasks


class Gateway:
    """What all requests share."""

    def __init__(self, settings: GatewaySettings, metrics: GatewayMetrics, clock: Clock) -> None:
        self.settings = settings
        self.metrics = metrics
        self.clock = clock
        self.ongoing = 0
        """Requests for models that are in progress."""
        self.body_bytes = 0
        """Taken by the bodies of all requests, each from its first byte until its answer begins."""
        metrics.bodies.read = lambda: self.body_bytes
        self.models = settings.models
        services = dict.fromkeys((*self.models.services, *self.models.prefill_services))
        self.stubs = {service: handle(LLMServerStub, service) for service in services}
        self._keys = None if settings.keys_file is None else KeyFile(settings.keys_file, settings.gateways, clock)
        self._cards = ModelCards(self.models.services, settings.models_refresh_s, clock)
        self._list = ModelList(self.models, self._cards.card, int(time.time()))

    async def live(self, _: web.Application) -> AsyncIterator[None]:
        """Runs the background tasks from the application's start to its end."""
        falling_back = [route.service for route in self.models.routes.values() if route.fallback is not None]
        for service in (*self.models.prefill_services, *falling_back):
            has_replica(service)  # begins to watch the service now, not at the first request
        tasks = [asyncio.create_task(self._cards.refresh(), name="what services say they serve")]
        if self._keys is not None:
            tasks.append(asyncio.create_task(self._keys.watch(), name="the file of API keys"))
        yield
        await end_tasks(*tasks)
        await self._cards.close()

    def identify(self, request: web.Request) -> KeyHolder | None:
        """The holder of the request's key; None where there are no keys. Raises ApiError 401."""
        if self._keys is None:
            return None
        sent = request.headers.get(hdrs.AUTHORIZATION)
        if sent is None:  # as Anthropic's clients send it
            presented = request.headers.get("x-api-key", "")
        else:
            scheme, _, presented = sent.partition(" ")
            presented = presented.strip() if scheme.lower() == "bearer" else ""
        holder = self._keys.find(presented) if presented else None
        if holder is None:
            why = "Incorrect API key provided" if presented else "You didn't provide an API key"
            message = f"{why}. Send one of this gateway's keys in the header `Authorization: Bearer KEY`."
            raise ApiError(401, message, code="invalid_api_key", headers={hdrs.WWW_AUTHENTICATE: "Bearer"})
        return holder

    async def health_handler(self, request: web.Request) -> web.StreamResponse:
        """`/health`, `/ping`: the gateway takes requests. They wait while a model loads or is scaled to zero."""
        return web.Response()

    async def version_handler(self, request: web.Request) -> web.StreamResponse:
        """`GET /version`: Pierhead's."""
        return self._document(request, lambda holder: {"version": version("pierhead")})

    async def load_handler(self, request: web.Request) -> web.StreamResponse:
        """`GET /load`: the requests that this gateway process is answering."""
        return self._document(request, lambda holder: {"server_load": self.ongoing})

    async def models_handler(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/models`: the models, aliases and known adapters that the client may use."""
        return self._document(request, lambda holder: {"object": "list", "data": self._models_of(request, holder)})

    async def model_handler(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/models/{id}`: one of them."""
        asked = request.match_info["id"]

        def find(holder: KeyHolder | None) -> dict[str, object]:
            found = [entry for entry in self._models_of(request, holder) if entry["id"] == asked]
            if not found:
                raise unknown_model(asked)
            return found[0]

        return self._document(request, find)

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

    def names_for(self, holder: KeyHolder | None, site: Site) -> list[str]:
        """The models that a client may use there, without aliases and adapters."""
        routes = self.models.routes.items()
        names = [name for name, route in routes if name == route.model and site.model in ("", route.base)]
        return names if holder is None else [name for name in names if holder.key.may_use((name,))]

    def _models_of(self, request: web.Request, holder: KeyHolder | None) -> list[dict[str, object]]:
        only = self.site(request).model
        return [
            entry
            for names, entry in self._list.entries()
            if (holder is None or holder.key.may_use(names)) and only in ("", entry["parent"] or entry["root"])
        ]

    def _document(
        self, request: web.Request, make: Callable[[KeyHolder | None], Mapping[str, object]]
    ) -> web.StreamResponse:
        """What `make` makes for the holder of the request's key, as JSON; an ApiError as a response."""
        try:
            return web.json_response(make(self.identify(request)))
        except ApiError as error:
            return answer_error(error, {})
