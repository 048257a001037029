"""Cleans text from outside, so that it can be stored and shown; how ages are said, and which known name is meant. Pure.

A replica's JSON may contain lone surrogates ("\\udce9"), which UTF-8 cannot encode, so writing them to a file or socket
raises. It may also contain line breaks, which would break a table.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence

_BREAKS = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def storable(text: str) -> str:
    """The text with every lone surrogate written as its escape: it has a form in UTF-8, and keeps its meaning."""
    return text.encode(errors="backslashreplace").decode()


def one_line(text: str) -> str:
    """Storable text without line breaks and control characters, each run of which becomes one space."""
    return _BREAKS.sub(" ", storable(text)).strip()


LONGEST_TOLD = 1000
"""Characters of one text that a replica tells: it is kept in events, and its log has the rest."""


def told(text: str) -> str:
    """What a replica tells, on one line and at most LONGEST_TOLD characters long."""
    return one_line(text[:LONGEST_TOLD])[:LONGEST_TOLD]


MOST_DIGITS = 18
"""Such a number fits into 64 bits."""


def whole_number(text: str) -> int | None:
    """The number from 0 on that a text from outside is; None where it is none, or has more than MOST_DIGITS digits.

    `int` also takes digits of other scripts, signs and spaces, and raises where there are thousands of digits.
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else None


SHOWN_LENGTH = 80


def shown(value: object) -> str:
    """A value as the user wrote it, on one line and short: `"two"`, `2.5`, `null`, `a list`, `a mapping`."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return "a list"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return "an integer of more than 64 bits"
    text = json.dumps(value if value is None or isinstance(value, str | int | float) else str(value))
    return text if len(text) <= SHOWN_LENGTH else text[: SHOWN_LENGTH - 4] + '..."'


def age(since: float, now: float) -> str:
    """Return an age: "8 s", "3 min", "2 h", "4 d"."""
    passed = max(now - since, 0.0)
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if passed < limit:
            return f"{passed // unit:.0f} {name}"
    return f"{passed // 86_400:.0f} d"


def counted(count: int, noun: str) -> str:
    """Return "1 replica", "3 replicas"."""
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def did_you_mean(name: str, known: Iterable[str], words: str = "did you mean {!r}? ") -> str:
    """The words with the known name that is most like an unknown one; "" where none is like it."""
    return words.format(*near) if (near := difflib.get_close_matches(name, known, n=1)) else ""
