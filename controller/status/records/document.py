"""What all documents share, and how JSON is made of them and read into them."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


def json_name(member: str) -> str:
    """Return a member's name in JSON: a word of Python has a `_` after it."""
    return member.removesuffix("_")


class Document:
    """A JSON object with exactly these members. Times are unix times by the machine's wall clock."""

    __slots__ = ()
    __pydantic_config__: ClassVar[Mapping[str, object]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
        "alias_generator": json_name,
    }


def as_json(value: object) -> object:
    """Return an object that JSON does not know as one that it does: the `default` of `json.dumps`."""
    return dict(value) if isinstance(value, Mapping) else members(value)


def members(record: object) -> dict[str, object]:
    """Return a record's members by their names in JSON. Raises TypeError for anything else."""
    if not is_dataclass(record):
        raise TypeError(f"{type(record).__name__} is no record")
    found = {json_name(field.name): (getattr(record, field.name), field.default) for field in fields(record)}
    may_lack = isinstance(record, Document)  # records of other rooms have defaults for their constructors' sake
    return {name: value for name, (value, default) in found.items() if not (may_lack and value == default)}


def read(kind: type[T], value: Any) -> T:
    """Return a JSON value as a document. Raises KeyError or TypeError for one of another shape. Members that this
    build does not know are left out.
    """
    return typing.cast("T", _read(kind, value))


def _read(kind: Any, value: Any) -> Any:
    if is_dataclass(kind):
        record: Any = kind
        known = ((field, json_name(field.name)) for field in fields(record))
        there = [(field.name, value[name]) for field, name in known if name in value or field.default is MISSING]
        return record(**{name: _read(_kinds(record)[name], found) for name, found in there})
    arguments = typing.get_args(kind)
    match typing.get_origin(kind):
        case origin if origin is tuple:
            return tuple(_read(arguments[0], item) for item in value)
        case origin if origin in (typing.Union, types.UnionType):
            return None if value is None else _read(arguments[0], value)
        case origin if origin is Mapping:
            return {key: _read(arguments[1], item) for key, item in value.items()}
    return kind(value) if isinstance(kind, type) and issubclass(kind, Enum) else value


@functools.cache
def _kinds(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)
