"""Types that travel as one that protobuf has: dates and times, decimals, UUIDs, literals. Pure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from typing import Any, Final
from uuid import UUID

from pierhead.classes.shapes import SCALARS, Converted


def _by(kind: Any, wire: type, spell: Callable[[Any], Any], make: Callable[[Any], Any]) -> Converted:
    def write(value: Any) -> Any:
        if not isinstance(value, kind) or (kind is date and isinstance(value, datetime)):
            raise TypeError
        return spell(value)

    def read(value: Any) -> Any:
        try:
            return make(value)
        except (ValueError, ArithmeticError):
            raise ValueError(f"expected a {kind.__name__}, found {value!r:.60}") from None

    return Converted(kind.__name__, kind.__name__.capitalize(), wire, write, read, kind)


_KNOWN: Final = {
    datetime: _by(datetime, str, datetime.isoformat, datetime.fromisoformat),
    date: _by(date, str, date.isoformat, date.fromisoformat),
    time: _by(time, str, time.isoformat, time.fromisoformat),
    timedelta: _by(timedelta, float, timedelta.total_seconds, lambda seconds: timedelta(seconds=seconds)),
    UUID: _by(UUID, str, str, UUID),
}
"""By the hint. Text is as ISO 8601 has it."""


def converted(hint: Any) -> Converted | None:
    """How a type travels; None for any other hint. Does not import `decimal`, which takes memory."""
    decimal = sys.modules.get("decimal")
    if decimal is not None and hint is decimal.Decimal:
        return _by(hint, str, str, hint)
    return _KNOWN.get(hint) if isinstance(hint, type) else None


def literal(values: tuple[Any, ...]) -> Converted | None:
    """`Literal[...]` of values of one type, which travel unchanged; None for others, enums' members too."""
    kind = type(values[0])
    if kind not in SCALARS or any(type(value) is not kind for value in values):
        return None
    name = f"Literal[{', '.join(map(repr, values))}]"

    def checked(value: Any) -> Any:
        if type(value) is not kind or value not in values:
            raise ValueError(f"expected {name}, found {value!r:.60}")
        return value

    word = "".join(char for value in values for char in str(value).title() if char.isascii() and char.isalnum())
    return Converted(name, f"Literal{word}", kind, checked, checked)
