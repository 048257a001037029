"""The programs of a machine in memory: what each says is given by the words that its call contains."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from controller.tool.project.programs import READ_S, Done, Programs

LOOKS = 3
"""How often a wait looks; it takes no time."""


@dataclass
class FakePrograms(Programs):
    """See `Programs`. The first pattern that is found in a call answers it; a call without one fails."""

    answers: Mapping[str, Done | str] = field(default_factory=dict)
    """A pattern -> how the program ends; text: with success, and this output."""
    listening: frozenset[str] = frozenset()
    statuses: Mapping[str, int] = field(default_factory=dict)
    """By address, how a GET is answered; others with 200."""
    calls: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    variables: list[Mapping[str, str]] = field(default_factory=list)
    """Of each step, and of each program that prints in its place."""
    foreign: frozenset[str] = frozenset({"10.99.99.99"})
    """Addresses that this machine does not have."""
    addresses: Mapping[str, list[str]] = field(default_factory=dict)
    """By host name; one that is none has itself."""
    given: dict[str, str] = field(default_factory=dict)
    """What each call read, by its words."""

    def read(
        self,
        *words: str,
        timeout_s: float | None = READ_S,
        variables: Mapping[str, str] | None = None,
        directory: Path | None = None,
        given: str = "",
        complains: bool = False,
    ) -> Done:
        call = " ".join(words)
        self.calls.append(call)
        if given:
            self.given[call] = given
        for pattern, answer in self.answers.items():
            if re.search(pattern, call):
                return Done(0, answer) if isinstance(answer, str) else answer
        return Done(1, errors="no such answer")

    def call(
        self,
        *words: str,
        variables: Mapping[str, str],
        given: str | None = None,
        directory: Path | None = None,
    ) -> int:
        self.variables.append(variables)
        return self.read(*words, given=given or "").status

    def step(self, text: str, *words: str, variables: Mapping[str, str], directory: Path) -> bool:
        self.steps.append(text)
        self.variables.append(variables)
        return self.read(*words).status == 0

    def wait(self, text: str, missing: Callable[[], str], within_s: float) -> bool:
        self.steps.append(text)
        return not all(missing() for _ in range(LOOKS))

    def become(self, *words: str, variables: Mapping[str, str], directory: Path | None) -> NoReturn:
        raise AssertionError(f"a test asks `decide` where a command runs, and nothing takes its place: {words}")

    def listens(self, address: str) -> bool:
        return address in self.listening

    def addresses_of(self, host: str) -> list[str]:
        return self.addresses.get(host, [host])

    def has_address(self, host: str) -> bool:
        return host not in self.foreign

    def status(self, address: str) -> int:
        self.calls.append(f"GET {address}")
        return self.statuses.get(address, 200)
