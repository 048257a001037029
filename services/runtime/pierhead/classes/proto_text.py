"""A contract as the text of a .proto file, for clients in other languages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from pierhead.classes.compare import is_choice, is_required
from pierhead.contract.v1 import contract_pb2

_WORDS: Final = {
    FieldDescriptorProto.TYPE_STRING: "string",
    FieldDescriptorProto.TYPE_INT64: "int64",
    FieldDescriptorProto.TYPE_DOUBLE: "double",
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_BYTES: "bytes",
}


def proto_text(file: FileDescriptorProto) -> str:
    """The file of a contract, as `protoc` reads it.

    Required fields have a comment in place of their option, whose file clients in other languages do not have.
    """
    lines = ['syntax = "proto3";', "", f"package {file.package};", ""]
    imports = [f'import "{name}";' for name in file.dependency if name != contract_pb2.DESCRIPTOR.name]
    lines += [*imports, ""] if imports else []
    scope = f".{file.package}."
    for service in file.service:
        lines.append(f"service {service.name} {{")
        for method in service.method:
            stream = "stream " if method.server_streaming else ""
            request, reply = method.input_type.removeprefix(scope), method.output_type.removeprefix(scope)
            lines.append(f"  rpc {method.name}({request}) returns ({stream}{reply});")
        lines += ["}", ""]
    for message in file.message_type:
        lines += [*_message(message, f"{scope}{message.name}."), ""]
    return "\n".join(lines[:-1]) + "\n"


def _message(message: DescriptorProto, scope: str) -> Iterator[str]:
    entries = {each.name: each for each in message.nested_type if each.options.map_entry}
    yield f"message {message.name} {{"
    for inner in message.nested_type:
        if inner.name not in entries:
            yield from (f"  {line}" for line in _message(inner, scope))
    for members in message.enum_type:
        yield f"  enum {members.name} {{"
        yield from (f"    {value.name} = {value.number};" for value in members.value)
        yield "  }"
    choices = [field for field in message.field if is_choice(field)]
    yield from (f"  {_field(field, entries, scope)}" for field in message.field if field not in choices)
    if choices:
        yield f"  oneof {message.oneof_decl[0].name} {{"
        yield from (f"    {_field(field, entries, scope)}" for field in choices)
        yield "  }"
    yield "}"


def _field(field: FieldDescriptorProto, entries: dict[str, DescriptorProto], scope: str) -> str:
    entry = entries.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        kind = f"map<{_type(entry.field[0], scope)}, {_type(entry.field[1], scope)}>"
    elif field.label == FieldDescriptorProto.LABEL_REPEATED:
        kind = f"repeated {_type(field, scope)}"
    else:
        kind = f"{'optional ' if field.proto3_optional else ''}{_type(field, scope)}"
    return f"{kind} {field.name} = {field.number};{' // required' if is_required(field) else ''}"


def _type(field: FieldDescriptorProto, scope: str) -> str:
    return field.type_name.removeprefix(scope) or _WORDS[field.type]
