"""Type hints as shapes. Pure; raises CannotTravel with the path.

hint, default --field_of--> Field
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Final, Literal, NewType, TypeAlias, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from pierhead.classes.conversions import converted, literal
from pierhead.classes.models import is_pydantic, validated
from pierhead.classes.shapes import (
    SCALARS,
    Absent,
    Array,
    Box,
    CannotTravel,
    Card,
    Converted,
    Generated,
    Items,
    Leaf,
    Members,
    MessageField,
    OneOf,
    Scalar,
    Struct,
)
from pierhead.memory.arrays import BY_CODE, dtype_name

MISSING: Final = dataclasses.MISSING

_Fields: TypeAlias = "dict[str, tuple[Any, Any]]"

_KEYS: Final = (str, int, bool)
_HOLDERS: Final[Mapping[Any, type]] = {list: list, Sequence: list, tuple: tuple, set: set, frozenset: frozenset}
"""By the hint of many values: what they are read as."""
_MAPS: Final = (dict, Mapping)
_EMPTY: Final = (list, dict, tuple, set, frozenset)
_NAME: Final = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_CAN: Final = (
    "str, int, float, bool, bytes, T | None, A | B, Literal of values of one of these types, list, tuple, set, dict, "
    "dataclasses, named tuples, pydantic models, enums, dates and times, Decimal, UUID, NumPy arrays, torch tensors "
    "and protobuf messages can"
)


class Shapes:
    """Reads the hints of one contract; a dataclass that occurs twice is one Struct."""

    def __init__(self) -> None:
        self._structs: dict[type, Struct] = {}

    def field_of(self, name: str, hint: Any, default: Any, path: str) -> MessageField:
        """The field of a parameter, of a dataclass's field, or of a reply. Raises CannotTravel."""
        if _NAME.fullmatch(name) is None or hasattr(Message, name):
            raise CannotTravel(f"{path}: protobuf has no field of that name: write ASCII letters and digits")
        hint = _bare(hint)
        inner = _optional(hint)
        if inner is not None and (default is MISSING or default is None):
            return MessageField(name, Card.ONE, self.leaf_of(inner, path), Absent.NONE)
        # An absent list or map is one without items.
        means_empty = default is MISSING or (isinstance(default, _EMPTY) and not default)
        if inner is None and _is_container(hint) and means_empty:
            return self._many(name, hint, path)
        absent = Absent.REFUSED if default is MISSING else Absent.DEFAULT
        return MessageField(name, Card.ONE, self.leaf_of(hint, path), absent)

    def leaf_of(self, hint: Any, path: str) -> Leaf:
        """The shape of one value: of an item of a list, say."""
        hint = _bare(hint)
        if _optional(hint) is not None or _is_container(hint):
            inner = self.field_of("value", hint, MISSING, path)
            return Box(_word(inner), inner)
        if _is_union(hint):
            return self._one_of(hint, path)
        if get_origin(hint) is tuple:
            return self._items(hint, path)
        return _single(hint, path) or self._struct(hint, path)

    def _many(self, name: str, hint: Any, path: str) -> MessageField:
        origin, arguments = get_origin(hint), get_args(hint)
        if not arguments:
            raise CannotTravel(f"{path}: {spell(hint)} does not say of what: write list[int], dict[str, float]")
        if origin not in _MAPS:
            leaf = self.leaf_of(arguments[0], f"{path}[]")
            return MessageField(name, Card.MANY, leaf, Absent.DEFAULT, holder=_HOLDERS[origin])
        key, value = _bare(arguments[0]), arguments[1]
        if key not in _KEYS:
            raise CannotTravel(f"{path}: expected a dict with keys of type str, int or bool, found {spell(key)}")
        return MessageField(name, Card.MAP, self.leaf_of(value, f"{path}[]"), Absent.DEFAULT, key)

    def _items(self, hint: Any, path: str) -> Items:
        fields = tuple(
            self.field_of(f"item_{number}", each, MISSING, f"{path}[{number - 1}]")
            for number, each in enumerate(get_args(hint), 1)
        )
        return Items(f"TupleOf{''.join(map(_word, fields))}", fields)

    def _one_of(self, hint: Any, path: str) -> Leaf:
        leaves = list(dict.fromkeys(self.leaf_of(each, path) for each in _choices(hint)))
        if len(leaves) == 1:
            return leaves[0]
        words = list(map(_leaf_word, leaves))
        names = [f"{re.sub('(?<=[a-z0-9])(?=[A-Z])', '_', word).lower()}_value" for word in words]
        fields = (MessageField(name, Card.ONE, leaf, Absent.NONE) for name, leaf in zip(names, leaves, strict=True))
        return OneOf("Or".join(words), tuple(fields))

    def _struct(self, kind: Any, path: str) -> Struct:
        known = self._structs.get(kind)
        if known is not None:
            return known
        members = _fields_of(kind, path)
        defaults = {name: default for name, (_, default) in members.items() if default is not MISSING}
        made = self._structs[kind] = Struct(kind, validated(kind, path, defaults) if is_pydantic(kind) else None)
        made.fields.extend(
            self.field_of(name, hint, default, f"{path}.{name}") for name, (hint, default) in members.items()
        )
        return made


def _fields_of(kind: Any, path: str) -> _Fields:
    if is_pydantic(kind):
        return {
            name: (each.annotation, MISSING if each.is_required() else _default(each.default, each.default_factory))
            for name, each in kind.__pydantic_fields__.items()
        }
    if hasattr(kind, "__dataclass_fields__"):
        return _of_dataclass(kind, path)
    if issubclass(kind, tuple) and hasattr(kind, "_field_defaults"):
        hints, defaults = hints_of(kind, path), kind._field_defaults
        return {name: (hints.get(name, Any), defaults.get(name, MISSING)) for name in kind._fields}
    raise _cannot(kind, path)


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
    """A hint as its author wrote it."""
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint).replace("typing.", "")


def _bare(hint: Any) -> Any:
    """The hint behind its names and notes: `NewType`, `Annotated`, `type`."""
    while True:
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        elif isinstance(hint, NewType):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":  # of Python 3.12: `type Score = float`
            hint = hint.__value__
        else:
            return hint


def _optional(hint: Any) -> Any:
    """T of `T | None`, which may be a union; None for any other hint."""
    choices = _choices(hint)
    if type(None) not in choices:
        return None
    return _bare(Union[tuple(each for each in choices if each is not type(None))])  # noqa: UP007


def _choices(hint: Any) -> list[Any]:
    """The types of a union, and of unions in it that have names of their own; none for any other hint."""
    if get_origin(hint) is Literal and None in get_args(hint):
        return [Literal[tuple(each for each in get_args(hint) if each is not None)], type(None)]
    found: list[Any] = []
    for each in map(_bare, get_args(hint) if _is_union(hint) else ()):
        found += _choices(each) or [each]
    return found


def _is_container(hint: Any) -> bool:
    """Whether values of it have any number of items."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is tuple:
        return not arguments or arguments[-1] is Ellipsis
    return origin in (*_HOLDERS, *_MAPS)  # compared, as a hint that is none may have no hash: `[int]`


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _single(hint: Any, path: str) -> Leaf | None:
    """The shape of a type without fields; None for one with fields."""
    if hint in SCALARS:
        return Scalar(hint)
    found = converted(hint) or (literal(get_args(hint)) if get_origin(hint) is Literal else _array(hint, path))
    if found is not None:
        return found
    if not isinstance(hint, type) or get_origin(hint) is not None:
        raise _cannot(hint, path)
    if issubclass(hint, Enum):
        return _members(hint, path)
    return Generated(hint) if issubclass(hint, Message) else None


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


def _of_dataclass(kind: Any, path: str) -> _Fields:
    hints = hints_of(kind, path, {kind.__name__: kind})
    fields = {each.name: each for each in dataclasses.fields(kind) if each.init}
    try:
        inspect.signature(kind).bind(**fields)
    except TypeError as error:
        raise CannotTravel(f"{path}: {kind.__name__} is not made of its fields: {error}") from None
    return {name: (hints[name], _default(each.default, each.default_factory)) for name, each in fields.items()}


def _default(default: Any, factory: Any) -> Any:
    """The default of a field: its value, or what makes one."""
    if factory in (None, MISSING):
        return default
    return factory() if factory in _EMPTY else factory


def _cannot(hint: Any, path: str) -> CannotTravel:
    return CannotTravel(f"{path}: {spell(hint)} cannot travel; {_CAN}")


def _word(inner: MessageField) -> str:
    """The name of a box: `MaybeInt`, `ListOfStr`, `DictOfStrToListOfInt`."""
    word = _leaf_word(inner.leaf)
    if inner.card is Card.MANY:
        return f"{inner.holder.__name__.capitalize()}Of{word}"
    if inner.card is Card.MAP:
        assert inner.key is not None  # noqa: S101
        return f"DictOf{inner.key.__name__.capitalize()}To{word}"
    return f"Maybe{word}" if inner.absent is Absent.NONE else word


def _leaf_word(leaf: Leaf) -> str:
    match leaf:
        case Box() | Items() | OneOf() | Struct():
            return leaf.name
        case Converted():
            return leaf.word
        case Array():
            return leaf.library.capitalize() + ("" if leaf.dtype is None else dtype_name(leaf.dtype).capitalize())
        case Generated():
            return "".join(part[:1].upper() + part[1:] for part in leaf.type.DESCRIPTOR.full_name.split("."))
    word = leaf.type.__name__
    return word[:1].upper() + word[1:]
