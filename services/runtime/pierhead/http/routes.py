"""Where the requests of an aiohttp application go, remembered for paths without variables.

aiohttp walks its resources for each request. For a path that stands in the code as it is, the walk's result depends on
nothing but method and path, and is the same every time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from aiohttp import hdrs, web
from aiohttp.web_urldispatcher import DynamicResource, PlainResource, StaticResource, UrlDispatcher, UrlMappingMatchInfo

from pierhead.edge.edge import UNMATCHED

_BY_PATH_ALONE = (PlainResource, DynamicResource, StaticResource)


class KnownRoute(NamedTuple):
    """A route to which a path without variables leads."""

    route: web.AbstractRoute
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    label: str


class Routes:
    """The routes of one application that has been started: nothing is added to it any more."""

    def __init__(self, app: web.Application, *, remember: bool) -> None:
        """`remember`: whether what goes on inside aiohttp is known, so that its walk can be spared."""
        self._app = app
        self._known: dict[tuple[str, str], KnownRoute] = {}
        self._labels: dict[tuple[web.AbstractRoute, str], str] = {}
        self._may_remember = remember and _goes_by_path_alone(app)

    def find(self, request: web.Request) -> KnownRoute | None:
        """The remembered route of a request, which then knows its match; None: `Application._handle` has to look."""
        known = self._known.get((request.method, request.rel_url.raw_path))
        if known is None or hdrs.EXPECT in request.headers:
            return None
        match = UrlMappingMatchInfo({}, known.route)
        match.add_app(self._app)
        match.freeze()
        request._match_info = match
        return known

    def remember(self, request: web.Request) -> None:
        """`Application._handle` has looked: next time it need not. At most each path in the code, with each method."""
        match = request._match_info
        if not self._may_remember or match is None or match.http_exception is not None:
            return
        resource, path = match.route.resource, request.rel_url.raw_path
        if type(resource) is PlainResource and path == resource.canonical and request.method in hdrs.METH_ALL:
            key = (request.method, path)
            self._known[key] = KnownRoute(match.route, match.handler, self.label(request))

    def label(self, request: web.Request) -> str:
        """The route as it was declared (`GET /items/{id}`): raw paths as labels would grow without bound."""
        match = request._match_info  # `request.match_info` fails where there is none: the router itself has failed
        if match is None:
            return UNMATCHED
        key = (match.route, request.method)
        label = self._labels.get(key)
        if label is None:
            resource = match.route.resource
            if resource is None:
                return UNMATCHED  # its routes are made anew for each request
            if request.method not in hdrs.METH_ALL:
                return f"OTHER {resource.canonical}"
            label = self._labels[key] = f"{request.method} {resource.canonical}"
        return label


def _goes_by_path_alone(app: web.Application) -> bool:
    """Whether method and path decide where a request goes, and nothing stands between the router and the handler."""
    router: Any = app.router
    return (
        type(app)._handle is web.Application._handle
        and type(router) is UrlDispatcher
        and not app._run_middlewares
        and not app._subapps
        and all(type(resource) in _BY_PATH_ALONE for resource in router.resources())
    )
