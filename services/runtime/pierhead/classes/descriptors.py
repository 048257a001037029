"""The protobuf file of a service's class, and its load into a descriptor pool of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message

from pierhead.classes.message_codecs import GIVEN
from pierhead.classes.shapes import (
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
from pierhead.classes.signatures import MethodShape
from pierhead.contract.v1 import contract_pb2
from pierhead.tensor.v1 import tensor_pb2

_TYPES: Final = {
    str: FieldDescriptorProto.TYPE_STRING,
    int: FieldDescriptorProto.TYPE_INT64,
    float: FieldDescriptorProto.TYPE_DOUBLE,
    bool: FieldDescriptorProto.TYPE_BOOL,
    bytes: FieldDescriptorProto.TYPE_BYTES,
}


_GIVEN_NUMBER: Final = 2047
"""The last one that takes two bytes."""


def types_of(service: str) -> str:
    """The full name of the message that the messages of a service are nested in."""
    return f"{service}Types"


def request_of(method: str) -> str:
    """The name of a method's request. Not in CamelCase: users call their own types so."""
    return f"{method}_request"


def reply_of(method: str) -> str:
    """The name of a method's reply."""
    return f"{method}_reply"


class ContractFile:
    """Builds the file of one service. `service`: its full name."""

    def __init__(self, service: str, methods: Sequence[MethodShape]) -> None:
        package, _, name = service.rpartition(".")
        self.proto = FileDescriptorProto(name=f"{service.replace('.', '/')}.proto", package=package, syntax="proto3")
        self._service = service
        self._types = DescriptorProto(name=types_of(name))
        self._owners: dict[str, object] = {}
        self._begun: set[str] = set()
        self._imports: dict[str, FileDescriptor] = {}
        declared = self.proto.service.add(name=name)
        for method in methods:
            made = declared.method.add(name=method.name)
            made.input_type, made.output_type = self._request(method), self._reply(method)
            if method.streams:
                made.server_streaming = True
        if self._owners:
            self.proto.message_type.append(self._types)
        self.proto.dependency.extend(self._imports)

    def load(self) -> DescriptorPool:
        """A pool with this file and all that it imports, for reflection. Raises CannotTravel for names that clash."""
        return self._load(self.proto)

    def load_in_order(self) -> DescriptorPool:
        """As `load`, for messages that are written and read: maps are lists of their entries, which keep their order
        and have the same bytes; models have the field GIVEN. Raises CannotTravel.
        """
        file = FileDescriptorProto.FromString(self.proto.SerializeToString())
        for message in file.message_type:
            for inner in message.nested_type:
                for entry in inner.nested_type:
                    entry.options.ClearField("map_entry")
                owner = self._owners.get(inner.name)
                if isinstance(owner, Struct) and owner.validated is not None:
                    inner.field.add(
                        name=GIVEN,
                        number=_GIVEN_NUMBER,
                        type=FieldDescriptorProto.TYPE_INT32,
                        label=FieldDescriptorProto.LABEL_REPEATED,
                    )
        return self._load(file)

    def _load(self, own: FileDescriptorProto) -> DescriptorPool:
        pool = DescriptorPool()
        for file in self.imported():
            pool.AddSerializedFile(file.serialized_pb)
        try:
            pool.AddSerializedFile(own.SerializeToString())
        except TypeError as error:
            raise CannotTravel(f"{self._service}: {error}") from None
        return pool

    def descriptor_set(self) -> FileDescriptorSet:
        """This file and all that it imports, imports first."""
        every = FileDescriptorSet()
        for file in self.imported():
            file.CopyToProto(every.file.add())
        every.file.append(self.proto)
        return every

    def imported(self) -> list[FileDescriptor]:
        """The imports of this file and theirs, in an order in which they can be loaded."""
        found: dict[str, FileDescriptor] = {}
        for file in self._imports.values():
            found.update((each.name, each) for each in _with_imports(file))
        return list(found.values())

    # ---- messages

    def _request(self, method: MethodShape) -> str:
        if method.request is not None:
            return self._import(method.request.type)
        return self._message(request_of(method.name), method, method.fields)

    def _reply(self, method: MethodShape) -> str:
        if isinstance(method.reply, Generated):
            return self._import(method.reply.type)
        return self._message(reply_of(method.name), method, () if method.reply is None else (method.reply,))

    def _message(self, name: str, owner: object, fields: Sequence[MessageField]) -> str:
        """Add a message, once for each owner; returns its full name."""
        if self._is_new(name, owner):
            message = DescriptorProto(name=name)
            if isinstance(owner, OneOf):
                message.oneof_decl.add(name="value")
            for number, field in enumerate(fields, 1):
                made = self._field(message, field, number)
                if isinstance(owner, OneOf):
                    made.oneof_index = 0
                elif field.card is Card.ONE:
                    self._presence(message, made, field)
            self._types.nested_type.append(message)
        return f".{types_of(self._service)}.{name}"

    def _is_new(self, name: str, owner: object) -> bool:
        """Whether a type is not in the file yet. Raises CannotTravel where another one has its name."""
        known = self._owners.setdefault(name, owner)
        if known != owner:
            raise CannotTravel(f"{self._service}: two types of its contract are called {name}; rename one")
        is_new = name not in self._begun
        self._begun.add(name)  # before its fields, which may be of the same type
        return is_new

    def _field(self, message: DescriptorProto, field: MessageField, number: int) -> FieldDescriptorProto:
        made = message.field.add(name=field.name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
        if field.card is not Card.ONE:
            made.label = FieldDescriptorProto.LABEL_REPEATED
        if field.card is Card.MAP:
            made.type = FieldDescriptorProto.TYPE_MESSAGE
            made.type_name = f".{types_of(self._service)}.{message.name}.{self._entry(message, field)}"
        else:
            self._type(made, field.leaf)
        return made

    def _presence(self, message: DescriptorProto, made: FieldDescriptorProto, field: MessageField) -> None:
        if field.absent is Absent.REFUSED:
            made.options.Extensions[contract_pb2.required] = True
            self._imports[contract_pb2.DESCRIPTOR.name] = contract_pb2.DESCRIPTOR
        if made.type != FieldDescriptorProto.TYPE_MESSAGE:
            made.proto3_optional = True
            made.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field.name}")

    def _entry(self, message: DescriptorProto, field: MessageField) -> str:
        name = "".join(word[:1].upper() + word[1:] for word in field.name.split("_")) + "Entry"
        entry = message.nested_type.add(name=name)
        entry.options.map_entry = True
        assert field.key is not None  # noqa: S101
        for number, (part, leaf) in enumerate((("key", Scalar(field.key)), ("value", field.leaf)), 1):
            made = entry.field.add(name=part, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
            self._type(made, leaf)
        return name

    def _type(self, made: FieldDescriptorProto, leaf: Leaf) -> None:
        if isinstance(leaf, Scalar):
            made.type = _TYPES[leaf.type]
            return
        if isinstance(leaf, Converted):
            made.type = _TYPES[leaf.wire]
            return
        if isinstance(leaf, Members):
            made.type, made.type_name = FieldDescriptorProto.TYPE_ENUM, self._enum(leaf)
            return
        made.type = FieldDescriptorProto.TYPE_MESSAGE
        match leaf:
            case Struct() | Items() | OneOf():
                made.type_name = self._message(leaf.name, leaf, leaf.fields)
            case Box():
                made.type_name = self._message(leaf.name, leaf, (leaf.inner,))
            case Array():
                made.type_name = self._import(tensor_pb2.Tensor)
            case Generated():
                made.type_name = self._import(leaf.type)

    def _enum(self, leaf: Members) -> str:
        name = leaf.type.__name__
        if self._is_new(name, leaf):
            made = self._types.enum_type.add(name=name)
            for number, member in enumerate(("UNSPECIFIED", *(each.name for each in leaf.type))):
                made.value.add(name=f"{name}_{member}".upper(), number=number)
        return f".{types_of(self._service)}.{name}"

    def _import(self, kind: type[Message]) -> str:
        descriptor: Any = kind.DESCRIPTOR
        self._imports[descriptor.file.name] = descriptor.file
        return f".{descriptor.full_name}"


def _with_imports(file: FileDescriptor) -> Iterator[FileDescriptor]:
    for each in file.dependencies:
        yield from _with_imports(each)
    yield file
