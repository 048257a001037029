"""Type hints as shapes: what a protobuf field of that type looks like. Pure; raises CannotTravel with the path.

    hint, default --field_of--> Field: one value, a list or a map, of a leaf
    leaf: Scalar, Members (an enum), Array, Generated (a protobuf message), Struct, or Box

A Box is a message around one field `value`, where a field itself cannot say what the hint does: a list of lists, an
optional list, a default that "absent" does not mean.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Final, TypeAlias, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from pierhead.memory.arrays import BY_CODE, dtype_name

MISSING: Final = dataclasses.MISSING
"""The default of a parameter or field that has none."""

SCALARS: Final = (str, int, float, bool, bytes)
_KEYS: Final = (str, int, bool)
_NAME: Final = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_CAN: Final = (
    "str, int, float, bool, bytes, T | None, list, dict, dataclasses, pydantic models, enums, NumPy arrays, torch "
    "tensors and protobuf messages can"
)


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


@dataclass(frozen=True, slots=True, eq=False)
class Struct:
    """A dataclass or pydantic model. `fields` is complete once the whole contract is read: a type may hold itself."""

    type: type
    make: Callable[[dict[str, Any]], Any]
    fields: list[Field] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Box:
    """A message around the field `value`."""

    name: str
    inner: Field


Leaf: TypeAlias = Scalar | Members | Array | Generated | Struct | Box


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message."""

    name: str
    card: Card
    leaf: Leaf
    absent: Absent
    key: type | None = None
    """Of a map."""


class Shapes:
    """Reads the hints of one contract; a dataclass that occurs twice is one Struct."""

    def __init__(self) -> None:
        self._structs: dict[type, Struct] = {}

    def field_of(self, name: str, hint: Any, default: Any, path: str) -> Field:
        """The field of a parameter, of a dataclass's field, or of a reply. Raises CannotTravel."""
        if _NAME.fullmatch(name) is None or hasattr(Message, name):
            raise CannotTravel(f"{path}: protobuf has no field of that name: write ASCII letters and digits")
        hint = _bare(hint)
        inner = _optional(hint, path)
        if inner is not None and (default is MISSING or default is None):
            return Field(name, Card.ONE, self.leaf_of(inner, path), Absent.NONE)
        if inner is None and _is_container(hint) and _means_empty(default):
            return self._many(name, hint, path)
        absent = Absent.REFUSED if default is MISSING else Absent.DEFAULT
        return Field(name, Card.ONE, self.leaf_of(hint, path), absent)

    def leaf_of(self, hint: Any, path: str) -> Leaf:
        """The shape of one value: of an item of a list, say."""
        hint = _bare(hint)
        if _optional(hint, path) is not None or _is_container(hint):
            inner = self.field_of("value", hint, MISSING, path)
            return Box(_word(inner), inner)
        if hint in SCALARS:
            return Scalar(hint)
        array = _array(hint, path)
        if array is not None:
            return array
        if not isinstance(hint, type) or get_origin(hint) is not None:
            raise _cannot(hint, path)
        if issubclass(hint, Enum):
            return _members(hint, path)
        if issubclass(hint, Message):
            return Generated(hint)
        return self._struct(hint, path)

    def _many(self, name: str, hint: Any, path: str) -> Field:
        arguments = get_args(hint)
        if not arguments:
            raise CannotTravel(f"{path}: {spell(hint)} does not say of what: write list[int], dict[str, float]")
        if get_origin(hint) is list:
            return Field(name, Card.MANY, self.leaf_of(arguments[0], f"{path}[]"), Absent.DEFAULT)
        key, value = _bare(arguments[0]), arguments[1]
        if key not in _KEYS:
            raise CannotTravel(f"{path}: expected a dict with keys of type str, int or bool, found {spell(key)}")
        return Field(name, Card.MAP, self.leaf_of(value, f"{path}[]"), Absent.DEFAULT, key)

    def _struct(self, kind: Any, path: str) -> Struct:
        known = self._structs.get(kind)
        if known is not None:
            return known
        pydantic = sys.modules.get("pydantic")
        make: Callable[[dict[str, Any]], Any]
        if hasattr(kind, "__dataclass_fields__"):
            members, make = _of_dataclass(kind, path), lambda values: kind(**values)
        elif pydantic is not None and issubclass(kind, pydantic.BaseModel):
            members = _of_model(kind)
            make = lambda values: kind.model_validate(values, by_alias=False, by_name=True)  # noqa: E731
        else:
            raise _cannot(kind, path)
        made = self._structs[kind] = Struct(kind, make)
        made.fields.extend(
            self.field_of(name, hint, default, f"{path}.{name}") for name, (hint, default) in members.items()
        )
        return made


def hints_of(owner: Any, path: str, names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The resolved hints of a function or class. Raises CannotTravel for a name that is not defined (yet)."""
    try:
        return get_type_hints(owner, localns=dict(names) if names else None, include_extras=False)
    except NameError as error:
        raise CannotTravel(
            f"{path}: the hint names {error.name!r}, which is not defined here; define or import it above the class, "
            "outside of `if TYPE_CHECKING`"
        ) from None


def spell(hint: Any) -> str:
    """A hint as it is written."""
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint).replace("typing.", "")


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _optional(hint: Any, path: str) -> Any:
    """T of `T | None`; None for any other hint. Raises CannotTravel for other unions."""
    if not _is_union(hint):
        return None
    others = [each for each in get_args(hint) if each is not type(None)]
    if len(others) != 1 or len(others) == len(get_args(hint)):
        raise CannotTravel(f"{path}: expected one type, or one type and None, found {spell(hint)}")
    return _bare(others[0])


def _is_container(hint: Any) -> bool:
    return (get_origin(hint) or hint) in (list, dict)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _means_empty(default: Any) -> bool:
    """Whether a list or map without items is what an absent one means."""
    return default is MISSING or (isinstance(default, list | dict | tuple) and not default)


def _array(hint: Any, path: str) -> Array | None:
    """NumPy's and torch's types, of which neither is imported for this."""
    origin = get_origin(hint) or hint
    known = (getattr(origin, "__module__", ""), getattr(origin, "__name__", ""))
    if known == ("torch", "Tensor"):
        return Array("torch")
    if known != ("numpy", "ndarray"):
        return None
    arguments = get_args(hint)
    item = get_args(arguments[1])[0] if len(arguments) == 2 and get_args(arguments[1]) else None
    if item in (None, Any) or not isinstance(item, type):
        return Array("numpy")
    import numpy as np

    try:
        dtype = BY_CODE.get(np.dtype(item).newbyteorder("<").str)
    except TypeError:  # an abstract one: np.floating
        return Array("numpy")
    if dtype is None:
        raise CannotTravel(f"{path}: no Tensor holds {item.__name__}; convert it to one of NumPy's plain numbers")
    return Array("numpy", dtype)


def _members(kind: type[Enum], path: str) -> Members:
    if issubclass(kind, enum.Flag):
        raise CannotTravel(f"{path}: {kind.__name__} combines flags, which an enum cannot; use int")
    if not all(_NAME.fullmatch(member.name) for member in kind):
        raise CannotTravel(f"{path}: the members of {kind.__name__} need names of ASCII letters and digits")
    return Members(kind)


def _of_dataclass(kind: Any, path: str) -> dict[str, tuple[Any, Any]]:
    """Each field's hint and default."""
    hints = hints_of(kind, path, {kind.__name__: kind})
    found: dict[str, tuple[Any, Any]] = {}
    for each in dataclasses.fields(kind):
        if not each.init:
            continue
        default = each.default
        if each.default_factory is not MISSING:
            default = each.default_factory() if each.default_factory in (list, dict) else each.default_factory
        found[each.name] = (hints[each.name], default)
    return found


def _of_model(kind: Any) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for name, each in kind.model_fields.items():
        default = MISSING if each.is_required() else each.default
        if each.default_factory is not None:
            default = each.default_factory() if each.default_factory in (list, dict) else each.default_factory
        found[name] = (each.annotation, default)
    return found


def _cannot(hint: Any, path: str) -> CannotTravel:
    return CannotTravel(f"{path}: {spell(hint)} cannot travel; {_CAN}")


def _word(inner: Field) -> str:
    """The name of a box: `MaybeInt`, `ListOfStr`, `DictOfStrToListOfInt`."""
    word = _leaf_word(inner.leaf)
    if inner.card is Card.MANY:
        return f"ListOf{word}"
    if inner.card is Card.MAP:
        assert inner.key is not None  # noqa: S101
        return f"DictOf{inner.key.__name__.capitalize()}To{word}"
    return f"Maybe{word}"


def _leaf_word(leaf: Leaf) -> str:
    if isinstance(leaf, Box):
        return leaf.name
    if isinstance(leaf, Array):
        return leaf.library.capitalize() + ("" if leaf.dtype is None else dtype_name(leaf.dtype).capitalize())
    if isinstance(leaf, Generated):
        return "".join(part[:1].upper() + part[1:] for part in leaf.type.DESCRIPTOR.full_name.split("."))
    name = leaf.type.__name__
    return name[:1].upper() + name[1:]
