"""Methods of a service's class that answer HTTP requests, without a web framework: they are aiohttp's handlers."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from aiohttp import web

HandlerT = TypeVar("HandlerT", bound="Callable[..., Awaitable[web.StreamResponse]]")

_KEY: Final = "__pierhead_endpoints__"


class HttpEndpoint(NamedTuple):
    """The requests that a method answers."""

    method: str
    """Of HTTP."""
    path: str
    """As aiohttp declares one: `/items/{id}`."""


def endpoint(method: str, path: str) -> Callable[[HandlerT], HandlerT]:
    """Have a method of a service's class answer HTTP requests; it is an aiohttp handler, and no part of the contract.

        class Hello(Service, route="/hello"):
            @endpoint("GET", "/hello/{name}")
            async def hello(self, request: web.Request) -> web.Response:
                return web.json_response({"greeting": f"Hello, {request.match_info['name']}!"})

    - method: GET (which answers HEAD as well), POST, ..., or "*" for all.
    - path: as aiohttp's router takes it; with the service's route, unless `strip_prefix` takes that off.
    A service with an ASGI application (`asgi=`) has its routes there. Raises TypeError where the method is no
    `async def`.
    """

    def mark(function: HandlerT) -> HandlerT:
        is_async = inspect.iscoroutinefunction(function)  # which would narrow the type, in an `if`
        if not is_async:
            raise TypeError(f"{function.__qualname__}: a method with @endpoint must be `async def`")
        vars(function).setdefault(_KEY, []).insert(0, HttpEndpoint(method, path))
        return function

    return mark


def endpoints_of(cls: type) -> dict[str, Sequence[HttpEndpoint]]:
    """The methods with `@endpoint`, by name."""
    members = {name: inspect.getattr_static(cls, name) for name in dir(cls)}
    return {name: found for name, each in members.items() if (found := getattr(each, _KEY, None))}


def endpoints_application(service: object, endpoints: Mapping[str, Sequence[HttpEndpoint]]) -> web.Application:
    """An aiohttp application of these methods of `service`. Imports aiohttp only now: it takes memory."""
    from aiohttp import web

    application = web.Application()
    for name, requests in endpoints.items():
        handler: Any = getattr(service, name)
        for method, path in requests:
            if method == "GET":
                application.router.add_get(path, handler)
            else:
                application.router.add_route(method, path, handler)
    return application
