"""Methods of a deployment's class as routes of its FastAPI application, each with the replica's object as `self`."""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any, Final

from pierhead.classes.routes import read_again, service_of_request
from pierhead.rayserve.exceptions import RayServeException

_OWNER: Final = "_rayserve_owner"
"""The attribute of a route's function that names the class whose view it was made for."""


def frozen_app(app: Any, cls: type[Any]) -> Any:
    """The application that the replicas of a class serve.

    Of a FastAPI application or router it is a copy, in which the routes of the class's methods know their `self`: later
    changes of `app`, and other classes that share it, do not matter to it. Any other application is served unchanged.
    """
    fastapi = sys.modules.get("fastapi")
    if fastapi is None or not isinstance(app, fastapi.FastAPI | fastapi.APIRouter):
        return app
    return _view(app, cls, fastapi)


def _view(app: Any, cls: type[Any], fastapi: Any) -> Any:
    is_app = isinstance(app, fastapi.FastAPI)
    former = app.router if is_app else app
    router = copy.copy(former)
    if getattr(router.middleware_stack, "__self__", None) is former:
        router.middleware_stack = router.app
    made = copy.copy(app) if is_app else router
    own: list[Any] = []
    router.routes = _others(router.routes, cls, own, fastapi, "")
    if is_app:
        made.router = router
        router.dependency_overrides_provider = made
        made.exception_handlers = dict(app.exception_handlers)
        made.user_middleware = list(app.user_middleware)
        made.middleware_stack = None
        made.openapi_schema = None
        _renew_documents(made, router)
    for route in own:
        router.routes.append(_with_self(route, cls, made if is_app else None))
    changed = getattr(router, "_mark_routes_changed", None)
    if callable(changed):
        changed()
    return made


def _others(routes: Any, cls: type[Any], own: list[Any], fastapi: Any, prefix: str) -> list[Any]:
    """The routes without those of classes; those of this class are added to `own`, with their whole path."""
    kept = []
    for route in routes:
        endpoint = getattr(route, "endpoint", None)
        inner = getattr(route, "original_router", None)
        if isinstance(route, fastapi.routing.APIRoute | fastapi.routing.APIWebSocketRoute) and endpoint is not None:
            if _is_of(endpoint, cls):
                own.append(_at(route, prefix))
            elif getattr(endpoint, _OWNER, cls) is cls:
                kept.append(route)
        elif inner is not None:
            beneath = prefix + getattr(route.include_context, "prefix", "")
            twin = copy.copy(inner)
            twin.routes = _others(inner.routes, cls, own, fastapi, beneath)
            kept.append(type(route)(original_router=twin, include_context=route.include_context))
        else:
            kept.append(route)
    return kept


def _is_of(endpoint: Any, cls: type[Any]) -> bool:
    name = getattr(endpoint, "__qualname__", "")
    return any(name.startswith(f"{base.__qualname__}.") for base in cls.__mro__[:-1])


def _at(route: Any, prefix: str) -> Any:
    """The route with a prefix before its path."""
    if not prefix:
        return route
    moved = copy.copy(route)
    moved.path = prefix + route.path
    return moved


def _with_self(route: Any, cls: type[Any], app: Any) -> Any:
    """A new route, whose function gets the replica's object as its first argument."""
    if not inspect.signature(route.endpoint).parameters:
        raise RayServeException("Methods in FastAPI class-based view must have ``self`` as their first argument.")
    made = copy.copy(route)
    read_again(made, service_of_request(), **({} if app is None else {"dependency_overrides_provider": app}))
    setattr(made.endpoint, _OWNER, cls)
    return made


def _renew_documents(app: Any, router: Any) -> None:
    """Make the routes of /docs and /openapi.json again: the old ones describe the application that was copied."""
    paths = {
        path
        for path in (app.openapi_url, app.docs_url, app.redoc_url, getattr(app, "swagger_ui_oauth2_redirect_url", None))
        if path
    }
    others = [
        route
        for route in router.routes
        if not (getattr(route, "path", None) in paths and not getattr(route, "include_in_schema", True))
    ]
    router.routes = []
    app.setup()
    router.routes.extend(others)
