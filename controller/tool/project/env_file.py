"""A project's `.env` in the commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pierhead.dotenv import DotEnv

from ...errors import InvalidRequest


class EnvFile(DotEnv):
    """Its errors are the command's."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidRequest for a file that is not text."""
        try:
            super().__init__(path)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{path}: cannot be read as text ({error})") from None


def setting(name: str, file: EnvFile, environment: Mapping[str, str]) -> str | None:
    """What Compose takes for a variable: the shell's value, else that of the file."""
    return environment[name] if name in environment else file.get(name)
