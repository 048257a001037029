"""The services of an application, and whether a stack could serve them."""

from __future__ import annotations

from collections.abc import Mapping

from pierhead.classes.service import Bound
from pierhead.runner.options import Options
from pierhead.runner.runner import NoApplication


def graph_of(bound: Bound) -> dict[str, Bound]:
    """The services of an application. Raises NoApplication."""
    try:
        return bound.graph()
    except ValueError as error:
        raise NoApplication(str(error)) from None


def check_routes(words: Mapping[str, Options], has_http: Mapping[str, bool]) -> None:
    """Raise NoApplication for two services of one route, a route that is no path, and one that no HTTP answers."""
    owners: dict[str, str] = {}
    for name, block in words.items():
        route = block.get("route")
        if route is None:
            continue
        if not str(route).startswith("/"):
            raise NoApplication(f'{name}: x-serve.route: expected a path that starts with "/", found "{route}"')
        owner = owners.setdefault(route, name)
        if owner != name:
            raise NoApplication(f"{owner} and {name} have the same route, {route}; one of them needs another one")
        if not has_http[name]:
            raise NoApplication(
                f"{name} has the route {route} and answers no HTTP: give its class an ASGI application (asgi=) or "
                "methods with @endpoint, or remove the route"
            )
