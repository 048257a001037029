"""Python values in protobuf messages: each field of a contract has a function that writes it and one that reads it.

Messages are written in place, those inside others as well: a message of one descriptor pool cannot hold one of another,
and a copy of a tensor costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

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
    """The codecs of one contract's fields.

    `is_inside`: whether what is being read comes from a service of the stack; see `validated_codec`.
    """

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
        if isinstance(leaf, Scalar):
            return _SCALAR_WRITERS[card](name)
        if isinstance(leaf, Converted):
            return _VALUE_WRITERS[card](name, leaf.write)
        if isinstance(leaf, Members):
            return _VALUE_WRITERS[card](
                name, {member: number for number, member in enumerate(leaf.type, 1)}.__getitem__
            )
        return _MESSAGE_WRITERS[card](name, self._codec(leaf, name).write)

    def _reader(self, field: MessageField) -> Read:
        get, leaf, holder = attrgetter(field.name), field.leaf, field.holder
        if isinstance(leaf, Scalar):
            return _scalar_reader(get, field)
        convert = self._converter(leaf, field.name)
        if field.card is Card.ONE:
            return lambda message: convert(get(message))
        if field.card is Card.MAP:
            return lambda message: {each.key: convert(each.value) for each in get(message)}
        if holder is list:
            return lambda message: [convert(each) for each in get(message)]
        return lambda message: holder(convert(each) for each in get(message))

    def _converter(self, leaf: Leaf, name: str) -> Read:
        if isinstance(leaf, Converted):
            return leaf.read
        return _member_of(leaf) if isinstance(leaf, Members) else self._codec(leaf, name).read

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
            known = self._structs[leaf] = self._struct(leaf, fields)
            fields.extend(self._fields(leaf.fields))  # which may hold the struct itself
        return known

    def _struct(self, leaf: Struct, fields: Sequence[FieldCodec]) -> MessageCodec:
        how = leaf.validated
        return struct_codec(leaf, fields) if how is None else validated_codec(leaf, how, fields, self._is_inside)

    def _fields(self, fields: Sequence[MessageField]) -> list[FieldCodec]:
        return [(field.name, self.writer_of(field), self.reader_of(field)) for field in fields]


def _set_scalar(name: str) -> Write:
    return lambda message, value: setattr(message, name, value)


def _add_scalars(name: str) -> Write:
    return lambda message, value: getattr(message, name).extend(value)


def _map_scalars(name: str) -> Write:
    def write(message: Any, value: Mapping[Any, Any]) -> None:
        add = getattr(message, name).add
        for key, each in value.items():
            entry = add()
            entry.key, entry.value = key, each

    return write


def _set_value(name: str, convert: Read) -> Write:
    return lambda message, value: setattr(message, name, convert(value))


def _add_values(name: str, convert: Read) -> Write:
    return lambda message, value: getattr(message, name).extend([convert(each) for each in value])


def _map_values(name: str, convert: Read) -> Write:
    def write(message: Any, value: Mapping[Any, Any]) -> None:
        add = getattr(message, name).add
        for key, each in value.items():
            entry = add()
            entry.key, entry.value = key, convert(each)

    return write


def _fill_message(name: str, fill: Write) -> Write:
    def write(message: Any, value: Any) -> None:
        inner = getattr(message, name)
        inner.SetInParent()  # it is there even if every field in it is absent
        fill(inner, value)

    return write


def _add_messages(name: str, fill: Write) -> Write:
    def write(message: Any, value: Any) -> None:
        add = getattr(message, name).add
        for each in value:
            fill(add(), each)

    return write


def _map_messages(name: str, fill: Write) -> Write:
    def write(message: Any, value: Mapping[Any, Any]) -> None:
        add = getattr(message, name).add
        for key, each in value.items():
            inner = add(key=key).value
            inner.SetInParent()
            fill(inner, each)

    return write


_SCALAR_WRITERS: Final = {Card.ONE: _set_scalar, Card.MANY: _add_scalars, Card.MAP: _map_scalars}
_VALUE_WRITERS: Final = {Card.ONE: _set_value, Card.MANY: _add_values, Card.MAP: _map_values}
_MESSAGE_WRITERS: Final = {Card.ONE: _fill_message, Card.MANY: _add_messages, Card.MAP: _map_messages}


def _scalar_reader(get: Read, field: MessageField) -> Read:
    holder = field.holder
    if field.card is Card.ONE:
        return get
    if field.card is Card.MAP:
        return lambda message: {each.key: each.value for each in get(message)}
    return lambda message: holder(get(message))


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
