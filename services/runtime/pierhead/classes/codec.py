"""Python values in protobuf messages: each field of a contract has a function that writes it and one that reads it.

Messages are written in place, those inside others as well: a message of one descriptor pool cannot hold one of another,
and a copy of a tensor costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

from pierhead.classes.shapes import Absent, Array, Box, Card, Field, Generated, Leaf, Members, Scalar, Struct
from pierhead.errors import PierheadError
from pierhead.memory.arrays import dtype_name, read_array, write_array
from pierhead.tensor.v1.tensor_pb2 import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

Write = Callable[[Any, Any], None]
Read = Callable[[Any], Any]

LEFT_OUT: Final = object()
"""What a field reads as where Python's default holds."""


class Unfit(Exception):
    """A value or message that does not fit the contract; `str(error)` is the path in it and the reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class Codecs:
    """The codecs of one contract's fields."""

    def __init__(self) -> None:
        self._structs: dict[Struct, _StructCodec] = {}

    def writer_of(self, field: Field) -> Write:
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

    def reader_of(self, field: Field) -> Read:
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
            except ValueError as error:
                raise Unfit(name, str(error)) from error

        return checked

    # ---- by cardinality

    def _writer(self, field: Field) -> Write:
        name, card, leaf = field.name, field.card, field.leaf
        if isinstance(leaf, Scalar):
            return _SCALAR_WRITERS[card](name)
        if isinstance(leaf, Members):
            return _VALUE_WRITERS[card](
                name, {member: number for number, member in enumerate(leaf.type, 1)}.__getitem__
            )
        return _MESSAGE_WRITERS[card](name, self._codec(leaf, name).write)

    def _reader(self, field: Field) -> Read:
        get, leaf = attrgetter(field.name), field.leaf
        if isinstance(leaf, Scalar):
            return get if field.card is Card.ONE else _copied(get, list if field.card is Card.MANY else dict)
        convert = _member_of(leaf) if isinstance(leaf, Members) else self._codec(leaf, field.name).read
        if field.card is Card.ONE:
            return lambda message: convert(get(message))
        if field.card is Card.MANY:
            return lambda message: [convert(each) for each in get(message)]
        return lambda message: {key: convert(each) for key, each in get(message).items()}

    def _codec(self, leaf: Leaf, name: str) -> _MessageCodec:
        """The codec of a leaf that is a message."""
        if isinstance(leaf, Array):
            return _ArrayCodec(leaf, name)
        if isinstance(leaf, Generated):
            return _GeneratedCodec(leaf)
        if isinstance(leaf, Box):
            return _BoxCodec(self.writer_of(leaf.inner), self.reader_of(leaf.inner))
        assert isinstance(leaf, Struct)  # noqa: S101
        known = self._structs.get(leaf)
        if known is None:
            known = self._structs[leaf] = _StructCodec(leaf)
            known.complete(self)
        return known


def _set_scalar(name: str) -> Write:
    return lambda message, value: setattr(message, name, value)


def _add_scalars(name: str) -> Write:
    return lambda message, value: getattr(message, name).extend(value)


def _map_scalars(name: str) -> Write:
    return lambda message, value: getattr(message, name).update(value)


def _set_value(name: str, convert: Read) -> Write:
    return lambda message, value: setattr(message, name, convert(value))


def _add_values(name: str, convert: Read) -> Write:
    return lambda message, value: getattr(message, name).extend([convert(each) for each in value])


def _map_values(name: str, convert: Read) -> Write:
    def write(message: Any, value: Mapping[Any, Any]) -> None:
        filled = getattr(message, name)
        for key, each in value.items():
            filled[key] = convert(each)

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
        filled = getattr(message, name)
        for key, each in value.items():
            fill(filled[key], each)

    return write


_SCALAR_WRITERS: Final = {Card.ONE: _set_scalar, Card.MANY: _add_scalars, Card.MAP: _map_scalars}
_VALUE_WRITERS: Final = {Card.ONE: _set_value, Card.MANY: _add_values, Card.MAP: _map_values}
_MESSAGE_WRITERS: Final = {Card.ONE: _fill_message, Card.MANY: _add_messages, Card.MAP: _map_messages}


def _copied(get: Read, container: type) -> Read:
    return lambda message: container(get(message))


def _member_of(leaf: Members) -> Read:
    members = dict(enumerate(leaf.type, 1))

    def member(number: int) -> Any:
        if number not in members:
            raise ValueError(f"expected a member of {leaf.type.__name__} from 1 to {len(members)}, found {number}")
        return members[number]

    return member


# ---- leaves that are messages


class _MessageCodec(Protocol):
    """What writes a value into a message that is there, and reads it."""

    @property
    def write(self) -> Write: ...

    @property
    def read(self) -> Read: ...


class _StructCodec:
    """A dataclass or model."""

    def __init__(self, struct: Struct) -> None:
        self._struct = struct
        self._fields: list[tuple[str, Write, Read]] = []

    def complete(self, codecs: Codecs) -> None:
        """Apart from the construction: a type may hold itself."""
        self._fields = [(field.name, codecs.writer_of(field), codecs.reader_of(field)) for field in self._struct.fields]

    def write(self, message: Any, value: Any) -> None:
        if not isinstance(value, self._struct.type):
            raise TypeError
        for name, write, _ in self._fields:
            write(message, getattr(value, name))

    def read(self, message: Any) -> Any:
        values = {name: value for name, _, read in self._fields if (value := read(message)) is not LEFT_OUT}
        try:
            return self._struct.make(values)
        except PierheadError:
            raise
        except Exception as error:
            raise ValueError(str(error)) from error


class _BoxCodec:
    """A message around one field."""

    def __init__(self, write: Write, read: Read) -> None:
        self.write = write
        self.read = read


class _GeneratedCodec:
    """A message of another descriptor pool, which crosses as bytes."""

    def __init__(self, leaf: Generated) -> None:
        self._type = leaf.type

    def write(self, message: Any, value: Any) -> None:
        if not isinstance(value, self._type):
            raise TypeError
        message.MergeFromString(value.SerializeToString())

    def read(self, message: Any) -> Any:
        return self._type.FromString(message.SerializeToString())


class _ArrayCodec:
    """An array, whose shared memory is for where the last one of this field went."""

    def __init__(self, leaf: Array, name: str) -> None:
        self._leaf = leaf
        self._name = name

    def write(self, message: Any, value: Any) -> None:
        array, dtype = _from_torch(value) if self._leaf.library == "torch" else (value, None)
        write_array(message, array, dtype, self)
        self._check(message)

    def read(self, message: Any) -> Any:
        self._check(message)
        array = read_array(message, self._name)
        return array if self._leaf.library == "numpy" else _to_torch(array, message.dtype)

    def _check(self, message: Any) -> None:
        wanted = self._leaf.dtype
        if wanted is not None and message.dtype != wanted:
            raise ValueError(f"expected an array of {dtype_name(wanted)}, found {dtype_name(message.dtype)}")


def _from_torch(value: Any) -> tuple[npt.NDArray[Any], Any]:
    import torch

    value = value.detach().cpu()
    if value.dtype is torch.bfloat16:
        return value.view(torch.int16).numpy().view("<u2"), Tensor.BFLOAT16
    return value.numpy(), None


def _to_torch(array: npt.NDArray[Any], dtype: Any) -> Any:
    """A tensor with a copy of the content, which torch may write to."""
    import torch

    if dtype == Tensor.BFLOAT16:
        return torch.from_numpy(array.view("<i2").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


# ---- words


def _spell(field: Field) -> str:
    leaf = field.leaf
    if isinstance(leaf, Array):
        word = f"a {leaf.library} array"
    else:
        word = leaf.name if isinstance(leaf, Box) else leaf.type.__name__
    if field.card is Card.MAP:
        return f"a dict of {word}"
    return f"a list of {word}" if field.card is Card.MANY else word


def _misfit(field: Field, value: Any, error: Exception) -> str:
    if isinstance(field.leaf, Array) and str(error):
        return str(error)
    found = repr(value)
    shown = found if len(found) <= 60 else f"{found[:60]}..."
    why = f" ({error})" if isinstance(error, ValueError) else ""
    return f"expected {_spell(field)}, found {shown}{why}"
