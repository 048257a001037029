"""The `x-serve` block as a JSON Schema, for completion and checks in editors: the model's own schema, with the
description of each key from compose/reference.yaml. Committed as compose/x-serve.schema.json; a test keeps them equal.

An editor applies a schema to a whole file, so the schema describes a compose file and checks only `x-serve` blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pierhead.serve_block import ServeBlock

from .serve_block import MODELS

REFERENCE = Path(__file__).resolve().parents[2] / "compose" / "reference.yaml"
_KEY = re.compile(r"( *)([a-z_-]+):(?: .*)?")
_BLOCK = "x-serve"


def schema_text() -> str:
    """Return the schema as the committed file has it."""
    return json.dumps(compose_schema(REFERENCE.read_text(encoding="utf-8")), indent=2) + "\n"


def compose_schema(reference: str) -> dict[str, Any]:
    """Return the schema, with the descriptions in the reference (the text of compose/reference.yaml)."""
    block = MODELS[ServeBlock].model_json_schema()
    definitions = {"ServeBlock": block, **block.pop("$defs")}
    for definition in definitions.values():
        _drop_titles(definition)
    _describe(definitions, "ServeBlock", "", descriptions(reference))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Compose files with x-serve blocks",
        "description": "Checks the x-serve blocks of a Compose file; the keys around them are Compose's own.",
        "type": "object",
        "properties": {
            "services": {
                "type": "object",
                "additionalProperties": {
                    "type": ["object", "null"],
                    "properties": {_BLOCK: {"$ref": "#/$defs/ServeBlock"}},
                },
            }
        },
        "$defs": definitions,
    }


def descriptions(reference: str) -> Mapping[str, str]:
    """Return the reference's description of each key ("health.probe.path"): the comment directly above it."""
    found: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in reference.splitlines():
        key = _KEY.fullmatch(line)
        if line.lstrip().startswith("#"):
            comment.append(line.lstrip().removeprefix("#").strip())
        elif key:
            depth = len(key[1])
            parents = [*(parent for parent in parents if parent[0] < depth), (depth, key[2])]
            path = [name for _, name in parents]
            if comment and _BLOCK in path:
                found.setdefault(".".join(path[path.index(_BLOCK) + 1 :]), " ".join(comment))
            comment = []
        else:
            comment = []
    return found


def _describe(definitions: Mapping[str, Any], name: str, path: str, words: Mapping[str, str]) -> None:
    for key, schema in definitions[name]["properties"].items():
        here = f"{path}{key}"
        for option in (schema, *schema.get("anyOf", ())):
            if "$ref" in option:
                _describe(definitions, option["$ref"].rsplit("/", 1)[-1], f"{here}.", words)
        if here in words:
            schema["description"] = words[here]


def _drop_titles(definition: dict[str, Any]) -> None:
    definition.pop("title", None)
    for schema in definition.get("properties", {}).values():
        schema.pop("title", None)
