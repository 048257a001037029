"""Methods of a class as routes of a FastAPI application: `@app.get("/recommend") async def recommend(self, ...)`."""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pierhead.http.asgi_edge import AsgiApp

SERVICE_KEY: Final = "pierhead.service"
"""Where a request's scope has the object whose method is called."""


def adopt_routes(app: AsgiApp, cls: type) -> frozenset[Any]:
    """Give the class's methods that are routes of the application their `self`; returns these methods.

    FastAPI has taken `self` for a parameter of the query when it read the signature: each such route is read again.
    """
    fastapi = sys.modules.get("fastapi")
    if fastapi is None or not isinstance(app, fastapi.FastAPI):
        return frozenset()
    own = {id(member) for base in cls.__mro__ for member in vars(base).values() if inspect.isfunction(member)}
    found = set()
    for route in app.router.routes:
        endpoint = getattr(route, "endpoint", None)
        if id(endpoint) in own:
            found.add(endpoint)
            read_again(route, service_of_request(), dependency_overrides_provider=app)
    return frozenset(found)


def with_service(app: AsgiApp, service: object) -> AsgiApp:
    """The application, whose adopted routes are called with `service` as their `self`."""

    async def served(scope: Any, receive: Any, send: Any) -> None:
        scope[SERVICE_KEY] = service  # in place: the edge reads the route's name from the scope afterwards
        await app(scope, receive, send)

    return served


def read_again(route: Any, first: Any, **changed: Any) -> None:
    """Make FastAPI read a route's function again, whose first parameter depends on `first`; `changed`: its options."""
    signature = inspect.signature(route.endpoint)
    own, *others = signature.parameters.values()
    # Keywords, which is how FastAPI passes everything: so a default may stand before what has none.
    keywords = [own.replace(kind=own.KEYWORD_ONLY, default=first)]
    keywords += [
        each if each.kind is each.VAR_KEYWORD else each.replace(kind=each.KEYWORD_ONLY)
        for each in others
        if each.kind is not each.VAR_POSITIONAL
    ]
    route.endpoint.__signature__ = signature.replace(parameters=keywords)
    names = inspect.signature(type(route).__init__).parameters
    route.__init__(**{name: getattr(route, name) for name in names if hasattr(route, name)} | changed)


@cache
def service_of_request() -> Any:
    """FastAPI calls it for each request, with what its hint asks for."""
    from fastapi import Depends
    from starlette.requests import HTTPConnection

    async def service(connection: Any) -> Any:
        return connection.scope[SERVICE_KEY]

    service.__annotations__["connection"] = HTTPConnection
    return Depends(service)
