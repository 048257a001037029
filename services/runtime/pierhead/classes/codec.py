"""Python values in protobuf messages: each field of a contract has a function that writes it and one that reads it.

Messages are written in place, those inside others as well: a message of one descriptor pool cannot hold one of another,
and a copy of a tensor costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from pierhead.classes.message_codecs import (
    LEFT_OUT,
    FieldCodec,
    MessageCodec,
    Read,
    Unfit,
    Write,
    array_codec,
    generated_codec,
    items_codec,
    one_of_codec,
    struct_codec,
    validated_codec,
)
from pierhead.classes.shapes import (
    Absent,
    Array,
    Box,
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


class Codecs:
    """The codecs of one contract's fields. `is_inside()`: what is read comes from a service of the stack."""

    def __init__(self, is_inside: Callable[[], bool]) -> None:
        self._is_inside = is_inside
        self._structs: dict[Struct, MessageCodec] = {}

    def writer_of(self, field: MessageField) -> Write:
        """Writes a value into the field of a message. Raises Unfit."""
        write, may_be_none = self._writer(field), field.absent is Absent.NONE

        def checked(message: Any, value: Any) -> None:
            if value is None and may_be_none:
                return
            try:
                write(message, value)
            except Unfit as error:
                raise Unfit(f"{field.name}.{error.path}", error.reason) from error.__cause__
            except (TypeError, ValueError, AttributeError, KeyError) as error:
                raise Unfit(field.name, _misfit(field, value, error)) from error

        return checked

    def reader_of(self, field: MessageField) -> Read:
        """Reads the field of a message: its value, or LEFT_OUT. Raises Unfit."""
        read, name, absent = self._reader(field), field.name, field.absent
        may_be_absent = field.card is Card.ONE

        def checked(message: Any) -> Any:
            if may_be_absent and not message.HasField(name):
                if absent is Absent.REFUSED:
                    raise Unfit(name, f"missing; expected {_spell(field)}")
                return None if absent is Absent.NONE else LEFT_OUT
            try:
                return read(message)
            except Unfit as error:
                raise Unfit(f"{name}.{error.path}", error.reason) from error.__cause__
            except (TypeError, ValueError) as error:  # TypeError: items that no set can hold
                raise Unfit(name, str(error)) from error

        return checked

    # ---- by cardinality

    def _writer(self, field: MessageField) -> Write:
        name, card, leaf = field.name, field.card, field.leaf
        match leaf:
            case Scalar():
                return _value_writer(name, card, None)
            case Converted():
                return _value_writer(name, card, leaf.write)
            case Members():
                numbers = {member: number for number, member in enumerate(leaf.type, 1)}
                return _value_writer(name, card, numbers.__getitem__)
        return _message_writer(name, card, self._codec(leaf, name).write)

    def _reader(self, field: MessageField) -> Read:
        get, leaf, card, holder = attrgetter(field.name), field.leaf, field.card, field.holder
        if isinstance(leaf, Scalar):
            if card is Card.MAP:
                return lambda message: {each.key: each.value for each in get(message)}
            return get if card is Card.ONE else lambda message: holder(get(message))
        convert = (
            leaf.read if isinstance(leaf, Converted)
            else _member_of(leaf) if isinstance(leaf, Members)
            else self._codec(leaf, field.name).read
        )  # fmt: skip
        if card is Card.ONE:
            return lambda message: convert(get(message))
        if card is Card.MAP:
            return lambda message: {each.key: convert(each.value) for each in get(message)}
        if holder is list:
            return lambda message: [convert(each) for each in get(message)]
        return lambda message: holder(convert(each) for each in get(message))

    def _codec(self, leaf: Leaf, name: str) -> MessageCodec:
        """The codec of a leaf that is a message."""
        match leaf:
            case Array():
                return array_codec(leaf, name)
            case Generated():
                return generated_codec(leaf)
            case Box():
                return MessageCodec(self.writer_of(leaf.inner), self.reader_of(leaf.inner))
            case Items():
                return items_codec(self._fields(leaf.fields))
            case OneOf():
                return one_of_codec(leaf, self._fields(leaf.fields))
        assert isinstance(leaf, Struct)  # noqa: S101
        known = self._structs.get(leaf)
        if known is None:
            fields: list[FieldCodec] = []
            how = leaf.validated
            known = self._structs[leaf] = (
                struct_codec(leaf, fields) if how is None else validated_codec(leaf, how, fields, self._is_inside)
            )
            fields.extend(self._fields(leaf.fields))  # which may hold the struct itself
        return known

    def _fields(self, fields: Sequence[MessageField]) -> list[FieldCodec]:
        return [(field.name, self.writer_of(field), self.reader_of(field)) for field in fields]


def _value_writer(name: str, card: Card, convert: Read | None) -> Write:
    """Writes what protobuf has itself; `convert`: how a value becomes that, None = it is."""
    if card is Card.ONE:
        if convert is None:
            return lambda message, value: setattr(message, name, value)
        return lambda message, value: setattr(message, name, convert(value))
    if card is Card.MANY:
        if convert is None:
            return lambda message, value: getattr(message, name).extend(value)
        return lambda message, value: getattr(message, name).extend([convert(each) for each in value])

    def write(message: Any, value: Mapping[Any, Any]) -> None:
        add = getattr(message, name).add
        for key, each in value.items():
            entry = add()
            entry.key, entry.value = key, each if convert is None else convert(each)

    return write


def _message_writer(name: str, card: Card, fill: Write) -> Write:
    """Writes messages, which are there even if every field in them is absent."""

    def write_one(message: Any, value: Any) -> None:
        inner = getattr(message, name)
        inner.SetInParent()
        fill(inner, value)

    def write_many(message: Any, value: Any) -> None:
        add = getattr(message, name).add
        for each in value:
            fill(add(), each)

    def write_map(message: Any, value: Mapping[Any, Any]) -> None:
        add = getattr(message, name).add
        for key, each in value.items():
            inner = add(key=key).value
            inner.SetInParent()
            fill(inner, each)

    return {Card.ONE: write_one, Card.MANY: write_many, Card.MAP: write_map}[card]


def _member_of(leaf: Members) -> Read:
    members = dict(enumerate(leaf.type, 1))

    def member(number: int) -> Any:
        if number not in members:
            raise ValueError(f"expected a member of {leaf.type.__name__} from 1 to {len(members)}, found {number}")
        return members[number]

    return member


# ---- words


def _spell(field: MessageField) -> str:
    leaf = field.leaf
    if isinstance(leaf, Array):
        word = f"a {leaf.library} array"
    else:
        word = leaf.name if isinstance(leaf, Box | Items | OneOf | Converted) else leaf.type.__name__
    if field.card is Card.MAP:
        return f"a dict of {word}"
    return f"a {field.holder.__name__} of {word}" if field.card is Card.MANY else word


def _misfit(field: MessageField, value: Any, error: Exception) -> str:
    if isinstance(field.leaf, Array) and str(error):
        return str(error)
    found = repr(value)
    shown = found if len(found) <= 60 else f"{found[:60]}..."
    why = f" ({error})" if isinstance(error, ValueError) else ""
    return f"expected {_spell(field)}, found {shown}{why}"
