"""The OpenAPI document of the REST API, served at /api/v1/openapi.json. Paths and methods come from the application's
routes, summaries from the handlers' docstrings, bodies and answers from the records.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from ..build import current_build
from .records import answers, changes, services
from .records.document import Document

VERSION = "1"
"""The API's version, as in its paths."""
_REF = "#/components/schemas/{model}"
_IN_PATHS = {
    "name": "A service's name.",
    "uuid": "A GPU's UUID, as `pierhead gpus` lists it.",
    "key": "The name of a client's key.",
    "node": "A node's name, as `pierhead nodes` lists it, or its id.",
}
_WHO_MAY = (
    "Without a token set, the machine itself is answered and nobody else. With `PIERHEAD_API_TOKEN` set, every caller "
    "sends `Authorization: Bearer <token>`, with that token or one of `PIERHEAD_API_TOKENS` whose role allows it. "
    "`/healthz`, `/metrics` and `/api/v1/targets` are open."
)


@dataclass(frozen=True)
class Query:
    """One parameter of a query string."""

    name: str
    description: str
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class Operation:
    """A route's parameters and answer. An operation with a body is a change, and is answered with 202."""

    answer: Any = None
    """None: text."""
    body: Any = None
    query: tuple[Query, ...] = ()
    media_type: str = "application/json"
    is_done: bool = False
    """It is a change that is answered with 200, after it was carried out."""


def _integer(name: str, description: str, least: int, most: int | None = None, default: int | None = None) -> Query:
    bounds = {"minimum": least, "maximum": most, "default": default}
    return Query(
        name, description, {"type": "integer", **{key: value for key, value in bounds.items() if value is not None}}
    )


def _text(name: str, description: str) -> Query:
    return Query(name, description, {"type": "string"})


OPERATIONS: Mapping[str, Operation] = {
    "services": Operation(services.Services),
    "service": Operation(services.Service),
    "logs": Operation(
        answers.Logs,
        query=(
            _integer("tail", "Lines of each replica.", 1, 10_000, 100),
            _integer("after", "Only lines later than this unix time.", 0),
        ),
    ),
    "revisions": Operation(answers.Revisions),
    "scale": Operation(changes.Scaled, changes.Scale),
    "rollback": Operation(changes.Asked, changes.Rollback),
    "abort": Operation(changes.Asked, changes.Nothing),
    "promote": Operation(changes.Asked, changes.Nothing),
    "restart": Operation(changes.Asked, changes.Nothing),
    "operate": Operation(changes.Operated, changes.Operate, is_done=True),
    "deploy": Operation(changes.Deployed, changes.Deploy),
    "gpu": Operation(changes.Marked, changes.Mark),
    "nodes": Operation(services.Nodes),
    "drain_node": Operation(changes.NodeAsked, changes.Drain),
    "activate_node": Operation(changes.NodeAsked, changes.Nothing),
    "label_node": Operation(changes.NodeAsked, changes.Labels),
    "keys": Operation(answers.Keys),
    "make_key": Operation(changes.MadeKey, changes.MakeKey, is_done=True),
    "revoke_key": Operation(changes.Revoked, changes.Nothing),
    "backup": Operation(answers.Backup),
    "restore": Operation(changes.Restored, changes.Restore, is_done=True),
    "plan": Operation(
        answers.PlanDocument,
        query=(Query("format", "text: what `make plan` prints.", {"enum": ["json", "text"], "default": "json"}),),
    ),
    "routes": Operation(answers.Routes),
    "events": Operation(
        answers.Events,
        query=(
            _integer("since", "Only events with a higher number.", 0),
            _integer("wait", "Seconds to wait for the first of them.", 0, 60, 0),
            _integer("limit", "At most this many events, the newest.", 1, 1000, 100),
            _text("service", "Only events of this service."),
            _text("kind", "Only events of these kinds, separated by commas."),
        ),
    ),
    "targets": Operation(
        list[answers.Target],
        query=(_text("job", "replicas (the default), or haproxy: one on each node, where there are several."),),
    ),
    "healthz": Operation(answers.Health),
    "metrics": Operation(media_type="text/plain"),
    "openapi": Operation(dict[str, Any]),
}
"""By the name of the handler."""


def document(app: web.Application) -> dict[str, Any]:
    """Return the document of an application. Raises KeyError for a handler that is not in OPERATIONS."""
    paths: dict[str, dict[str, Any]] = {}
    for route in app.router.routes():
        if route.resource is not None and route.method != "HEAD":
            operation = _operation(route.handler, route.resource.canonical)
            paths.setdefault(route.resource.canonical, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Pierhead's controller",
            "version": VERSION,
            "x-build": current_build(),
            "description": f"{_WHO_MAY} A change that is answered with 202 is not carried out yet. "
            "Times are unix times by the machine's wall clock.",
        },
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": _WHO_MAY}},
        },
    }


def _operation(handler: Any, path: str) -> dict[str, Any]:
    operation = OPERATIONS[handler.__name__]
    parameters = [
        {"name": name, "in": "path", "required": True, "description": words, "schema": {"type": "string"}}
        for name, words in _IN_PATHS.items()
        if f"{{{name}}}" in path
    ]
    parameters += [
        {"name": query.name, "in": "query", "description": query.description, "schema": dict(query.schema)}
        for query in operation.query
    ]
    is_accepted = operation.body is not None and not operation.is_done
    described: dict[str, Any] = {
        "operationId": handler.__name__,
        "summary": (inspect.getdoc(handler) or "").split("\n", 1)[0],
        "parameters": parameters,
        "responses": {
            "202" if is_accepted else "200": _content("Accepted." if is_accepted else "The answer.", operation),
            "default": {"description": "Refused, or failed.", "content": _json(answers.Error)},
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"content": _json(operation.body)}
    return described


def _content(description: str, operation: Operation) -> dict[str, Any]:
    if operation.answer is None:
        return {"description": description, "content": {operation.media_type: {"schema": {"type": "string"}}}}
    return {"description": description, "content": _json(operation.answer)}


@functools.cache
def _json(answer: Any) -> dict[str, Any]:
    schema = TypeAdapter(answer).json_schema(ref_template=_REF)
    schema.pop("$defs", None)
    if isinstance(answer, type) and issubclass(answer, Document):
        schema = {"$ref": _REF.format(model=answer.__name__)}
    return {"application/json": {"schema": schema}}


@functools.cache
def _schemas() -> dict[str, Any]:
    """Return the schema of every document, by its name."""
    named = [each for module in (answers, changes, services) for each in vars(module).values()]
    kinds = [each for each in named if isinstance(each, type) and issubclass(each, Document) and each is not Document]
    found: dict[str, Any] = {}
    for kind in kinds:
        schema = TypeAdapter(kind).json_schema(ref_template=_REF)
        found |= schema.pop("$defs", {})
        found[kind.__name__] = schema
    return dict(sorted(found.items()))
