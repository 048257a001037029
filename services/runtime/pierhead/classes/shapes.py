"""The shapes of a contract's values: what a protobuf field of a type looks like. Pure.

    Field: one value, a list or a map, of a leaf
    leaf: Scalar, Converted, Members (an enum), Array, Generated (a protobuf message), Struct, Items (a tuple), OneOf
    (a union), or Box

A Box is a message around one field `value`, where a field itself cannot say what the hint does: a list of lists, an
optional list, a default that "absent" does not mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeAlias

from google.protobuf.message import Message

SCALARS: Final = (str, int, float, bool, bytes)


class CannotTravel(TypeError):
    """A type hint of a service's class that no contract can hold. The message begins with the path to it."""


class Card(Enum):
    """How many values a field has."""

    ONE = "one"
    MANY = "many"
    MAP = "map"


class Absent(Enum):
    """What the absence of a field means."""

    REFUSED = "required"
    NONE = "None"
    DEFAULT = "the default in Python, or an empty list or map"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A type that protobuf has itself."""

    type: type


@dataclass(frozen=True, slots=True)
class Converted:
    """A type that travels as one of those: a date as its text. `write` and `read` raise ValueError and TypeError."""

    name: str
    """In messages."""
    word: str
    """In the names of boxes."""
    wire: type
    write: Callable[[Any], Any] = field(compare=False)
    read: Callable[[Any], Any] = field(compare=False)
    type: type | None = None
    """All values of this type, and of no other leaf, travel so; None: some values of `wire` do."""


@dataclass(frozen=True, slots=True)
class Members:
    """An enum, whose members are numbered from 1."""

    type: type[Enum]


@dataclass(frozen=True, slots=True)
class Array:
    """A NumPy array or torch tensor; `dtype`: the number in `tensor.proto`, None = any."""

    library: str
    dtype: Any = None


@dataclass(frozen=True, slots=True)
class Generated:
    """A class that protoc has generated."""

    type: type[Message]


@dataclass(frozen=True, slots=True)
class Validated:
    """How objects travel whose class validates them: a pydantic model's."""

    defaults: Mapping[str, Any]
    """By the name of a field that may be left out: its default, or what makes one."""
    given: Callable[[Any], Collection[str]]
    """The fields that an object was made with: pydantic's `model_fields_set`."""
    make: Callable[..., Any]
    """`make(**values)`: a validated object. Raises what the class raises."""
    restore: Callable[[dict[str, Any], set[str]], Any]
    """`restore(values, given)`: an object that was validated before, unchanged."""


@dataclass(frozen=True, slots=True, eq=False)
class Struct:
    """A dataclass, named tuple or pydantic model; `fields` is filled at last, as a type may hold itself."""

    type: type
    validated: Validated | None = None
    """None = an object is made by a call of its type."""
    fields: list[MessageField] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the message: `PageItem` of a generic model's `Page[Item]`."""
        return "".join(re.findall("[A-Za-z0-9_]+", self.type.__name__))


@dataclass(frozen=True, slots=True)
class Items:
    """A tuple of a fixed length, each item of its own type."""

    name: str
    fields: tuple[MessageField, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """A value of one of several types."""

    name: str
    fields: tuple[MessageField, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A message around the field `value`."""

    name: str
    inner: MessageField


Leaf: TypeAlias = Scalar | Converted | Members | Array | Generated | Struct | Items | OneOf | Box


@dataclass(frozen=True, slots=True)
class MessageField:
    """One field of a message."""

    name: str
    card: Card
    leaf: Leaf
    absent: Absent
    key: type | None = None
    """Of a map."""
    holder: type = list
    """Of many values: what they are read as."""
