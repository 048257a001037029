"""How many calls the workers of a test have ended, as each of its processes can read it at any moment.

Each worker counts in a file of eight bytes that all have in their memory: what somebody waited for can so be counted
in turns, which do not depend on how fast the machine is.
"""

from __future__ import annotations

import mmap
from pathlib import Path

Turns = memoryview
"""One number."""


def of_worker(directory: str, name: str) -> Turns:
    """A worker's own, which begins with 0."""
    path = Path(directory, name)
    path.write_bytes(bytes(8))
    return _mapped(path)


def of_all(directory: str) -> list[Turns]:
    """Those of the workers that have been started so far."""
    return [_mapped(path) for path in Path(directory).iterdir()]


def _mapped(path: Path) -> Turns:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
