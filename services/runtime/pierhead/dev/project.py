"""The Python files of a project: the modules that came from them, and how these are imported anew."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Final

_NOT_OURS: Final = frozenset(("__pycache__", "node_modules", "site-packages"))
"""Directories whose files are not the project's; nor are those of hidden directories and virtual environments."""

_RUNTIME: Final = Path(__file__).parents[1]

Stamps = Mapping[Path, tuple[int, int]]
"""By file, when it was changed and its size; (0, 0) for one that is missing."""


class Project:
    """The files below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._inside = f"{root}{os.sep}"

    def modules(self) -> dict[str, ModuleType]:
        """The imported modules of the project, by name."""
        return {
            name: module
            for name, module in list(sys.modules.items())
            if name != "__main__" and self._is_ours(getattr(module, "__file__", None))
        }

    def imported_files(self) -> set[Path]:
        """The files of these modules."""
        return {Path(str(module.__file__)) for module in self.modules().values()}

    def all_files(self) -> Iterator[Path]:
        """Every Python file of the project, imported or not."""
        for folder, inner, files in os.walk(self.root):
            inner[:] = [each for each in inner if _is_part(each) and not Path(folder, each, "pyvenv.cfg").exists()]
            yield from (Path(folder, each) for each in files if each.endswith(".py"))

    def forget(self) -> dict[str, ModuleType]:
        """Have the next import read the project's files again. Returns the modules, for `put_back`."""
        forgotten = self.modules()
        for name, module in forgotten.items():
            del sys.modules[name]
            # A compiled file is compared by whole seconds and size, and two saves may have both in common.
            Path(importlib.util.cache_from_source(str(module.__file__))).unlink(missing_ok=True)
        importlib.invalidate_caches()
        return forgotten

    def put_back(self, forgotten: Mapping[str, ModuleType]) -> None:
        """Undo `forget`, and all imports of the project since then."""
        for name in self.modules():
            del sys.modules[name]
        sys.modules.update(forgotten)

    def _is_ours(self, file: object) -> bool:
        if not isinstance(file, str) or not file.startswith(self._inside) or not file.endswith(".py"):
            return False  # nearly all modules, and this is asked for each of them at every look
        path = Path(file)
        if path.is_relative_to(_RUNTIME) or path.is_relative_to(sys.prefix):
            return False
        return all(map(_is_part, path.relative_to(self.root).parts[:-1]))


def stamps(files: Iterable[Path]) -> Stamps:
    """The state of files, to be compared with an earlier one."""
    found: dict[Path, tuple[int, int]] = {}
    for file in files:
        try:
            status = file.stat()
        except OSError:
            found[file] = (0, 0)
        else:
            found[file] = (status.st_mtime_ns, status.st_size)
    return found


def user_traceback(error: BaseException) -> str:
    """An exception with its traceback, from the first frame that is neither the runtime's nor the import system's."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and _is_machinery(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    if frame is None and not isinstance(error, SyntaxError):
        frame = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()


def where(error: BaseException) -> str:
    """An exception in a line, with the user's innermost frame."""
    said = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1]
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{said} ({Path(error.filename).name}:{error.lineno})"
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not _is_machinery(each.filename)]
    return f"{said} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else said


def _is_machinery(file: str) -> bool:
    return file.startswith("<frozen ") or Path(file).is_relative_to(_RUNTIME) or file.startswith(_STANDARD)


_STANDARD = tuple({str(Path(module.__file__ or "").parent) + os.sep for module in (importlib, traceback)})


def _is_part(folder: str) -> bool:
    return not folder.startswith(".") and folder not in _NOT_OURS
