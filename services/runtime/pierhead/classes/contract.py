"""The contract of one service's class: its gRPC service, its methods' messages, and the values in them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pierhead.classes.codec import Codecs
from pierhead.classes.compiled import Refuse, caller, getter, maker
from pierhead.classes.descriptors import ContractFile, reply_of, request_of, types_of
from pierhead.classes.shapes import CannotTravel, Generated, MessageField
from pierhead.classes.signatures import MethodShape, methods_of_class
from pierhead.errors import BadRequest, PierheadError
from pierhead.request import CURRENT, InsideRequest

_PACKAGE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")

_VALUE: Final = inspect.Parameter("value", inspect.Parameter.POSITIONAL_OR_KEYWORD)


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
        self._pool = self.file.load_in_order()
        requests, replies = Codecs(lambda: isinstance(CURRENT.get(), InsideRequest)), Codecs(lambda: True)
        self.methods = MappingProxyType({shape.name: ClassMethod(self, shape, requests, replies) for shape in shapes})

    @cached_property
    def pool(self) -> DescriptorPool:
        """For reflection. No message of it is made."""
        return self.file.load()

    @property
    def descriptor_set(self) -> FileDescriptorSet:
        """The file and its imports, for `compare`."""
        return self.file.descriptor_set()

    def message(self, name: str) -> type[Message]:
        """The class of a message that is nested in the service's own."""
        return GetMessageClass(self._pool.FindMessageTypeByName(f"{types_of(self.service)}.{name}"))


class ClassMethod:
    """One method: Python arguments and results as messages, and back."""

    def __init__(self, contract: Contract, shape: MethodShape, requests: Codecs, replies: Codecs) -> None:
        self.name = shape.name
        self.label = f"{contract.service}/{shape.name}"
        """As in metrics and messages."""
        self.streams = shape.streams
        self.threaded = shape.threaded
        self.request_class = _class_of(shape.request, contract, request_of(self.name))
        whole = shape.reply if isinstance(shape.reply, Generated) else None
        self.reply_class = _class_of(whole, contract, reply_of(self.name))
        self.request: Callable[..., Any]
        """At the caller: the request with these arguments. Raises TypeError for those that the method does not take."""
        self.begin: Callable[[Callable[..., Any], Any], Any]
        """At the replica: `begin(function, request)` calls a function with the request's arguments, and with Python's
        default for what was left out. Raises BadRequest."""
        self._set_request(shape, requests)
        self.reply: Callable[[Any], Any] = self._nothing
        """At the replica: the reply with a result. Raises TypeError for one that is not what the hint says."""
        self.result: Callable[[Any], Any] = lambda _: None
        """At the caller: the value of a reply. Raises PierheadError for a reply of another contract."""
        if whole is not None:
            self.reply = self._whole(self.reply_class, inspect.Signature([_VALUE]))
            self.result = lambda reply: reply
        elif isinstance(shape.reply, MessageField):
            bad_result = self._refuse(TypeError, "returned what its type hint does not allow: ")
            bad_reply = self._refuse(PierheadError, "has sent a reply that does not fit its contract: ")
            self.reply = maker(self.reply_class, [shape.reply], [_VALUE], replies, bad_result)
            self.result = getter(shape.reply, replies, bad_reply)

    def _set_request(self, shape: MethodShape, codecs: Codecs) -> None:
        parameters = shape.signature.parameters
        if shape.request is None:
            defaults = {name: each.default for name, each in parameters.items()}
            bad_argument = self._refuse(TypeError)
            self.request = maker(self.request_class, shape.fields, list(parameters.values()), codecs, bad_argument)
            self.request.__qualname__ = self.label  # in Python's own TypeErrors
            self.begin = caller(shape.fields, defaults, codecs, self._refuse(BadRequest))
        else:
            self.request = self._whole(self.request_class, shape.signature)
            [name] = parameters
            self.begin = lambda function, request: function(**{name: request})

    def _whole(self, kind: type[Message], signature: inspect.Signature) -> Callable[..., Any]:
        """Makes a message of the only argument: that is the message."""

        def whole(*args: Any, **kwargs: Any) -> Any:
            [message] = args if len(args) == 1 and not kwargs else signature.bind(*args, **kwargs).arguments.values()
            if not isinstance(message, kind):
                raise TypeError(f"{self.label}: expected a {kind.__name__}, found {message!r:.60}")
            return message

        return whole

    def _nothing(self, value: Any) -> Any:
        if value is not None:
            raise TypeError(f"{self.label} returned {value!r:.60}; its type hint says None")
        return self.reply_class()

    def _refuse(self, kind: type[Exception], what: str = "") -> Refuse:
        """Makes the error of a value that does not fit."""
        return lambda error: kind(f"{self.label}{f' {what}' if what else ': '}{error}")


def _class_of(generated: Generated | None, contract: Contract, name: str) -> type[Message]:
    return contract.message(name) if generated is None else generated.type


def _package_of(cls: type) -> str:
    """The module that others import the class from, also where it runs as a program."""
    if cls.__module__ != "__main__":
        return cls.__module__
    program = sys.modules["__main__"]
    spec = getattr(program, "__spec__", None)
    return spec.name if spec is not None else Path(getattr(program, "__file__", "__main__")).stem
