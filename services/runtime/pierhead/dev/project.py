"""The Python files of a project: the modules that came from them, and how these are imported again."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

from pierhead.dev.saves import files_below, is_part

_RUNTIME: Final = Path(__file__).parents[1]


class FolderFiles:
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
        return (file for file in files_below(self.root) if file.suffix == ".py")

    def forget(self) -> dict[str, ModuleType]:
        """Make the next import read the project's files again. Returns the modules, for `put_back`."""
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
        return all(map(is_part, path.relative_to(self.root).parts[:-1]))
