"""The page of the REST API, made of its OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from controller.daemon.api import CALLS
from controller.status import openapi
from docs.generate.markdown import cell, escape

ABOUT = """\
# REST API

The controller serves it at `http://127.0.0.1:8100` and at the Unix socket `/run/pierhead/<stack>.sock`; the command
`pierhead` uses nothing else. The same as an [OpenAPI
document](openapi.json): `GET /api/v1/openapi.json`.

"""
_REF = "#/components/schemas/"


def document(root: Path) -> dict[str, Any]:
    """Return the OpenAPI document."""
    return openapi.document(CALLS.values())


def document_text(root: Path) -> str:
    """Return it as JSON."""
    return json.dumps(document(root), indent=2) + "\n"


def page(root: Path) -> str:
    """Return the whole page."""
    described = document(root)
    lines = [ABOUT, escape(described["info"]["description"]), "\n## Calls\n"]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            lines += _call(f"{method.upper()} {path}", operation)
    lines.append("## Documents\n\nMembers with a default may be missing.\n")
    for name, schema in described["components"]["schemas"].items():
        lines += _schema(name, schema)
    return "\n".join(lines)


def _call(title: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"### `{title}` {{ #{operation['operationId']} }}\n"
    yield escape(operation["summary"]) + "\n"
    if operation["parameters"]:
        yield "| parameter | | type |\n|---|---|---|"
        for each in operation["parameters"]:
            yield f"| `{each['name']}` | {cell(each['description'])} | {_type(each['schema'])} |"
        yield ""
    if "requestBody" in operation:
        yield f"Body: {_of(operation['requestBody'])}. A change: see above for the clients that may send it.\n"
    status, answer = next(iter(operation["responses"].items()))
    yield f"Answer: {status}, {_of(answer)}.\n"


def _of(described: Mapping[str, Any]) -> str:
    [(media_type, content)] = described["content"].items()
    schema = content["schema"]
    if media_type == "application/json":
        return _type(schema)
    return f"`{media_type}` of {_type(schema)}" if "$ref" in schema else f"`{media_type}`"


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {name} {{ #{name} }}\n"
    yield escape(" ".join(schema.get("description", "").split())) + "\n"
    members = schema.get("properties", {})
    if members:
        yield "| member | type | |\n|---|---|---|"
        for member, described in members.items():
            yield f"| `{member}` | {_type(described)} | {cell(described.get('description', ''))} |"
        yield ""
    elif "enum" in schema:
        yield _type(schema) + "\n"


def _type(schema: Mapping[str, Any]) -> str:
    """Return a schema in words, with links to the documents that it names."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        return f"[{name}](#{name})"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if schema.get("type") == "array":
        return f"array of {_type(schema['items'])}" if "items" in schema else "array"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {_type(schema['additionalProperties'])}"
    bounds = [str(schema[key]) for key in ("minimum", "maximum") if key in schema]
    default = f", default {schema['default']}" if isinstance(schema.get("default"), int) else ""
    return str(schema.get("type", "any")) + (f" ({' to '.join(bounds)}{default})" if len(bounds) == 2 else "")
