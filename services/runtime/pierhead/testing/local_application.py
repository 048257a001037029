"""An application in the event loop of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import aiohttp

from pierhead.classes.handles import handle_to
from pierhead.classes.service import Bound, Service
from pierhead.classes.target import application_of
from pierhead.runner.front import Front
from pierhead.runner.in_loop import LoopRunner
from pierhead.runner.options import NoOptions, check_keys
from pierhead.runner.runner import Offer

ServiceT = TypeVar("ServiceT", bound=Service)

TIMEOUT_S = 60.0


class LocalApplication:
    """An application that runs; see `local`."""

    def __init__(self, application: LoopRunner, base_url: str, http: aiohttp.ClientSession) -> None:
        self.base_url = base_url
        """Where its routes are, for any HTTP client."""
        self.http = http
        """An aiohttp client, to which paths are enough: `http.get("/shop")`."""
        self._application = application

    def handle(self, cls: type[ServiceT]) -> ServiceT:
        """A handle to one of its services, as another service has it. Raises KeyError for a class that is none."""
        for bound in self._application.graph.values():
            if bound.cls is cls:
                return cast("ServiceT", handle_to(bound))
        raise KeyError(f"{cls.__name__} is no service of this application; it has {', '.join(self._application.graph)}")


@asynccontextmanager
async def local(
    application: object, *, x_serve: Mapping[str, Mapping[str, Any]] | None = None
) -> AsyncIterator[LocalApplication]:
    """All services of an application in the running loop, as `python -m pierhead dev` serves them.

        async with local(shop) as running:
            assert await running.handle(Scorer).score(3) == 1.5

    - application: what `bind()` returned, or a service's class whose constructor needs no arguments, or what the `bind`
      of `pierhead.rayserve` returned.
    - x_serve: keys that override the classes' keywords, by service: `{"scorer": {"max_ongoing_requests": 1}}`.
    Calls between services, errors, deadlines, admission, queues and batches are as in containers; each service has as
    many replicas as its keys say (`replicas`). `override_handle` replaces one by a fake. Raises what a
    constructor or `check_health` raises, NoApplication for a graph that cannot be served, and NoOptions for keys that
    no service of it can have.
    """
    found = application_of(application)
    bound = found.bind() if isinstance(found, type) and issubclass(found, Service) else found
    if not isinstance(bound, Bound):
        raise TypeError(f"local() takes a Service's class, or what its bind() returned, found {application!r:.60}")
    front = Front()

    def changed(offer: Offer) -> None:
        front.switch(offer.routes, offer.grpc_port)

    running = LoopRunner(bound, x_serve, changed)
    for name, words in (x_serve or {}).items():
        if name not in running.graph:
            raise NoOptions(f"x_serve: {name} is no service of this application; it has {', '.join(running.graph)}")
        check_keys(f"x_serve: {name}", words)
    changed(await running.start())
    try:
        port = await front.listen("127.0.0.1", 0)
        base_url = f"http://127.0.0.1:{port}"
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(base_url, timeout=timeout) as http:
            yield LocalApplication(running, base_url, http)
    finally:
        await front.close()
        await running.stop(at_once=True)
