"""Notices that files of a project were saved, by `stat`: inotify would have to watch every directory."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

LOOK_S: Final = 0.2
"""Time between two looks at the files."""
LOOKS_SHARE: Final = 5
"""Where a look takes long, the time after it is longer by this factor: many files must not occupy a core."""
SETTLE_S: Final = 0.05
"""A changed file is read once it has not changed for this time: editors write in steps."""
SETTLE_LOOKS: Final = 20
"""A file that changes without end is not waited for any longer."""

_NOT_OURS: Final = frozenset(("__pycache__", "node_modules", "site-packages"))
"""Directories whose files are not the project's; nor are those of hidden directories and virtual environments."""

Stamps = Mapping[Path, tuple[int, int]]
"""By file, when it was changed and its size; MISSING for one that is not there."""
MISSING: Final = (0, 0)


def stamps(files: Iterable[Path]) -> Stamps:
    """The state of files, to be compared with an earlier one."""
    found: dict[Path, tuple[int, int]] = {}
    for file in files:
        try:
            status = file.stat()
        except OSError:
            found[file] = MISSING
        else:
            found[file] = (status.st_mtime_ns, status.st_size)
    return found


def difference(before: Stamps, after: Stamps) -> set[Path]:
    """The files that were changed, added or removed."""
    return {file for file in before.keys() | after.keys() if before.get(file) != after.get(file)}


def named(files: Iterable[Path]) -> str:
    """Files by their names, in words; of many the first three."""
    names = sorted({file.name for file in files})
    return f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''}"


async def saved(look: Callable[[], Stamps], seen: Stamps) -> Stamps:
    """Return what `look` sees once that differs from `seen` and has not changed for a moment."""
    began = time.monotonic()
    while (now := look()) == seen:
        await asyncio.sleep(max(LOOK_S, LOOKS_SHARE * (time.monotonic() - began)))
        began = time.monotonic()
    for _ in range(SETTLE_LOOKS):
        await asyncio.sleep(SETTLE_S)
        before, now = now, look()
        if now == before:
            break
    return now


def files_below(root: Path, leave_out: Callable[[Path], bool] = lambda _: False) -> Iterator[Path]:
    """Every file of a project's directory that is not hidden; of directories that `leave_out` names, none."""
    for folder, inner, files in os.walk(root):
        inner[:] = [each for each in inner if _is_in(Path(folder, each)) and not leave_out(Path(folder, each))]
        yield from (Path(folder, each) for each in files if not each.startswith("."))


def is_part(folder: str) -> bool:
    """Whether a directory of this name has files of the project."""
    return not folder.startswith(".") and folder not in _NOT_OURS


def _is_in(folder: Path) -> bool:
    return is_part(folder.name) and not (folder / "pyvenv.cfg").exists()
