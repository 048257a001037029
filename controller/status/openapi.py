"""The OpenAPI document of the REST API, served at /api/v1/openapi.json. It is made of the API's table of calls
(daemon/api.py), whose summaries are the handlers' docstrings, and of the records.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from ..api_tokens import Role
from ..build import current_build
from .records import answers, changes, services, traces
from .records.document import Document

VERSION = "1"
"""The API's version, as in its paths."""
_REF = "#/components/schemas/{model}"
_IN_PATHS = {
    "name": "A service's name.",
    "uuid": "A GPU's UUID, as `pierhead gpus` lists it.",
    "silence": "The id of a silence.",
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
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})


def whole_query(name: str, description: str, least: int, most: int | None = None, default: int | None = None) -> Query:
    """Return a parameter that is a whole number."""
    bounds = {"minimum": least, "maximum": most, "default": default}
    given = {key: value for key, value in bounds.items() if value is not None}
    return Query(name, description, {"type": "integer", **given})


@dataclass(frozen=True)
class ApiCall:
    """One call of the API. One with a body is a change, and is answered with 202."""

    method: str
    path: str
    role: Role | None
    """Who may make it; None = everybody, without a token."""
    handler: Callable[..., Awaitable[object]]
    """Of the request, and of the body where there is one. Its docstring is the summary."""
    answer: Any = None
    """None: text."""
    body: Callable[[bytes], Document] | None = None
    """Reads it, as the record that it returns."""
    query: tuple[Query, ...] = ()
    is_done: bool = False
    """It is a change that is answered with 200, after it was carried out."""
    is_stream: bool = False
    """It is answered with server-sent events, each of which has an `answer`."""
    notes_itself: bool = False
    """Its event is no beginning of the body, or there is none."""
    longest_body: int | None = None
    """Bytes; None = as the API limits all bodies."""

    @property
    def name(self) -> str:
        """What it is called in the document."""
        return self.handler.__name__

    @property
    def status(self) -> int:
        """Of its answer."""
        return 202 if self.body is not None and not self.is_done else 200


def document(calls: Iterable[ApiCall]) -> dict[str, Any]:
    """Return the document of an API with these calls."""
    paths: dict[str, dict[str, Any]] = {}
    for call in calls:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call)
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


def _operation(call: ApiCall) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "description": words, "schema": {"type": "string"}}
        for name, words in _IN_PATHS.items()
        if f"{{{name}}}" in call.path
    ]
    parameters += [
        {"name": query.name, "in": "query", "description": query.description, "schema": dict(query.schema)}
        for query in call.query
    ]
    text = {"text/plain": {"schema": {"type": "string"}}}
    described: dict[str, Any] = {
        "operationId": call.name,
        "summary": (inspect.getdoc(call.handler) or "").split("\n", 1)[0],
        "parameters": parameters,
        "responses": {
            str(call.status): {
                "description": "Accepted." if call.status == 202 else "The answer.",
                "content": text if call.answer is None else _json(call.answer, is_stream=call.is_stream),
            },
            "default": {"description": "Refused, or failed.", "content": _json(answers.Error)},
        },
    }
    if call.body is not None:
        described["requestBody"] = {"content": _json(get_type_hints(call.body)["return"])}
    return described


@functools.cache
def _json(answer: Any, *, is_stream: bool = False) -> dict[str, Any]:
    schema = TypeAdapter(answer).json_schema(ref_template=_REF)
    schema.pop("$defs", None)
    if isinstance(answer, type) and issubclass(answer, Document):
        schema = {"$ref": _REF.format(model=answer.__name__)}
    return {"text/event-stream" if is_stream else "application/json": {"schema": schema}}


@functools.cache
def _schemas() -> dict[str, Any]:
    """Return the schema of every document, by its name."""
    named = [each for module in (answers, changes, services, traces) for each in vars(module).values()]
    kinds = [each for each in named if isinstance(each, type) and issubclass(each, Document) and each is not Document]
    found: dict[str, Any] = {}
    for kind in kinds:
        schema = TypeAdapter(kind).json_schema(ref_template=_REF)
        found |= schema.pop("$defs", {})
        found[kind.__name__] = schema
    return dict(sorted(found.items()))
