"""Python environments of their own, for tests and benches: each is made once of what it says that it is made of."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from controller.tool.project.steps import step
from tests.harness.imports import ROOT

TORCH = re.findall("torch==[0-9.]+", (ROOT / "compose" / "machine" / "uv.sh").read_text())[0]
_BASH = 'set -euo pipefail; . compose/machine/uv.sh; trust_own_certificates; "$@"'


class NotMade(Exception):
    """The machine cannot have it."""


@dataclass(frozen=True)
class Environment:
    """One environment. `wanted`: what it is made of; another content, and it is made again."""

    directory: Path
    wanted: bytes

    @property
    def python(self) -> str:
        return str(self.directory / "bin" / "python")

    def is_made(self) -> bool:
        try:
            return (self.directory / "made").read_text() == self._made
        except OSError:
            return False

    def make(self, made_by: Callable[[], None]) -> None:
        """Have it made where it is not; others that make it wait. Raises NotMade."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{self.directory}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.is_made():
                (self.directory / "made").unlink(missing_ok=True)
                made_by()
                (self.directory / "made").write_text(self._made)

    @property
    def _made(self) -> str:
        return f"{hashlib.sha256(self.wanted).hexdigest()}  -\n"


def with_uv(text: str, *words: str, **variables: str) -> None:
    """A step that runs uv, or another function of compose/machine/uv.sh. Raises NotMade."""
    run(text, ["bash", "-c", _BASH, "uv", *words], variables)


def of_pins(environment: Environment, pins: Path, what: str) -> None:
    """Make an environment of what a file pins. Raises NotMade. The bytecode is compiled once: many processes, and many
    starts, import it.
    """
    python = shutil.which("python3.11") or sys.executable
    with_uv(f"Making {environment.directory}", "uv", "venv", "--clear", "--python", python, str(environment.directory))
    pip = ("uv", "pip", "install", "--python", environment.python, "--no-deps", "--compile-bytecode")
    with_uv(f"Installing {what}", *pip, "--requirement", str(pins))


def become(module: str, *words: str) -> NoReturn:
    """Let a module take this process's place."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *words])  # noqa: S606 - no shell is needed


def run(text: str, words: Sequence[str], variables: Mapping[str, str]) -> None:
    """A step. Raises NotMade."""
    if not step(text, words, variables, ROOT):
        raise NotMade(f"{text}: that failed; the lines above say why")


def command(environment: Environment, make: Callable[[], None]) -> int:
    """`python -m ... [check]`: have it made, or only say by the exit status whether it is."""
    match sys.argv[1:]:
        case []:
            try:
                environment.make(make)
            except NotMade as error:
                print(f"pierhead: {error}", file=sys.stderr)
                return 2
            return 0
        case ["check"]:
            return 0 if environment.is_made() else 1
    print(f"expected nothing or check, found {' '.join(sys.argv[1:])}", file=sys.stderr)
    return 2
