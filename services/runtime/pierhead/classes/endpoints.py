"""Methods of a service's class that answer HTTP requests, without a web framework."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from pierhead.classes.conversions import converted
from pierhead.errors import BadRequest

if TYPE_CHECKING:
    from aiohttp import web

HandlerT = TypeVar("HandlerT", bound=Callable[..., Awaitable[Any]])

_KEY: Final = "__pierhead_endpoints__"

_NAMES: Final = {str: "a text", int: "an integer", float: "a number"}
_KINDS: Final[Mapping[Any, type]] = {hint: kind for kind in _NAMES for hint in (kind, kind.__name__)}
"""By the hint of a parameter, which may be a string: what its text becomes."""
_LARGEST: Final = 2**63
"""An integer is below it, as in the calls between services."""
_SHOWN: Final = 40
"""Characters of a wrong value that a message quotes."""


class HttpEndpoint(NamedTuple):
    """The requests that a method answers."""

    method: str
    path: str
    """As aiohttp declares one: `/items/{id}`."""


def endpoint(method: str, path: str) -> Callable[[HandlerT], HandlerT]:
    """Make a method of a service's class answer HTTP requests; it is not part of the contract.

        class Hello(Service, route="/hello"):
            @endpoint("GET", "/hello/{name}")
            async def hello(self, name: str, times: int = 1) -> dict[str, str]:
                return {"greeting": f"Hello, {name}!" * times}

    - method: GET (which answers HEAD as well), POST, ..., or "*" for all.
    - path: in the form of aiohttp's router; with the service's route, unless `strip_prefix` removes that.
    - its parameters: `str`, `int` (of 64 bits) and `float`, from the path or the query string by their names. One that
      is missing and has no default, or has another type, is a BadRequest. A first parameter of any other type is the
      `aiohttp.web.Request`.
    - what it returns: an aiohttp response; an async iterator, whose items are sent as events (`sse`), a text unchanged,
      others as JSON; or else JSON: what JSON has, dataclasses, pydantic models, sets, enums' values, dates, times,
      decimals and UUIDs as text, durations in seconds, NumPy's numbers and arrays. NaN and infinity, which JSON does
      not have, are an error of the service.
    A service with an ASGI application (`asgi=`) has its routes there. Raises TypeError where the method is no
    `async def`, and for parameters that a request does not have.
    """

    def mark(function: HandlerT) -> HandlerT:
        is_async = inspect.iscoroutinefunction(function)  # which would narrow the type, in an `if`
        if not is_async:
            raise TypeError(
                f"{function.__qualname__}: a method with @endpoint must be `async def`, without `yield`; "
                "to stream, return an async iterator"
            )
        _, *parameters = inspect.signature(function).parameters.values()
        for each in parameters[1:]:
            if each.annotation not in _KINDS:
                raise TypeError(f"{function.__qualname__}({each.name}): expected str, int or float, found {each}")
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
        handler = _handler(getattr(service, name))
        for method, path in requests:
            if method == "GET":
                application.router.add_get(path, handler)
            else:
                application.router.add_route(method, path, handler)
    return application


def _handler(method: Callable[..., Awaitable[Any]]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The method as aiohttp calls it."""
    from aiohttp import web

    from pierhead.http.events import sse, sse_event

    parameters = list(inspect.signature(method).parameters.values())
    takes_request = bool(parameters) and parameters[0].annotation not in _KINDS
    texts = [(each.name, _KINDS[each.annotation], each.default) for each in parameters[takes_request:]]

    def event(item: object) -> bytes:
        return sse_event(item if isinstance(item, str) else _encode(item))

    async def handle(request: web.Request) -> web.StreamResponse:
        values = {name: _value(request, name, kind, default) for name, kind, default in texts}
        result = await (method(request, **values) if takes_request else method(**values))
        if isinstance(result, web.StreamResponse):
            return result
        if isinstance(result, AsyncIterable):
            return await sse(request, result, event)
        return web.Response(body=_encode(result).encode(), headers={"Content-Type": "application/json"})

    return handle


def _plain(value: Any) -> Any:
    """What JSON has in place of a value that it does not have. Raises TypeError."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return list(value)
    numpy = sys.modules.get("numpy")  # which is not imported for this
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        return value.tolist()
    known = converted(type(value))
    if known is None:
        raise TypeError(
            f"an endpoint returned {value!r:.60}, which JSON does not have; return a dict, or an aiohttp response"
        )
    return known.write(value)


_encode: Final = json.JSONEncoder(allow_nan=False, default=_plain).encode


def _value(request: web.Request, name: str, kind: type, default: Any) -> Any:
    """What a request has for a parameter. Raises BadRequest."""
    text = request.match_info.get(name)
    if text is None:
        text = request.query.get(name)
    if text is None:
        if default is inspect.Parameter.empty:
            raise BadRequest(f"{name}: missing in the query string; send {request.path}?{name}=...")
        return default
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or (kind is int and not -_LARGEST <= value < _LARGEST):
        raise BadRequest(f'{name}: expected {_NAMES[kind]}, found "{text[:_SHOWN]}"')
    return value
