"""Functions that are written for one message: they fill it from arguments, and call a function with what is in it.

Written out and compiled, as `dataclasses` does with `__init__`: Python itself then checks the arguments, and a field
costs what it costs with generated code. A loop over the fields costs a tenth of a small call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any, Final

from google.protobuf.message import Message

from pierhead.classes.codec import Codecs
from pierhead.classes.message_codecs import LEFT_OUT, Read, Unfit, Write
from pierhead.classes.shapes import Absent, Card, MessageField, Scalar

_P: Final = "_pierhead_"
"""Begins the names that are not parameters."""

Refuse = Callable[[Unfit], Exception]
"""The error of a value that does not fit."""


def maker(
    message: type[Message],
    fields: Sequence[MessageField],
    parameters: Sequence[Parameter],
    codecs: Codecs,
    refuse: Refuse,
) -> Callable[..., Any]:
    """`make(<the parameters>)`: the message with these values; a parameter with a default may be left out.

    Raises TypeError for arguments that do not fit the parameters, and `refuse(...)`.
    """
    writers = {field.name: codecs.writer_of(field) for field in fields}
    known: dict[str, Any] = {f"{_P}{name}": write for name, write in writers.items()}
    known |= {_P: message, f"{_P}left_out": LEFT_OUT, f"{_P}explain": _explainer(message, writers, refuse)}
    lines = [f"def make({_spell(parameters)}):", f" {_P}made = {_P}()", " try:", "  pass"]
    for field, parameter in zip(fields, parameters, strict=True):
        write = f"{_P}{field.name}({_P}made, {field.name})"
        if _is_plain(field) and field.absent is not Absent.NONE:
            write = f"{_P}made.{field.name} = {field.name}"
        optional = parameter.default is not parameter.empty
        lines.append(f"  if {field.name} is not {_P}left_out: {write}" if optional else f"  {write}")
    values = ", ".join(f"{field.name}={field.name}" for field in fields)
    lines += [" except Exception:", f"  {_P}explain({values})", f" return {_P}made"]
    return _compiled(lines, known)


def caller(
    fields: Sequence[MessageField], defaults: Mapping[str, Any], codecs: Codecs, refuse: Refuse
) -> Callable[[Callable[..., Any], Any], Any]:
    """`call(function, message)`: calls it with each field, or its default, as a keyword. Raises `refuse(...)`."""
    known: dict[str, Any] = {f"{_P}left_out": LEFT_OUT, f"{_P}Unfit": Unfit, f"{_P}refuse": refuse}
    words = []
    for field in fields:
        known[f"{_P}read_{field.name}"] = codecs.reader_of(field)
        known[f"{_P}or_{field.name}"] = defaults.get(field.name)
        value = _value(field, f"{_P}read_{field.name}", f"{_P}message")
        if field.card is Card.ONE and field.absent is Absent.DEFAULT:
            value = f"{_P}or_{field.name} if ({_P}value := {value}) is {_P}left_out else {_P}value"
        words.append(f"{field.name}={value}")
    lines = [f"def call({_P}function, {_P}message):", f" try: return {_P}function({', '.join(words)})", *_REFUSING]
    return _compiled(lines, known)


def getter(field: MessageField, codecs: Codecs, refuse: Refuse) -> Read:
    """`get(message)`: the value of one field. Raises `refuse(...)`."""
    known = {f"{_P}read": codecs.reader_of(field), f"{_P}Unfit": Unfit, f"{_P}refuse": refuse}
    lines = ["def get(message):", f" try: return {_value(field, f'{_P}read', 'message')}", *_REFUSING]
    return _compiled(lines, known)


_REFUSING: Final = (f" except {_P}Unfit as {_P}error:", f"  raise {_P}refuse({_P}error) from {_P}error.__cause__")


def _is_plain(field: MessageField) -> bool:
    """Whether the attribute of a message is the value."""
    return isinstance(field.leaf, Scalar) and field.card is Card.ONE


def _value(field: MessageField, reader: str, message: str) -> str:
    """The expression of a field's value; its reader knows what absence means."""
    if not _is_plain(field):
        return f"{reader}({message})"
    return f'({message}.{field.name} if {message}.HasField("{field.name}") else {reader}({message}))'


def _explainer(message: type[Message], writers: Mapping[str, Write], refuse: Refuse) -> Callable[..., None]:
    """Raises what says which value does not fit. Called within the `except` of an error."""

    def explain(**values: Any) -> None:
        for name, value in values.items():
            try:
                if value is not LEFT_OUT:
                    writers[name](message(), value)
            except Unfit as error:
                raise refuse(error) from error.__cause__
        raise  # noqa: PLE0704 - what the caller is handling

    return explain


def _spell(parameters: Sequence[Parameter]) -> str:
    """The parameters of a `def`."""
    words = []
    for number, each in enumerate(parameters):
        if each.kind is each.KEYWORD_ONLY and (number == 0 or parameters[number - 1].kind is not each.KEYWORD_ONLY):
            words.append("*")
        words.append(each.name if each.default is each.empty else f"{each.name}={_P}left_out")
    return ", ".join(words)


def _compiled(lines: Sequence[str], known: dict[str, Any]) -> Callable[..., Any]:
    name = lines[0].removeprefix("def ").partition("(")[0]
    exec("\n".join(lines), known)  # noqa: S102 - the only words that are not above are names of parameters
    made: Callable[..., Any] = known[name]
    return made
