"""Text of the code as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_CODE = re.compile(r"(`[^`]*`)")
_SPECIAL = re.compile(r"([\\*\[\]])")


def escape(text: str) -> str:
    """Return text that Markdown shows as it is written; `code` stays code."""
    return "".join(part if part.startswith("`") else _plain(part) for part in _CODE.split(text))


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return escape(" ".join(text.split())).replace("|", "\\|")


def type_in_words(schema: Mapping[str, Any]) -> str:
    """Return a JSON Schema in words, with links to the documents that it names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name})"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(type_in_words(each) for each in schema["anyOf"])
    if schema.get("type") == "array":
        return f"array of {type_in_words(schema['items'])}" if "items" in schema else "array"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {type_in_words(schema['additionalProperties'])}"
    bounds = [str(schema[key]) for key in ("minimum", "maximum") if key in schema]
    default = f", default {schema['default']}" if isinstance(schema.get("default"), int) else ""
    types = schema.get("type", "string" if "pattern" in schema else "any")
    words = types if isinstance(types, str) else " or ".join(types)
    if len(bounds) == 2:
        return f"{words} ({' to '.join(bounds)}{default})"
    return f"{words} (at least {schema['minimum']})" if "minimum" in schema else words


def _plain(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text.replace("<", "&lt;"))
