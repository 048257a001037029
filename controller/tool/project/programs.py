"""The programs of this machine that the tool calls; tests/fakes/fake_programs.py is the fake."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ...errors import ControllerError
from . import direct, steps

READ_S = 10.0
"""How long a question may take."""
NOT_FOUND = 127
"""The status of a program that is not there, as a shell has it."""
TIMED_OUT = 124
"""The status of a program that was ended at its time limit, as `timeout` has it."""


@dataclass(frozen=True, slots=True)
class Done:
    """How a program ended."""

    status: int
    output: str = ""
    errors: str = ""

    @property
    def lines(self) -> list[str]:
        """The lines of a successful program's output; none of one that failed."""
        return self.output.splitlines() if self.status == 0 else []

    @property
    def reason(self) -> str:
        """Why a program failed, on one line: what it said, else its status."""
        return " ".join(self.errors.split()) or f"exit status {self.status}"


class Told(ControllerError):
    """A program has failed, and has said why."""

    def __init__(self, status: int) -> None:
        super().__init__("")
        self.exit_code = status


class Programs:
    """Each call names a program and its arguments; `variables` are put over those of this process."""

    def read(
        self,
        *words: str,
        timeout_s: float | None = READ_S,
        variables: Mapping[str, str] | None = None,
        directory: Path | None = None,
        given: str = "",
        complains: bool = False,
    ) -> Done:
        """Run it to its end and return what it printed; it reads what it is given.

        `complains`: its standard error is shown, and not returned.
        """
        try:
            done = subprocess.run(
                words, stdout=subprocess.PIPE, stderr=None if complains else subprocess.PIPE, text=True,
                timeout=timeout_s, check=False, input=given, env={**os.environ, **_own(variables or {}, directory)},
                cwd=directory,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Done(TIMED_OUT, errors=f"{words[0]} did not end within {timeout_s:g} s")
        except OSError as error:
            return Done(NOT_FOUND, errors=f"{words[0]}: {error.strerror}")
        return Done(done.returncode, done.stdout, done.stderr or "")

    def call(
        self,
        *words: str,
        variables: Mapping[str, str],
        given: str | None = None,
        directory: Path | None = None,
    ) -> int:
        """Run it to its end, with what it prints in its place; its status. It reads what it is given, else as this
        process does. Raises KeyboardInterrupt at Ctrl-C, once it has ended.
        """
        sys.stdout.flush()
        own = {**os.environ, **_own(variables, directory)}
        with steps.interrupts_wait() as interrupts:
            done = subprocess.run(words, input=given, text=True, check=False, env=own, cwd=directory)
        if interrupts:
            raise KeyboardInterrupt
        return done.returncode

    def step(self, text: str, *words: str, variables: Mapping[str, str], directory: Path) -> bool:
        """Run it to its end as a step that `text` names; whether it succeeded. See `steps.step`."""
        return steps.step(text, words, _own(variables, directory), directory)

    def wait(self, text: str, missing: Callable[[], str], within_s: float) -> bool:
        """Wait, as a step, until nothing is missing any more; whether that came in time. See `steps.wait`."""
        return steps.wait(text, missing, within_s)

    def become(self, *words: str, variables: Mapping[str, str], directory: Path | None) -> NoReturn:
        """Let it take this process's place, in `directory`."""
        sys.stdout.flush()
        if directory is not None:
            os.chdir(directory)
        os.execvpe(words[0], words, {**os.environ, **variables})  # noqa: S606 - no shell is needed

    def listens(self, address: str) -> bool:
        """Whether this user can connect to an address, http://host:port or unix:///path."""
        parts = urllib.parse.urlsplit(address)
        if parts.scheme == "unix":
            return direct.lets_in(parts.path)
        return direct.connects(parts.hostname or "", parts.port or 80)

    def addresses_of(self, host: str) -> list[str]:
        """The IP addresses of a name, or the one that is given; none of a name that is not known."""
        try:
            return [str(place[0]) for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        except OSError:
            return []

    def has_address(self, host: str) -> bool:
        """Whether this machine has an IP address; also for what is none, of which Compose says so."""
        try:
            (family, _, _, _, place), *_ = socket.getaddrinfo(host, 0, flags=socket.AI_NUMERICHOST)
        except OSError:
            return True
        with socket.socket(family) as listener:
            try:
                listener.bind(place)
            except OSError as error:
                return error.errno != errno.EADDRNOTAVAIL
        return True

    def status(self, address: str) -> int:
        """See `direct.status_here`."""
        return direct.status_here(address, READ_S)


def _own(variables: Mapping[str, str], directory: Path | None) -> Mapping[str, str]:
    """What a program in `directory` has besides this process's variables: the stack's compose file has its PWD."""
    return {**({"PWD": str(directory)} if directory else {}), **variables}
