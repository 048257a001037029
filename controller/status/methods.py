"""The gRPC methods of a service's contract, and their messages as JSON. Pure.

A contract is a `pierhead.contract.v1.Application`, serialized; b"" = there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToJson, ParseDict, ParseError
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from pierhead.contract.v1.application_pb2 import Application

from ..errors import InvalidRequest
from ..model.text import one_line
from .records.answers import MethodDocument

DEEPEST_EXAMPLE = 4
"""Messages in messages: a type may hold itself."""
MOST_FIELDS = 300
"""Of all examples of a contract; further fields are left out: a type may have hundreds of fields of its own type."""
_GIVEN = "google.protobuf."
"""Messages of protobuf's own have forms of their own in JSON: an example leaves them out."""


@dataclass(frozen=True, slots=True)
class RpcForm:
    """How a method's messages travel."""

    request: Callable[[Any], bytes]
    """Of JSON. Raises InvalidRequest for what is no such message."""
    reply: Callable[[bytes], str]
    """As JSON. Raises DecodeError."""


def methods(contract: bytes, services: Collection[str]) -> tuple[MethodDocument, ...]:
    """The methods of these gRPC services that a contract has."""
    left = [MOST_FIELDS]
    return tuple(
        MethodDocument(f"/{method.containing_service.full_name}/{method.name}", _example(method.input_type, 1, left))
        for name in services
        for method in _methods(contract, name)
        if not method.client_streaming
    )


def rpc_form(contract: bytes, path: str) -> RpcForm:
    """The form of the method at a path ("/shop.Ranker/rank"). Raises InvalidRequest where there is none."""
    service, _, name = path.removeprefix("/").partition("/")
    method = next((one for one in _methods(contract, service) if one.name == name and not one.client_streaming), None)
    if method is None:
        raise InvalidRequest(f"path: no replica's contract has the method {path[:200]!r}; a gRPC client can call it")
    request, reply = GetMessageClass(method.input_type), GetMessageClass(method.output_type)

    def serialized(found: Any) -> bytes:
        try:
            return ParseDict(found, request()).SerializeToString()
        except (ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidRequest(
                f"body: expected {request.DESCRIPTOR.full_name} as JSON: {one_line(str(error))}"
            ) from None

    return RpcForm(serialized, lambda data: _json(reply.FromString(data)))


def _json(message: Message) -> str:
    return MessageToJson(message, preserving_proto_field_name=True, ensure_ascii=False)


def _methods(contract: bytes, service: str) -> Iterator[MethodDescriptor]:
    try:
        found = _pool(contract).FindServiceByName(service)
    except KeyError:
        return
    yield from found.methods


@lru_cache(maxsize=4)
def _pool(contract: bytes) -> DescriptorPool:
    """Every type of a contract; none where it cannot be read."""
    pool, added = DescriptorPool(), set[str]()
    try:
        files = {file.name: file for file in Application.FromString(contract).files.file}

        def add(name: str) -> None:  # what a file imports comes first
            if name in files and name not in added:
                added.add(name)
                for other in files[name].dependency:
                    add(other)
                pool.AddSerializedFile(files[name].SerializeToString())

        for name in files:
            add(name)
    except (DecodeError, TypeError, RecursionError):
        return DescriptorPool()
    return pool


def _example(message: Descriptor, depth: int, left: list[int]) -> dict[str, Any]:
    """A message with a value in each field, of several choices the first. `left`: how many fields there is room for."""
    found: dict[str, Any] = {}
    for field in message.fields:
        if left[0] > 0 and (not field.containing_oneof or _is_first(field)):
            left[0] -= 1
            found[field.name] = _value(field, depth, left)
    return {name: value for name, value in found.items() if value is not None}


def _is_first(field: FieldDescriptor) -> bool:
    return field.containing_oneof is not None and field.containing_oneof.fields[0] is field


def _value(field: FieldDescriptor, depth: int, left: list[int]) -> Any:
    """None = it is left out."""
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return {}
    value: Any
    if kind is not None:
        is_left_out = kind.full_name.startswith(_GIVEN) or depth == DEEPEST_EXAMPLE
        value = None if is_left_out else _example(kind, depth + 1, left)
    elif field.enum_type is not None:
        value = field.enum_type.values[-1].name
    else:
        value = {bool: True, str: "text", bytes: "", float: 1.5}.get(type(field.default_value), 1)
    return [value] if field.is_repeated and value is not None else value
