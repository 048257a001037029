"""The smallest thing that satisfies a JSON schema, or a regular expression. Pure.

Enough of JSON Schema for tool parameters and response formats; what is not understood is refused, never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

from services.llm.server.errors import LLMRequestError

MOST_DEPTH = 64
MOST_ITEMS = 1000
MOST_VALUES = 10_000
"""Of an instance, and characters of a match: arrays within arrays multiply, and so do repetitions."""
_FORMATS = {
    "date": "2000-01-01",
    "time": "00:00:00Z",
    "date-time": "2000-01-01T00:00:00Z",
    "duration": "P1D",
    "email": "a@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")


def smallest(schema: object, param: str) -> Any:
    """A minimal instance. Raises LLMRequestError that names the place in the schema."""
    return _Maker(schema, param).make(schema, "", 0)


def smallest_match(pattern: str, param: str) -> str:
    """A short string that a regular expression matches. Raises LLMRequestError."""
    try:
        re.compile(pattern)
        text = _matching(sre_parser.parse(pattern), {})
    except (re.error, RecursionError, OverflowError, _NotUnderstoodError) as error:
        raise LLMRequestError(
            f"{param}: the regular expression {json.dumps(pattern)} cannot be used: {error}",
            param=param, code="invalid_grammar",
        ) from None  # fmt: skip
    if not re.fullmatch(pattern, text):
        raise LLMRequestError(
            f"{param}: the mock engine finds no match for {json.dumps(pattern)}", param=param, code="invalid_grammar"
        )
    return text


class _Maker:
    def __init__(self, root: object, param: str) -> None:
        self._root = root
        self._param = param
        self._made = 0

    def make(self, schema: object, at: str, depth: int) -> Any:
        self._reject_endless(at, depth)
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise self._bad(at, f"expected an object, found {json.dumps(schema)}")
        if "$ref" in schema:
            return self.make(self._target(schema["$ref"], at), at, depth + 1)
        if "const" in schema:
            return schema["const"]
        for name in ("enum", "anyOf", "oneOf"):
            if name in schema:
                choices = schema[name]
                if not isinstance(choices, list) or not choices:
                    raise self._bad(f"{at}/{name}", "expected an array that is not empty")
                return choices[0] if name == "enum" else self._first(choices, f"{at}/{name}", depth)
        if "allOf" in schema:
            return self.make(self._joined(schema, at), at, depth + 1)
        return self._typed(schema, at, depth)

    def _reject_endless(self, at: str, depth: int) -> None:
        self._made += 1
        if self._made > MOST_VALUES:
            raise self._bad(at, f"it needs more than {MOST_VALUES} values")
        if depth > MOST_DEPTH:
            raise self._bad(at, "it needs itself without end")

    def _first(self, choices: list[Any], at: str, depth: int) -> Any:
        """Of the first choice that does not need itself."""
        error: LLMRequestError | None = None
        for number, choice in enumerate(choices):
            try:
                return self.make(choice, f"{at}/{number}", depth + 1)
            except LLMRequestError as found:
                error = found
        raise error or self._bad(at, "expected a choice")

    def _typed(self, schema: dict[str, Any], at: str, depth: int) -> Any:
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            kind = kind[0]
        if kind is None:
            kind = "array" if "items" in schema else "object"
        if kind not in _TYPES:
            raise self._bad(f"{at}/type", f"expected one of {', '.join(_TYPES)}, found {json.dumps(kind)}")
        if kind == "object":
            return self._object(schema, at, depth)
        if kind == "array":
            count = self._count(schema, "minItems", at)
            return [self.make(schema.get("items", {}), f"{at}/items", depth + 1) for _ in range(count)]
        if kind == "string":
            return self._string(schema, at)
        if kind in ("integer", "number"):
            return self._number(schema, at, whole=kind == "integer")
        return False if kind == "boolean" else None

    def _object(self, schema: dict[str, Any], at: str, depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise self._bad(f"{at}/properties", "expected an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self._bad(f"{at}/required", "expected an array of strings")
        return {
            name: self.make(properties.get(name, {"type": "null"}), f"{at}/properties/{name}", depth + 1)
            for name in required
        }

    def _string(self, schema: dict[str, Any], at: str) -> str:
        if isinstance(schema.get("pattern"), str):
            return smallest_match(schema["pattern"], self._param)
        text = _FORMATS.get(str(schema.get("format")), "")
        return text + "a" * (self._count(schema, "minLength", at) - len(text))

    def _number(self, schema: dict[str, Any], at: str, *, whole: bool) -> float:
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            value = schema.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise self._bad(f"{at}/{name}", f"expected a number, found {json.dumps(value)}")
        step = schema.get("multipleOf") or (1 if whole else 0.5)
        low, high = schema.get("minimum"), schema.get("maximum")
        if "exclusiveMinimum" in schema:
            low = max(low if low is not None else float("-inf"), schema["exclusiveMinimum"] + step)
        if "exclusiveMaximum" in schema:
            high = min(high if high is not None else float("inf"), schema["exclusiveMaximum"] - step)
        found = 0 if low is None or low <= 0 else -(-low // step) * step
        if high is not None and found > high:
            found = high // step * step
        if (low is not None and found < low) or (high is not None and found > high):
            raise self._bad(at, "no number is within its bounds")
        return int(found) if whole else found

    def _count(self, schema: dict[str, Any], name: str, at: str) -> int:
        value = schema.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_ITEMS:
            raise self._bad(f"{at}/{name}", f"expected an integer from 0 to {MOST_ITEMS}, found {json.dumps(value)}")
        return value

    def _joined(self, schema: dict[str, Any], at: str) -> dict[str, Any]:
        parts = schema["allOf"]
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise self._bad(f"{at}/allOf", "expected an array of objects")
        joined = {name: value for name, value in schema.items() if name != "allOf"}
        for part in parts:
            part = self._target(part["$ref"], at) if "$ref" in part else part
            joined |= part | {
                "properties": joined.get("properties", {}) | part.get("properties", {}),
                "required": [*joined.get("required", []), *part.get("required", [])],
            }
        return joined

    def _target(self, reference: object, at: str) -> Any:
        found = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise self._bad(f"{at}/$ref", f"expected a place in this schema, found {json.dumps(reference)}")
        for name in filter(None, reference[1:].split("/")):
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise self._bad(f"{at}/$ref", f"there is no {reference}")
            found = found[name]
        return found

    def _bad(self, at: str, why: str) -> LLMRequestError:
        return LLMRequestError(
            f"{self._param}: the schema cannot be used at {at or 'its root'}: {why}",
            param=self._param, code="invalid_json_schema",
        )  # fmt: skip


class _NotUnderstoodError(Exception):
    """Something of regular expressions that is not made here."""


def _matching(items: Any, groups: dict[int, str]) -> str:
    return "".join(_one(kind, value, groups) for kind, value in items)


def _one(kind: Any, value: Any, groups: dict[int, str]) -> str:
    if kind in _SIMPLE:
        return _SIMPLE[kind](value)
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        low, _, inner = value
        if low > MOST_ITEMS:
            raise _NotUnderstoodError(f"more than {MOST_ITEMS} repetitions")
        text = _matching(inner, groups)
        if len(text) * low > MOST_VALUES:
            raise _NotUnderstoodError(f"more than {MOST_VALUES} characters")
        return text * int(low)
    if kind is sre.BRANCH:
        return _matching(value[1][0], groups)
    if kind is sre.SUBPATTERN:
        text = groups[value[0]] = _matching(value[3], groups)
        return text
    if kind is sre.GROUPREF:
        return groups.get(value, "")
    raise _NotUnderstoodError(f"{str(kind).lower()} is not understood by the mock engine")


_CLASSES = {sre.CATEGORY_DIGIT: "0", sre.CATEGORY_WORD: "a", sre.CATEGORY_SPACE: " "}


def _member(items: list[Any]) -> str:
    """A character of a set."""
    kind, value = items[0]
    if kind is sre.NEGATE:
        for candidate in "a0 -_A.":
            if not any(_within(candidate, *item) for item in items[1:]):
                return candidate
        raise _NotUnderstoodError("this set is too small")
    if kind is sre.RANGE:
        return chr(value[0])
    if kind is sre.CATEGORY:
        return _CLASSES.get(value, "-")
    return chr(value)


def _within(character: str, kind: Any, value: Any) -> bool:
    if kind is sre.LITERAL:
        return bool(ord(character) == value)
    if kind is sre.RANGE:
        return bool(value[0] <= ord(character) <= value[1])
    names = {sre.CATEGORY_DIGIT: r"\d", sre.CATEGORY_WORD: r"\w", sre.CATEGORY_SPACE: r"\s"}
    return re.match(names.get(value, r"\W|\D|\S"), character) is not None


_SIMPLE: dict[Any, Callable[[Any], str]] = {
    sre.LITERAL: chr,
    sre.NOT_LITERAL: lambda value: "a" if value != ord("a") else "b",
    sre.ANY: lambda _: "a",
    sre.AT: lambda _: "",
    sre.IN: _member,
}
