"""The page of the REST API, made of its OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from controller.daemon.api import CALLS
from controller.status import openapi
from docs.generate.markdown import cell, escape, type_in_words

ABOUT = """\
# REST API

The controller serves it at `http://127.0.0.1:8100` and at the Unix socket `/run/pierhead/<stack>.sock`; the command
`pierhead` uses nothing else. The same as an [OpenAPI
document](openapi.json): `GET /api/v1/openapi.json`.

"""

_REF = "#/components/schemas/"
_NAMES = {"name": "web", "uuid": "GPU-1b2c", "node": "worker-1", "key": "k7x2", "silence": "9f3e"}
"""For the parameters of paths, in examples."""
_DEPTH = 3
"""Of records within records in an example's answer."""


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
    schemas = described["components"]["schemas"]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            lines += _call(f"{method.upper()} {path}", operation)
            lines += _example(path, method.upper(), operation, schemas)
    lines.append("## Documents\n\nMembers with a default may be missing.\n")
    for name, schema in schemas.items():
        lines += _schema(name, schema)
    return "\n".join(lines)


def _call(title: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"### `{title}` {{ #{operation['operationId']} }}\n"
    yield escape(operation["summary"]) + "\n"
    if operation["parameters"]:
        yield "| parameter | | type |\n|---|---|---|"
        for each in operation["parameters"]:
            yield f"| `{each['name']}` | {cell(each['description'])} | {type_in_words(each['schema'])} |"
        yield ""
    if "requestBody" in operation:
        yield f"Body: {_of(operation['requestBody'])}. A change: see above for the clients that may send it.\n"
    status, answer = next(iter(operation["responses"].items()))
    yield f"Answer: {status}, {_of(answer)}.\n"


def _example(path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    """Yield the call as it is typed, and an answer of its form."""
    typed = f"curl -s http://127.0.0.1:8100{path.format_map(_NAMES)}"
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        typed += f" -X {method} --json '{json.dumps(_sample(schema, schemas, _DEPTH, only_required=True))}'"
    yield f"```bash\n{typed}\n```\n"
    content = next(iter(operation["responses"].values()))["content"]
    if "application/json" in content:
        answer = json.dumps(_sample(content["application/json"]["schema"], schemas, _DEPTH), indent=2)
        yield f"```json\n{answer}\n```\n"


def _sample(schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int, *, only_required: bool = False) -> Any:
    """Return a value of a schema's form. Records that are more than `depth` below are empty."""
    if "$ref" in schema:
        return _sample(schemas[schema["$ref"].removeprefix(_REF)], schemas, depth - 1, only_required=only_required)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    if "anyOf" in schema:
        return _sample(schema["anyOf"][0], schemas, depth, only_required=only_required)
    if schema.get("type") == "array":
        return [_sample(schema["items"], schemas, depth)] if depth and "items" in schema else []
    if schema.get("type") == "object":
        shown = schema.get("required", ()) if only_required else schema.get("properties", ())
        return {name: _sample(schema["properties"][name], schemas, depth) for name in shown} if depth else {}
    blank = {"string": "...", "integer": schema.get("minimum", 0), "number": 0.0, "boolean": False}
    return blank.get(str(schema.get("type")))


def _of(described: Mapping[str, Any]) -> str:
    [(media_type, content)] = described["content"].items()
    schema = content["schema"]
    if media_type == "application/json":
        return type_in_words(schema)
    return f"`{media_type}` of {type_in_words(schema)}" if "$ref" in schema else f"`{media_type}`"


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {name} {{ #{name} }}\n"
    yield escape(" ".join(schema.get("description", "").split())) + "\n"
    members = schema.get("properties", {})
    if members:
        yield "| member | type | |\n|---|---|---|"
        for member, described in members.items():
            yield f"| `{member}` | {type_in_words(described)} | {cell(described.get('description', ''))} |"
        yield ""
    elif "enum" in schema:
        yield type_in_words(schema) + "\n"
