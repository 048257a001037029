"""The rooms of services/runtime/pierhead: which may import which. Late imports count as any other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "services" / "runtime" / "pierhead"

FLOORS = (
    {"replica"},
    {"calls"},
    {"http", "lanes"},
    {"edge"},
    {"batching", "multiplex", "policies"},
)
"""From the top: a room imports itself, rooms of lower floors and the root's ground floor."""

FOR_USERS = {"pierhead", "pierhead.handle", "pierhead.local", "pierhead.llm_app", "pierhead.llm_config"}
"""The root's top floor: it imports every room, and no room imports it."""

FOR_EVERY_ROOM = {
    "pierhead.deadlines",
    "pierhead.environment",
    "pierhead.errors",
    "pierhead.held",
    "pierhead.json_data",
    "pierhead.metrics",
    "pierhead.request",
    "pierhead.routing_stats",
    "pierhead.settings",
    "pierhead.tensors",
    "pierhead.trailers",
}
"""The root's ground floor: its modules import only each other."""


def modules() -> dict[str, Path]:
    """The package's modules by name, without the generated stubs."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name != "v1":
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(module: str) -> set[str]:
    """Modules of the package that a module imports anywhere in its code, but for `if TYPE_CHECKING:`."""
    names: set[str] = set()
    for node in executed(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports within the runtime are absolute"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else str(node.module) for name in full}
    return names & MODULES.keys() - {module}


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from executed(node)


IMPORTS = {module: imported(module) for module in MODULES}


def room_of(module: str) -> str:
    """The room's name; "" for modules of the root."""
    parts = module.split(".")
    if len(parts) == 1 or not (PACKAGE / parts[1]).is_dir():
        return ""
    return parts[1]


def floor_of(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def test_every_module_has_its_place() -> None:
    rooms = {room_of(module) for module in MODULES} - {""}
    assert rooms == set().union(*FLOORS)
    assert {module for module in MODULES if not room_of(module)} == FOR_USERS | FOR_EVERY_ROOM


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module)])
def test_a_room_imports_only_what_is_below_it(module: str) -> None:
    room = room_of(module)
    below = set().union(*FLOORS[floor_of(room) + 1 :])
    wrong = {
        each for each in IMPORTS[module] - FOR_EVERY_ROOM if each in FOR_USERS or room_of(each) not in {room} | below
    }
    assert wrong == set()


@pytest.mark.parametrize("module", sorted(FOR_EVERY_ROOM))
def test_the_ground_floor_imports_no_room(module: str) -> None:
    assert IMPORTS[module] <= FOR_EVERY_ROOM


def test_no_modules_import_each_other_in_a_circle() -> None:
    left = {module: set(names) for module, names in IMPORTS.items()}
    while done := {module for module, names in left.items() if not names & left.keys()}:
        left = {module: names for module, names in left.items() if module not in done}
    assert left == {}, "each of these imports another one of them"


def test_a_name_of_a_class_means_one_thing() -> None:
    defined: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in defined.items() if len(modules) > 1} == {}
