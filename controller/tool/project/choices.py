"""What other projects of this user have chosen a moment ago: their stacks may not run yet, so nothing else shows it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from ...errors import InvalidRequest
from .env_file import EnvFile

RECENT_S = 900.0
"""By then a stack runs, or its `up` has ended."""
wall_clock = time.time


@contextlib.contextmanager
def alone(root: Path) -> Iterator[dict[Path, EnvFile]]:
    """Hold the list of choices while the project at `root` chooses; what others chose recently, by their directories.

    Where no list can be kept, each chooses alone: `up` says which port is taken.
    """
    with contextlib.ExitStack() as held:
        try:
            kept = held.enter_context(_list())
            fcntl.flock(kept, fcntl.LOCK_EX)
        except OSError:
            yield {}
            return
        others = _recent(kept, root)
        yield dict(_env_files(others))
        lines = [f"{at} {place}" for place, at in {**others, root: wall_clock()}.items()]
        kept.truncate(0)
        kept.write("".join(f"{line}\n" for line in lines))


def _list() -> IO[str]:
    """The file, which is this user's own. Raises OSError, also where somebody else has made one of that name."""
    file = Path(tempfile.gettempdir()) / f"pierhead-{os.getuid()}.projects"
    number = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    opened = os.fdopen(number, "a+", encoding="utf-8", errors="replace")
    if os.fstat(number).st_uid != os.getuid():
        opened.close()
        raise PermissionError(file)
    return opened


def _env_files(places: Iterable[Path]) -> Iterator[tuple[Path, EnvFile]]:
    for place in places:
        with contextlib.suppress(InvalidRequest):  # it cannot be read
            yield place, EnvFile(place / ".env")


def _recent(kept: IO[str], root: Path) -> dict[Path, float]:
    """The directories of other projects, and when each chose."""
    kept.seek(0)
    found = {}
    for at, _, place in (line.rstrip("\n").partition(" ") for line in kept):
        with contextlib.suppress(ValueError):
            if wall_clock() - float(at) < RECENT_S and Path(place) != root:
                found[Path(place)] = float(at)
    return found
