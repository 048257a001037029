"""The owner of regions: a connection, and the file that it holds locked while its process lives.

The kernel ends the lock with the process, however that ends. What an owner without a lock had is left over.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from itertools import count
from pathlib import Path

PREFIX = "pierhead-"
"""An owner's file is `pierhead-<16 hex digits>`; its regions have `-<number>` behind that."""


class Owner:
    """One connection's. Its file is made when it is first held."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self._path = self.directory / f"{PREFIX}{os.urandom(8).hex()}"
        self._numbers = count()
        self._fd: int | None = None

    def new_name(self) -> str:
        """A name for a region."""
        return f"{self._path.name}-{next(self._numbers)}"

    def hold(self) -> None:
        """Make the file, and hold it locked. Raises OSError."""
        if self._fd is None:
            hidden = self._path.with_name(f".{self._path.name}")  # so that no process finds it before it is locked
            self._fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            hidden.rename(self._path)

    def release(self) -> None:
        """Remove the file."""
        if self._fd is not None:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._fd)
            self._fd = None

    def remove_files_of_killed_processes(self) -> None:
        """Their own, and those of their regions."""
        for path in self.directory.glob(PREFIX + "[0-9a-f]" * 16):
            if _dead(path):
                for each in (*self.directory.glob(f"{path.name}-*"), path):
                    with suppress(OSError):  # another user's
                        each.unlink()

    def left_over(self, region: str) -> bool:
        """Whether a region is one of ours whose process was killed."""
        owner = region.rpartition("-")[0]
        return owner.startswith(PREFIX) and _dead(self.directory / owner)


def _dead(path: Path) -> bool:
    """Whether nothing holds the file's lock, or it is gone."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return True
