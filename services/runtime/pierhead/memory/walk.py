"""The tensors in a message whose content is in shared memory. What a type can hold is looked up once per type."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from pierhead.tensor.v1.tensor_pb2 import Tensor

_TENSOR = Tensor.DESCRIPTOR.full_name


def may_hold_tensors(kind: type | None) -> bool:
    """Whether messages of that class can hold tensors; True for an unknown class (None)."""
    descriptor = getattr(kind, "DESCRIPTOR", None)
    return kind is None or (descriptor is not None and _holds(descriptor))


def shared_tensors(message: Any) -> list[Tensor]:
    """The tensors in a message whose content is in shared memory, in an order that copies of it have as well."""
    descriptor = getattr(message, "DESCRIPTOR", None)
    if descriptor is None or not _holds(descriptor):
        return []
    return [tensor for tensor in _tensors(message, descriptor) if tensor.HasField("shared")]


def _tensors(message: Any, descriptor: Descriptor) -> Iterator[Tensor]:
    if descriptor.full_name == _TENSOR:
        yield message
        return
    for name, kind in _ways(descriptor):
        value = getattr(message, name)
        if isinstance(value, Message):
            if message.HasField(name):
                yield from _tensors(value, kind)
        else:
            for each in [value[key] for key in sorted(value)] if hasattr(value, "items") else value:
                yield from _tensors(each, kind)


@cache
def _ways(descriptor: Descriptor) -> tuple[tuple[str, Descriptor], ...]:
    """The fields that lead to tensors, with the type of their messages."""
    found = []
    for field in descriptor.fields:
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            kind = kind.fields_by_name["value"].message_type
        if kind is not None and _holds(kind):
            found.append((field.name, kind))
    return tuple(found)


@cache
def _holds(descriptor: Descriptor) -> bool:
    seen, todo = {descriptor.full_name}, [descriptor]
    while todo:
        kind = todo.pop()
        if kind.full_name == _TENSOR:
            return True
        for field in kind.fields:
            inner = field.message_type
            if inner is not None and inner.full_name not in seen:
                seen.add(inner.full_name)
                todo.append(inner)
    return False
