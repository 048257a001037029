"""Reads typed environment variables, and collects the problems so that one error names all of them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pierhead.errors import SettingsError

T = TypeVar("T")


class Environment:
    """A program's variables. An unset or blank variable has its default.

    environment = Environment()
    threads = environment.integer("SHOP_THREADS", 4, 1)
    environment.check()
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        """`variables`: None = those of this process."""
        self.variables = os.environ if variables is None else variables
        self.problems: list[str] = []
        """One line for each variable that cannot be used."""

    def check(self) -> None:
        """Raise SettingsError that names every bad variable, if there is one."""
        if self.problems:
            raise SettingsError("\n".join(self.problems))

    def read(self, name: str, default: T, parse: Callable[[str], T], expected: str) -> T:
        """Parse a variable with `parse`. If that raises ValueError, records the problem and returns the default."""
        raw = self.text(name)
        if not raw:
            return default
        try:
            return parse(raw)
        except ValueError:
            self.problems.append(f'{name}: expected {expected}, found "{raw}"')
            return default

    def text(self, name: str, default: str = "") -> str:
        """Any text, without spaces around it."""
        return self.variables.get(name, "").strip() or default

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        word = self.choice(name, str(default).lower(), ("true", "false", "1", "0"), "true or false")
        return word in ("true", "1")

    def choice(self, name: str, default: str, choices: Sequence[str], expected: str = "") -> str:
        """One of several words, in lower case."""

        def parse(raw: str) -> str:
            if raw.lower() not in choices:
                raise ValueError
            return raw.lower()

        return self.read(name, default, parse, expected or f"{', '.join(choices[:-1])} or {choices[-1]}")

    def integer(self, name: str, default: int, least: int, most: int | None = None, expected: str = "") -> int:
        """An integer from `least` to `most`; `most` None = no bound."""
        bounds = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
        return self.read(name, default, integer_from(least, most), expected or bounds)

    def seconds(self, name: str, default: float, *, may_be_zero: bool = False) -> float:
        """A number of seconds above 0, or at least 0 with `may_be_zero`."""

        def parse(raw: str) -> float:
            value = float(raw)
            if not (math.isfinite(value) and (value > 0 or (may_be_zero and value == 0))):
                raise ValueError
            return value

        return self.read(name, default, parse, f"a number of seconds {'>= 0' if may_be_zero else 'above 0'}")


def integer_from(least: int, most: int | None = None) -> Callable[[str], int]:
    """Parses an integer within bounds."""

    def parse(raw: str) -> int:
        value = int(raw)
        if value < least or (most is not None and value > most):
            raise ValueError
        return value

    return parse
