"""Collects the problems of the compose files, one line each: "path: what was expected, what was found".

A reader method that adds a problem returns None, so reading continues and all problems are reported at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..model.text import SHOWN_LENGTH, did_you_mean, shown

if TYPE_CHECKING:
    from .dialect import Dialect

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_./:=@-]+")
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?(?:(\d+)ms)?(?:(\d+)us)?(?:(\d+)ns)?")
_DURATION_UNITS_NS = (86_400_000_000_000, 3_600_000_000_000, 60_000_000_000, 1_000_000_000, 1_000_000, 1_000, 1)
_SIZE = re.compile(r"(-1$|\d+)\s*([kmgt]?)b?", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
MOST_KEYS = 6
"""Known keys that a message names."""
_LARGEST = 2**63 - 1
"""The engine's numbers are 64 bits wide."""


def at(path: str, key: object) -> str:
    """The path of `key` inside `path`; list items are `path[0]`, odd keys are quoted so that a line stays a line."""
    if isinstance(key, int) and not isinstance(key, bool):
        return f"{path}[{key}]"
    text = key if isinstance(key, str) and _PLAIN_KEY.fullmatch(key) else shown(key)
    return f"{path}.{text}" if path else text


def _nearest(key: str, known: Collection[str]) -> str:
    """The known keys; of many those that are most like this one."""
    if len(known) <= MOST_KEYS:
        return ", ".join(known)
    near = difflib.get_close_matches(key, known, n=MOST_KEYS, cutoff=0.0)
    return f"{', '.join(near)} and {len(known) - len(near)} more (`pierhead schema` has all)"


class Problems:
    """The list of problems found so far, and typed readers that add to it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, path: str, message: str) -> None:
        """Add one problem."""
        self.lines.append(f"{path}: {message}")

    def expected(self, path: str, expectation: str, found: object) -> None:
        """Add the problem that a value is not as expected."""
        self.add(path, f"expected {expectation}, found {shown(found)}")

    def unknown_key(self, path: str, key: object, known: Collection[str], instead: str = "") -> None:
        """Add the problem of an unknown key, with `instead` as the remedy, or else with the most similar key."""
        if instead:
            self.add(at(path, str(key)), f"unknown key; {instead}")
            return
        found = str(key)[:SHOWN_LENGTH]
        guess = did_you_mean(found, known, 'did you mean "{}"?') or f"known keys: {_nearest(found, known)}"
        self.add(at(path, str(key)), f"unknown key; {guess}")

    def mapping(self, path: str, value: object) -> Mapping[Any, Any]:
        """A mapping; empty where the value is null, or not a mapping (then a problem is added)."""
        if isinstance(value, Mapping):
            return value
        if value is not None:
            self.expected(path, "a mapping", value)
        return {}

    def items(self, path: str, value: object) -> list[tuple[str, Any]]:
        """The items of a list with their paths; empty where the value is null or, with a problem added, not a list."""
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            return [(at(path, number), item) for number, item in enumerate(value)]
        if value is not None:
            self.expected(path, "a list", value)
        return []

    def text(self, path: str, value: object) -> str | None:
        """A string that is not empty."""
        if isinstance(value, str) and value:
            return value
        self.expected(path, "a string that is not empty", value)
        return None

    def texts(self, path: str, value: object) -> list[str] | None:
        """A list of strings (one string counts as a list of one, numbers as their text)."""
        if isinstance(value, str):
            return [value]
        before = len(self.lines)
        read = [self.scalar(item_path, item) for item_path, item in self.items(path, value)]
        return [text for text in read if text is not None] if len(self.lines) == before else None

    def scalar(self, path: str, value: object) -> str | None:
        """A string, number or boolean as Compose would write it into an option or a label."""
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and shown(value)[0] in "-0123456789":
            return shown(value)
        self.expected(path, "a string, a number or true/false", value)
        return None

    def text_map(self, path: str, value: object) -> dict[str, str] | None:
        """A mapping of names to scalars (null = empty text); a list of "name=value" is one too."""
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            pairs: list[tuple[str, Any]] = []
            for item_path, item in self.items(path, value):
                name, _, text = (self.scalar(item_path, item) or "").partition("=")
                pairs.append((name, text))
        else:
            pairs = list(self.mapping(path, value).items())
        read: dict[str, str] = {}
        for key, item in pairs:
            text_read = "" if item is None else self.scalar(at(path, key), item)
            if not isinstance(key, str) or not key:
                self.add(at(path, key), "expected a name that is a string and not empty")
            elif text_read is not None:
                read[key] = text_read
        return read

    def flag(self, path: str, value: object) -> bool | None:
        """A boolean."""
        if isinstance(value, bool):
            return value
        self.expected(path, "true or false", value)
        return None

    def whole(self, path: str, value: object) -> int | None:
        """An integer, or its text (Compose prints some numbers as text)."""
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value, re.ASCII):
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST:
            return value
        self.expected(path, "an integer", value)
        return None

    def number(self, path: str, value: object) -> float | None:
        """A finite number >= 0, or its text."""
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?", value, re.ASCII):
            value = float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LARGEST:
            return float(value)
        self.expected(path, "a number >= 0", value)
        return None

    def size(self, path: str, value: object) -> int | None:
        """Bytes: an integer, or text such as "512m" (units of 1024)."""
        if isinstance(value, str) and len(value) < 20 and (match := _SIZE.fullmatch(value)):
            value = int(match[1]) * _SIZE_UNITS[match[2].lower()]
        if isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= _LARGEST:
            return value
        self.expected(path, 'a size such as "512m"', value)
        return None

    def duration_ns(self, path: str, value: object) -> int | None:
        """Nanoseconds of a duration as Compose prints it: "1m30s", "500ms"."""
        if isinstance(value, str) and 0 < len(value) < 40 and (match := _DURATION.fullmatch(value)):
            parts = zip(match.groups(), _DURATION_UNITS_NS, strict=True)
            nanoseconds = round(sum(float(digits) * unit for digits, unit in parts if digits))
            if nanoseconds <= _LARGEST:
                return nanoseconds
        self.expected(path, 'a duration such as "30s" or "1m30s"', value)
        return None


# ----------------------------------------------------------------------------------------------------
# The input of the translation to the engine's create call.


@dataclass(frozen=True)
class ServiceSource:
    """One service as Compose resolved it, with the top-level sections that it refers to."""

    project: str
    name: str
    definition: Mapping[str, Any]
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`networks`, `volumes`, `secrets`, `configs`: Compose's names to their definitions."""
    control_networks: frozenset[str] | None = None
    """Networks (Compose's names) where the controller, and HAProxy if it has requests for the service, would reach it.

    None: no controller is part of these files.
    """
    dialect: Dialect | None = None
    """How it is read for an engine of several nodes; None: for that of one machine."""

    @property
    def path(self) -> str:
        """The path that messages about this service begin with."""
        return at("services", self.name)
