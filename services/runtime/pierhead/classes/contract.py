"""The contract of one service's class: its gRPC service, its methods' messages, and the values in them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pierhead.classes.codec import LEFT_OUT, Codecs, Read, Unfit, Write
from pierhead.classes.descriptors import ContractFile, reply_of, request_of, types_of
from pierhead.classes.shapes import CannotTravel, Field, Generated
from pierhead.classes.signatures import MethodShape, methods_of_class
from pierhead.errors import BadRequest, PierheadError

_PACKAGE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


class Contract:
    """Raises CannotTravel for a class that has none."""

    def __init__(self, cls: type, root: type, others: Collection[Callable[..., Any]] = ()) -> None:
        """`root`: the base whose methods are no RPCs; `others`: further functions that are none."""
        self.service = f"{_package_of(cls)}.{cls.__name__}"
        """The gRPC service's full name."""
        if _PACKAGE.fullmatch(self.service) is None:
            raise CannotTravel(f"{self.service}: a gRPC service needs a name of ASCII letters, digits and underscores")
        shapes = methods_of_class(cls, root, others)
        self.file = ContractFile(self.service, shapes)
        self.pool: DescriptorPool = self.file.load()
        codecs = Codecs()
        self.methods = MappingProxyType({shape.name: ClassMethod(self, shape, codecs) for shape in shapes})

    @cached_property
    def descriptor_set(self) -> FileDescriptorSet:
        """The file and its imports, for `compare`."""
        return self.file.descriptor_set()

    def message(self, name: str) -> type[Message]:
        """The class of a message that is nested in the service's own."""
        return GetMessageClass(self.pool.FindMessageTypeByName(f"{types_of(self.service)}.{name}"))


class ClassMethod:
    """One method: Python arguments and results as messages, and back."""

    def __init__(self, contract: Contract, shape: MethodShape, codecs: Codecs) -> None:
        self.name = shape.name
        self.label = f"{contract.service}/{shape.name}"
        """As in metrics and messages."""
        self.streams = shape.streams
        self.threaded = shape.threaded
        self._signature = shape.signature
        parameters = shape.signature.parameters.values()
        self._positional = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
        self._required = {each.name for each in parameters if each.default is each.empty}
        self._writers = {field.name: codecs.writer_of(field) for field in shape.fields}
        self._readers = [(field.name, codecs.reader_of(field)) for field in shape.fields]
        self._whole_request = shape.request is not None
        self.request_class = _class_of(shape.request, contract, request_of(self.name))
        reply = shape.reply if isinstance(shape.reply, Generated) else None
        self._whole_reply = reply is not None
        self.reply_class = _class_of(reply, contract, reply_of(self.name))
        value = shape.reply if isinstance(shape.reply, Field) else None
        self._write_reply: Write | None = None if value is None else codecs.writer_of(value)
        self._read_reply: Read | None = None if value is None else codecs.reader_of(value)

    # ---- at the caller

    def request(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The request of a call with these arguments. Raises TypeError for those that the method does not take."""
        given = dict(zip(self._positional, args, strict=False))
        given.update(kwargs)
        fits = len(given) == len(args) + len(kwargs) and given.keys() >= self._required
        if not fits or not given.keys() <= self._writers.keys():
            self._signature.bind(*args, **kwargs)  # raises Python's own words
        if self._whole_request:
            [message] = given.values()
            return self._instance(message, self.request_class)
        request = self.request_class()
        try:
            for name, value in given.items():
                self._writers[name](request, value)
        except Unfit as error:
            raise TypeError(f"{self.label}: {error}") from error.__cause__
        return request

    def result(self, reply: Any) -> Any:
        """The value of a reply. Raises PierheadError for one of a version with another contract."""
        if self._whole_reply:
            return reply
        if self._read_reply is None:
            return None
        try:
            return self._read_reply(reply)
        except Unfit as error:
            raise PierheadError(f"{self.label} has sent a reply that does not fit its contract: {error}") from error

    # ---- at the replica

    def arguments(self, request: Any) -> dict[str, Any]:
        """The keyword arguments of a request; those that are left out have Python's defaults. Raises BadRequest."""
        if self._whole_request:
            return {self._positional[0] if self._positional else next(iter(self._required)): request}
        try:
            return {name: value for name, read in self._readers if (value := read(request)) is not LEFT_OUT}
        except Unfit as error:
            raise BadRequest(f"{self.label}: {error}") from error

    def reply(self, value: Any) -> Any:
        """The reply with a result. Raises TypeError for one that is not what the hint says."""
        if self._whole_reply:
            return self._instance(value, self.reply_class)
        reply = self.reply_class()
        if self._write_reply is not None:
            try:
                self._write_reply(reply, value)
            except Unfit as error:
                raise TypeError(f"{self.label} returned what its type hint does not allow: {error}") from error
        elif value is not None:
            raise TypeError(f"{self.label} returned {value!r:.60}; its type hint says None")
        return reply

    def _instance(self, message: Any, kind: type[Message]) -> Any:
        if not isinstance(message, kind):
            raise TypeError(f"{self.label}: expected a {kind.__name__}, found {message!r:.60}")
        return message


def _class_of(generated: Generated | None, contract: Contract, name: str) -> type[Message]:
    return contract.message(name) if generated is None else generated.type


def _package_of(cls: type) -> str:
    """The module that others import the class from, also where it runs as a program."""
    if cls.__module__ != "__main__":
        return cls.__module__
    program = sys.modules["__main__"]
    spec = getattr(program, "__spec__", None)
    return spec.name if spec is not None else Path(getattr(program, "__file__", "__main__")).stem
