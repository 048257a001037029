"""Python values in the messages within a contract's messages: dataclasses, tuples, unions, arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeAlias

from pierhead.classes.shapes import Array, Box, Card, Generated, Leaf, OneOf, Scalar, Struct, Validated
from pierhead.errors import PierheadError
from pierhead.memory.arrays import dtype_name, read_array, write_array
from pierhead.tensor.v1.tensor_pb2 import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

Write = Callable[[Any, Any], None]
Read = Callable[[Any], Any]

GIVEN: Final = "pierhead_given"
"""The field of a model's message that has the numbers of the fields that the model was made with: repeated int32. It is
in no `.proto` that is printed: other clients leave it out.
"""

LEFT_OUT: Final = object()
"""What a field reads as where Python's default holds."""


class Unfit(Exception):
    """A value or message that does not fit the contract; `str(error)` is the path in it and the reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class MessageCodec(NamedTuple):
    """What writes a value into a message that is there, and reads it. Both raise Unfit, TypeError and ValueError."""

    write: Write
    read: Read


FieldCodec: TypeAlias = tuple[str, Write, Read]
"""What writes and reads one field of a message, after its name. No named tuple, which takes longer to unpack."""


def struct_codec(struct: Struct, fields: Sequence[FieldCodec]) -> MessageCodec:
    """Of a dataclass or named tuple. `fields` may be filled afterwards: a type may hold itself."""
    kind = struct.type

    def write(message: Any, value: Any) -> None:
        if type(value) is not kind:
            _refuse(kind, value)
        for name, write_it, _ in fields:
            write_it(message, getattr(value, name))

    def read(message: Any) -> Any:
        values = {name: value for name, _, read_it in fields if (value := read_it(message)) is not LEFT_OUT}
        return _made(kind, values)

    return MessageCodec(write, read)


def validated_codec(
    struct: Struct, how: Validated, fields: Sequence[FieldCodec], is_inside: Callable[[], bool]
) -> MessageCodec:
    """Of a pydantic model, validated unless it comes from the stack. `fields` may be filled afterwards."""
    numbers = {field.name: number for number, field in enumerate(struct.fields, 1)}
    names = {number: name for name, number in numbers.items()}
    plain = struct_codec(struct, fields)

    def write(message: Any, value: Any) -> None:
        plain.write(message, value)
        # 0 is always there: without it, a message of which nothing was given would look like another client's.
        getattr(message, GIVEN).extend([0, *[numbers[name] for name in how.given(value)]])

    def read(message: Any) -> Any:
        values = {name: value for name, _, read_it in fields if (value := read_it(message)) is not LEFT_OUT}
        sent = getattr(message, GIVEN)
        if not sent:
            return _made(how.make, _without_defaults(values, {field.name for field, _ in message.ListFields()}))
        given = {names[number] for number in sent if number in names}
        if is_inside():
            return how.restore(values, given)
        made = _made(how.make, _without_defaults(values, given))
        getattr(made, "__pydantic_fields_set__", given).intersection_update(given)
        return made

    def _without_defaults(values: dict[str, Any], given: set[str]) -> dict[str, Any]:
        """What was given, and what is not as it would be without."""
        return {name: value for name, value in values.items() if name in given or not _is_default(name, value)}

    def _is_default(name: str, value: Any) -> bool:
        default = how.defaults.get(name, LEFT_OUT)
        return type(value) is type(default) and bool(value == default)

    return MessageCodec(write, read)


def _refuse(kind: type, value: Any) -> NoReturn:
    if not isinstance(value, kind):
        raise TypeError
    own, base = type(value).__name__, kind.__name__
    raise ValueError(f"a {own} would arrive as a {base}, without what it adds; write {base} | {own} as the type")


def _made(make: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """The object with these fields. Raises ValueError where its class refuses them."""
    try:
        return make(**values)
    except PierheadError:
        raise
    except Exception as error:
        raise ValueError(str(error)) from error


def items_codec(items: Sequence[FieldCodec]) -> MessageCodec:
    """Of a tuple of a fixed length."""

    def write(message: Any, value: Any) -> None:
        if not isinstance(value, tuple) or len(value) != len(items):
            raise TypeError
        for (_, write_it, _), each in zip(items, value, strict=True):
            write_it(message, each)

    return MessageCodec(write, lambda message: tuple([read_it(message) for _, _, read_it in items]))


def one_of_codec(leaf: OneOf, choices: Sequence[FieldCodec]) -> MessageCodec:
    """Of a value of one of several types. It is written as one of its own type, or else of the first that takes it."""
    reads = {name: read_it for name, _, read_it in choices}
    leaves = [field.leaf for field in leaf.fields]
    by_type = {getattr(each, "type", None): write_it for each, (_, write_it, _) in zip(leaves, choices, strict=True)}
    others = [(_taken(each), write_it) for each, (_, write_it, _) in zip(leaves, choices, strict=True)]
    others += [(tuple, write_it) for taken, write_it in others if taken is list]  # a tuple is a Sequence

    def write(message: Any, value: Any) -> None:
        own = by_type.get(type(value))
        if own is not None:
            own(message, value)
            return
        for taken, write_it in others:
            if isinstance(value, taken):
                try:
                    write_it(message, value)
                except Unfit:
                    message.Clear()
                else:
                    return
        raise TypeError

    def read(message: Any) -> Any:
        chosen = message.WhichOneof("value")
        if chosen is None:
            raise ValueError(f"expected {leaf.name}, found none of the types that this version knows")
        return reads[chosen](message)

    return MessageCodec(write, read)


def _taken(leaf: Leaf) -> type | tuple[type, ...]:
    """The types of values that a choice takes where none has the value's own type; `write` refuses some of them."""
    if isinstance(leaf, Box):
        return Mapping if leaf.inner.card is Card.MAP else leaf.inner.holder
    if not isinstance(leaf, Scalar):
        return object
    return (int, float) if leaf.type is float else leaf.type


def generated_codec(leaf: Generated) -> MessageCodec:
    """Of a message of another descriptor pool, which crosses as bytes."""
    kind = leaf.type

    def write(message: Any, value: Any) -> None:
        if not isinstance(value, kind):
            raise TypeError
        message.MergeFromString(value.SerializeToString())

    return MessageCodec(write, lambda message: kind.FromString(message.SerializeToString()))


def array_codec(leaf: Array, name: str) -> MessageCodec:
    """Of an array, whose shared memory is for where the last one of this field went. `name`: the field's."""
    place = object()

    def check(message: Any) -> None:
        if leaf.dtype is not None and message.dtype != leaf.dtype:
            raise ValueError(f"expected an array of {dtype_name(leaf.dtype)}, found {dtype_name(message.dtype)}")

    def write(message: Any, value: Any) -> None:
        array, dtype = _from_torch(value) if leaf.library == "torch" else (value, None)
        write_array(message, array, dtype, place)
        check(message)

    def read(message: Any) -> Any:
        check(message)
        array = read_array(message, name)
        return array if leaf.library == "numpy" else _to_torch(array, message.dtype)

    return MessageCodec(write, read)


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
