"""Reads the imports of a package from its source: which module imports which, and where imports form a circle.

Imports inside functions count. Imports under `if TYPE_CHECKING:`, which nothing runs, count only with `types`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def modules_of(folder: Path, package: str) -> dict[str, Path]:
    """Every hand-written module below `folder`, by its full name; a package's `__init__` has the package's name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        if "_pb2" in path.name:
            continue
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path, *, types: bool = False) -> set[str]:
    """Full names of everything that the module imports: modules, and what it takes from them as module.name."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    names: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if types else _run_nodes(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def _run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for other in node.orelse:
            yield from _run_nodes(other)
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _run_nodes(child)


def graph_of(modules: Mapping[str, Path], *, types: bool = False) -> dict[str, set[str]]:
    """Each module -> the modules of the same mapping that it imports. A name from a package counts as its module."""
    found = {}
    for name, path in modules.items():
        names = imported(name, path, types=types)
        submodules = {one for one in names if one in modules}
        parents = {one.rpartition(".")[0] for one in submodules if "." in one}
        # `from package import module` names both; the package's own file is imported only if a name of it is taken.
        taken = {one.rpartition(".")[0] for one in names if one not in modules}
        found[name] = (submodules - (parents - taken)) - {name}
    return found


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other, in the order in which they do; empty where no module does."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def within(names: set[str], *packages: str) -> set[str]:
    """Those of the names that are one of the packages or below it."""
    return {name for name in names for package in packages if name == package or name.startswith(f"{package}.")}
