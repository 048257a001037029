"""Commands that import the user's modules run in the project's own Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

COMMANDS = ("serve", "proto", "dev", "build", "contract", "import", "import-ray")
"""Of `python -m pierhead`."""


def interpreter(place: Path, environment: Mapping[str, str]) -> Path:
    """The Python that has the project's packages and the runtime.

    `.venv` in `place` or in a directory above it, the environment that is active, else the tool's own.
    """
    candidates = [directory / ".venv" for directory in (place, *place.parents)]
    if active := environment.get("VIRTUAL_ENV"):
        candidates.append(Path(active))
    return next((found for each in candidates if (found := _python_of(each)) is not None), Path(sys.executable))


def hand_over(words: Sequence[str]) -> NoReturn:
    """Become `python -m pierhead WORDS` of the project."""
    sys.stdout.flush()
    python = str(interpreter(Path.cwd(), os.environ))
    os.execv(python, [python, "-m", "pierhead", *words])  # noqa: S606 - no shell is needed


def _python_of(environment: Path) -> Path | None:
    """None where it has no runtime."""
    for python, packages in (("bin/python", "lib/python3*/site-packages"), ("Scripts/python.exe", "Lib/site-packages")):
        if (environment / python).exists() and any(environment.glob(f"{packages}/pierhead-*.dist-info")):
            return environment / python
    return None
