"""Finds an application by `module:name`, or `module:build(key="value")`, as the commands take it."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, cast, get_type_hints

from pierhead.classes.service import Bound, Service
from pierhead.edge.methods import is_servicer

TARGET: Final = "app:app"
"""What the commands take where none is named: what `pierhead new` writes."""
TARGET_HELP: Final = (
    "module:name, of a service's class or of what its bind() returned, or module:build(key='value') of a function that "
    "returns it (default: %(default)s)"
)


_EXPECTED: Final = "expected module:name of a Service, or of what its bind() returned"


class NoService(Exception):
    """A target that is no service."""


class NoTarget(NoService):
    """A target that names nothing: it has another form, or there is no such module, or no such name in it."""


def service_at(target: str) -> type[Service] | Bound:
    """The class, or what its `bind()` returned, at `module:name`; the current directory is on the module path.

    Another object stands for an application where it has a method `__bound__()` that returns what `bind()` does.
    Raises NoService; what the module raises at its import passes.
    """
    found = application_of(imported(target))
    if isinstance(found, Bound) or (isinstance(found, type) and issubclass(found, Service)):
        return found
    raise NoService(f"{target}: {_EXPECTED}, found {found!r}{_how_it_is_served(found)}")


def _how_it_is_served(found: object) -> str:
    """What to do with what a program of its own serves; "" for everything else."""
    from aiohttp import web

    from pierhead.http.asgi_edge import asgi, is_asgi

    is_asgi_app = isinstance(found, asgi) or is_asgi(found)
    if not (is_asgi_app or isinstance(found, web.Application) or is_servicer(found)):
        return ""
    as_class = ', or write it as a service: class Web(Service, route="/", asgi=app)' if is_asgi_app else ""
    return f"; call serve(app) (`from pierhead import serve`) in a program of its own{as_class}"


def application_of(found: object) -> object:
    """What stands for an application: of an object with a method `__bound__()`, what that returns; else the object."""
    describe = getattr(type(found), "__bound__", None)
    return found if describe is None else describe(found)


def imported(target: str) -> Any:
    """What `module:name` names, where the name may have dots.

    Of `module:build(key="value")` it is what the function returns. Raises NoTarget for one that names nothing,
    NoService for arguments of what takes none; what the module raises at its import passes.
    """
    module, _, name = target.partition(":")
    name, is_call, _ = name.partition("(")
    if not module or not name:
        raise NoTarget(f"{target}: {_EXPECTED}")
    found = _import(module, target)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise NoTarget(f"{target}: {_EXPECTED}; {module} has no {name}")
    if not is_call:
        return found
    if not callable(found):
        raise NoService(f"{target}: {name} is no function that builds an application, so it takes no arguments")
    return built_by(found, arguments_of(target))


def arguments_of(target: str) -> dict[str, Any]:
    """The arguments in `module:build(key="value")`. Raises NoService for what is written otherwise."""
    try:
        call = ast.parse(target.partition(":")[2], mode="eval").body
        if isinstance(call, ast.Call) and not call.args:
            return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError):
        pass
    raise NoService(f'{target}: expected module:function(key="value", ...), with plain values')


def built_by(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What a function that builds an application returns. Where it has one parameter, that is the mapping of all
    arguments. A mapping for a parameter that is annotated with a pydantic model is read as one.
    """
    parameters = list(inspect.signature(function).parameters)
    if len(parameters) == 1 and parameters[0] not in arguments:
        arguments = {parameters[0]: dict(arguments)}
    if not any(isinstance(value, Mapping) for value in arguments.values()):
        return function(**arguments)
    hints: Mapping[str, Any] = get_type_hints(function)
    return function(**{name: _read_as(hints.get(name), value) for name, value in arguments.items()})


def _read_as(kind: Any, value: Any) -> Any:
    return kind.model_validate(value) if isinstance(value, Mapping) and hasattr(kind, "model_validate") else value


def bound_at(target: str) -> Bound:
    """As `service_at`; a class is bound without arguments. Raises NoService, also for a class that needs some."""
    found = service_at(target)
    if isinstance(found, Bound):
        return found
    try:
        return cast("Bound", found.bind())
    except TypeError as error:
        raise NoService(f"{target}: {error}; name what bind() returned with its arguments") from None


def _import(module: str, target: str) -> Any:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise NoTarget(f"{target}: there is no module {error.name} in {here}") from None
        raise
