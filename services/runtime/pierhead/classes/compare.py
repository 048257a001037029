"""What changed between two versions of a contract, and whether both can serve while one replaces the other. Pure.

Both meet both ways: old callers call new replicas, and new callers old ones. Messages are compared by their fields'
numbers, whatever they are called themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

from pierhead.contract.v1 import contract_pb2
from pierhead.contract.v1.application_pb2 import Application

IMAGE_PATH: Final = "/usr/local/share/pierhead/contract.binpb"
"""Where an image carries the contracts of its application: an `Application`, serialized."""


@dataclass(frozen=True, slots=True)
class Change:
    """One difference; `str()` is a sentence that names the field."""

    path: str
    """`shop.Scorer.score(user)`, `shop.Scorer.score -> value.price`, `shop.Scorer.score`."""
    words: str
    compatible: bool

    def __str__(self) -> str:
        return f"{self.path}: {self.words}"


def compare(old: FileDescriptorSet, new: FileDescriptorSet) -> tuple[Change, ...]:
    """The changes from one version to the next, of every service in the two sets."""
    before, after = _Types(old), _Types(new)
    return tuple(_Comparison(before, after).services(before.services, after.services))


def incompatible(old: bytes, new: bytes, service: str) -> tuple[Change, ...]:
    """What keeps two versions of a service from serving at the same time: changes of what it serves, and of what it
    calls in both.

    `old`, `new`: their `Application`, serialized; `service`: its name in the compose file. None where the old one does
    not have it. Raises DecodeError, and KeyError for descriptors that lack a type.
    """
    before, after = Application.FromString(old), Application.FromString(new)
    was, now = ({each.name: each for each in one.services} for one in (before, after))
    if service not in was:
        return ()
    names = {service}
    if service in now:
        names |= set(was[service].calls) & set(now[service].calls)
    served, serves = ([grpc for name in names if name in one for grpc in one[name].grpc_services] for one in (was, now))
    changes = _Comparison(_Types(before.files), _Types(after.files)).services(served, serves)
    return tuple(change for change in changes if not change.compatible)


class _Types:
    """Everything in a set, by full name."""

    def __init__(self, files: FileDescriptorSet) -> None:
        self.services: dict[str, dict[str, MethodDescriptorProto]] = {}
        self.messages: dict[str, DescriptorProto] = {}
        self.enums: dict[str, EnumDescriptorProto] = {}
        for file in files.file:
            prefix = f".{file.package}" if file.package else ""
            for service in file.service:
                self.services[f"{prefix}.{service.name}"[1:]] = {each.name: each for each in service.method}
            for message in file.message_type:
                self._add(f"{prefix}.{message.name}", message)
            self.enums.update((f"{prefix}.{each.name}", each) for each in file.enum_type)

    def _add(self, name: str, message: DescriptorProto) -> None:
        self.messages[name] = message
        for inner in message.nested_type:
            self._add(f"{name}.{inner.name}", inner)
        self.enums.update((f"{name}.{each.name}", each) for each in message.enum_type)


class _Comparison:
    def __init__(self, old: _Types, new: _Types) -> None:
        self._old = old
        self._new = new
        self._met: set[tuple[str, str]] = set()
        """Pairs of types that were compared: a type may hold itself."""

    def services(self, old: Collection[str], new: Collection[str]) -> Iterator[Change]:
        """Compare these services, by their full names: those of the old version, and those of the new one."""
        for name in sorted({*old, *new}):
            if name not in new:
                yield Change(name, "the service was removed, or renamed", compatible=False)
            elif name not in old:
                yield Change(name, "the service was added", compatible=True)
            else:
                yield from self._methods(name, self._old.services[name], self._new.services[name])

    def _methods(
        self, service: str, old: dict[str, MethodDescriptorProto], new: dict[str, MethodDescriptorProto]
    ) -> Iterator[Change]:
        for name in sorted(old.keys() | new.keys()):
            path, before, after = f"{service}.{name}", old.get(name), new.get(name)
            if after is None:
                yield Change(path, "the method was removed, or renamed", compatible=False)
            elif before is None:
                yield Change(path, "the method was added", compatible=True)
            elif _kind(before) != _kind(after):
                yield Change(path, f"was {_kind(before)}, is {_kind(after)}", compatible=False)
            else:
                self._met.clear()
                yield from self._messages(f"{path}()", before.input_type, after.input_type)
                self._met.clear()
                yield from self._messages(f"{path} ->", before.output_type, after.output_type)

    def _messages(self, path: str, old: str, new: str) -> Iterator[Change]:
        """Compare two messages by their names."""
        if (old, new) in self._met:
            return
        self._met.add((old, new))
        before = {field.number: field for field in self._old.messages[old].field}
        after = {field.number: field for field in self._new.messages[new].field}
        for number in sorted(before.keys() | after.keys()):
            yield from self._fields(path, before.get(number), after.get(number), (before, after))

    def _fields(
        self,
        path: str,
        old: FieldDescriptorProto | None,
        new: FieldDescriptorProto | None,
        every: tuple[dict[int, FieldDescriptorProto], dict[int, FieldDescriptorProto]],
    ) -> Iterator[Change]:
        """Compare the two fields of one number."""
        before, after = ({field.name: field.number for field in fields.values()} for fields in every)
        if old is not None and (new is None or new.name != old.name):
            where = _within(path, old.name)
            if old.name in after:
                words = f"moved from place {old.number} to {after[old.name]}; add at the end, and keep the order"
            elif new is None or new.name in before:
                words = "was removed"
            else:
                words = f"was removed, or renamed to {new.name}"
            yield Change(where, words, compatible=False)
        if new is not None and old is None and new.name not in before:
            yield _added(_within(path, new.name), new)
        if new is not None and old is not None and new.name == old.name:
            yield from self._field(_within(path, new.name), old, new)

    def _field(self, path: str, old: FieldDescriptorProto, new: FieldDescriptorProto) -> Iterator[Change]:
        """Compare two fields of one number and name."""
        if (old.type, old.label) != (new.type, new.label):
            yield Change(path, f"was {_spell(old)}, is {_spell(new)}", compatible=False)
            return
        if is_required(old) and not is_required(new):
            yield Change(path, "can be left out now, and replicas of the old version need it", compatible=False)
        elif is_required(new) and not is_required(old):
            yield Change(path, "is required now, and callers of the old version may leave it out", compatible=False)
        if new.type == FieldDescriptorProto.TYPE_MESSAGE:
            yield from self._messages(path, old.type_name, new.type_name)
        elif new.type == FieldDescriptorProto.TYPE_ENUM:
            yield from self._members(path, old.type_name, new.type_name)

    def _members(self, path: str, old: str, new: str) -> Iterator[Change]:
        before = {value.number: value.name for value in self._old.enums[old].value}
        after = {value.number: value.name for value in self._new.enums[new].value}
        for number in sorted(before.keys() | after.keys()):
            was, now = before.get(number), after.get(number)
            if now is None:
                yield Change(path, f"the member {was} was removed", compatible=False)
            elif was is None:
                yield Change(path, f"the member {now} was added: the old version cannot read it", compatible=False)
            elif was != now:
                yield Change(path, f"the member {was} is {now} now", compatible=False)


def _added(path: str, field: FieldDescriptorProto) -> Change:
    if is_choice(field):
        return Change(path, "is one of the types now: the old version cannot read it", compatible=False)
    if is_required(field):
        words = "was added without a default, and callers or replicas of the old version do not send it"
        return Change(path, words, compatible=False)
    return Change(path, "was added", compatible=True)


def is_choice(field: FieldDescriptorProto) -> bool:
    """Whether it is one of several types of a value."""
    return field.HasField("oneof_index") and not field.proto3_optional


def is_required(field: FieldDescriptorProto) -> bool:
    """Whether it may not be left out."""
    return field.options.Extensions[contract_pb2.required]


def _kind(method: MethodDescriptorProto) -> str:
    return "a stream" if method.server_streaming else "a single reply"


def _spell(field: FieldDescriptorProto) -> str:
    kind = field.type_name.rpartition(".")[2] or FieldDescriptorProto.Type.Name(field.type)[5:].lower()
    return f"repeated {kind}" if field.label == FieldDescriptorProto.LABEL_REPEATED else kind


def _within(path: str, name: str) -> str:
    """`score()` -> `score(user)`, `score(user)` -> `score(user).price`, `score ->` -> `score -> value`."""
    if path.endswith("()"):
        return f"{path[:-1]}{name})"
    return f"{path} {name}" if path.endswith("->") else f"{path}.{name}"
