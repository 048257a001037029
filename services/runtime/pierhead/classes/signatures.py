"""The methods of a service's class: which are part of its contract, and the shapes of their messages. Pure."""

from __future__ import annotations

import collections.abc
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, Union, get_args, get_origin

from google.protobuf.message import Message

from pierhead.batching.results import Batcher, Ended, StreamBatcher
from pierhead.classes.hints import MISSING, Shapes, hints_of
from pierhead.classes.shapes import Absent, CannotTravel, Card, Generated, MessageField

HOOKS: Final = frozenset(("aclose", "check_health", "close", "reconfigure"))
"""What the replica calls itself."""
SLEEP_HOOKS: Final = frozenset(("sleep", "wake"))
"""The same of a class that has both."""


@dataclass(frozen=True, slots=True)
class MethodShape:
    """One method, as callers see it."""

    name: str
    signature: inspect.Signature
    """Without `self`; of a batched method the one item."""
    fields: tuple[MessageField, ...]
    request: Generated | None
    """The only parameter's class, where that is the RPC's request."""
    reply: MessageField | Generated | None
    """The field `value` of the reply, the reply's own class, or None: an empty reply."""
    streams: bool
    threaded: bool


def methods_of_class(cls: type, root: type, others: Collection[Callable[..., Any]]) -> list[MethodShape]:
    """The public methods of a class and its bases below `root`, less `others`. Raises CannotTravel."""
    shapes = Shapes()
    names = dict.fromkeys(
        name for base in reversed(cls.__mro__) if base not in root.__mro__ for name in vars(base) if name[:1] != "_"
    )
    hooks = HOOKS | SLEEP_HOOKS if names.keys() >= SLEEP_HOOKS else HOOKS
    found = []
    for name in names:
        member = inspect.getattr_static(cls, name)
        function = member.__wrapped__ if isinstance(member, Batcher | StreamBatcher) else member  # type: ignore[union-attr]
        if name not in hooks and inspect.isfunction(function) and function not in others:
            path = f"{cls.__module__}.{cls.__qualname__}.{name}"
            try:
                found.append(_MethodReader(shapes, path, function).read(name, batched=function is not member))
            except RecursionError:
                words = "a hint is an alias that holds itself; only a dataclass, named tuple or pydantic model can"
                raise CannotTravel(f"{path}: {words}") from None
    return found


class _MethodReader:
    """Reads one method."""

    def __init__(self, shapes: Shapes, path: str, function: Any) -> None:
        self._shapes = shapes
        self._path = path
        self._function = function
        self._hints = hints_of(function, path)
        self._streams = inspect.isasyncgenfunction(function)

    def read(self, name: str, *, batched: bool) -> MethodShape:
        signature = inspect.signature(self._function)
        parameters = list(signature.parameters.values())[1:]
        hints = {each.name: self._hint_of(each) for each in parameters}
        returned = self._returned()
        if batched:
            parameters, hints, returned = self._unbatched(parameters, hints, returned)
        defaults = {each.name: MISSING if each.default is each.empty else each.default for each in parameters}
        fields = tuple(
            self._shapes.field_of(name, hints[name], default, f"{self._path}({name})")
            for name, default in defaults.items()
        )
        return MethodShape(
            name,
            inspect.Signature(parameters),
            fields,
            _whole(fields),
            self._reply(returned),
            self._streams,
            not (self._streams or inspect.iscoroutinefunction(self._function)),
        )

    def _hint_of(self, parameter: inspect.Parameter) -> Any:
        path = f"{self._path}({parameter.name})"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise CannotTravel(
                f"{path}: expected a parameter with a name, found {parameter}; a list or dict can travel"
            )
        if parameter.name not in self._hints:
            raise CannotTravel(f"{path}: expected a type hint, found none")
        return self._hints[parameter.name]

    def _returned(self) -> Any:
        """The hint of the reply, or of one item of the stream."""
        path = f"{self._path} ->"
        if "return" not in self._hints:
            raise CannotTravel(
                f"{path}: expected a type hint, found none; write `-> None` for a method without a reply"
            )
        hint = self._hints["return"]
        is_stream = get_origin(hint) in (AsyncIterator, AsyncGenerator)
        if is_stream is not self._streams:
            raise CannotTravel(
                f"{path}: a stream is an `async def` that yields, with the hint AsyncIterator[...]"
                + ("; this one does not yield" if is_stream else f", found {hint}")
            )
        return get_args(hint)[0] if is_stream else hint

    def _unbatched(self, parameters: list[inspect.Parameter], hints: dict[str, Any], returned: Any) -> Any:
        """The parameter and reply of one caller of a batched method: the items of its lists."""
        if len(parameters) != 1 or get_origin(hints[parameters[0].name]) is not list:
            raise CannotTravel(f"{self._path}: expected one parameter of a type like list[int] below @batch")
        if get_origin(returned) not in (list, collections.abc.Sequence):
            raise CannotTravel(f"{self._path} ->: expected a type like list[int] below @batch, found {returned}")
        [item] = get_args(hints[parameters[0].name])
        [result] = get_args(returned)
        if Ended in get_args(result):
            result = Union[tuple(each for each in get_args(result) if each is not Ended)]  # noqa: UP007
        # The name that the batcher itself gives it.
        return [parameters[0].replace(name="item")], {"item": item}, result

    def _reply(self, hint: Any) -> MessageField | Generated | None:
        if hint is type(None):
            return None
        if isinstance(hint, type) and issubclass(hint, Message):
            return Generated(hint)
        return self._shapes.field_of("value", hint, MISSING, f"{self._path} ->")


def _whole(fields: tuple[MessageField, ...]) -> Generated | None:
    """The protobuf message that is the whole request."""
    if len(fields) == 1 and isinstance(fields[0].leaf, Generated):
        only = fields[0]
        if only.card is Card.ONE and only.absent is Absent.REFUSED and isinstance(only.leaf, Generated):
            return only.leaf
    return None
