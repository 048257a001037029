"""The rooms of services/runtime/pierhead: which may import which. Late imports count as any other."""

from __future__ import annotations

import ast

import pytest

from tests.harness.imports import ROOT, circle, graph_of, imported, modules_of, within

FOLDER = ROOT / "services" / "runtime" / "pierhead"
ON_TOP = ("pierhead.llm", "pierhead.rayserve.llm")
"""Annexes: they stand on the runtime as users' services do. The first has rooms of its own (test_rooms_of_llm.py); the
second has Ray Serve's names for it, and alone imports it.
"""
ALL = {name: path for name, path in modules_of(FOLDER, "pierhead").items() if path.parent.name != "v1"}
MODULES = {name: path for name, path in ALL.items() if not within({name}, *ON_TOP)}
"""The package's modules by name, without the generated stubs."""
IMPORTS = graph_of(MODULES)

FLOORS = (
    {"testing"},
    {"dev"},
    {"rayserve"},
    {"runner"},
    {"replica", "triton"},
    {"classes"},
    {"calls"},
    {"http", "lanes"},
    {"edge"},
    {"batching", "multiplex", "policies", "tracing"},
    {"discovery"},
    {"memory", "store"},
)
"""From the top: a room imports itself, rooms of lower floors and the root's ground floor."""

FOR_USERS = {
    "pierhead",
    "pierhead.__main__",
    "pierhead.local_service",
    "pierhead.llm_app",
    "pierhead.llm_config",
    "pierhead.shared_store",
    "pierhead.tensors",
}
"""The root's top floor: it imports every room, and no room imports it."""

FOR_EVERY_ROOM = {
    "pierhead.admin_token",
    "pierhead.compose_names",
    "pierhead.deadlines",
    "pierhead.dotenv",
    "pierhead.environment",
    "pierhead.errors",
    "pierhead.files",
    "pierhead.held",
    "pierhead.interrupt",
    "pierhead.json_data",
    "pierhead.metrics",
    "pierhead.pipes",
    "pierhead.raised",
    "pierhead.request",
    "pierhead.routing_stats",
    "pierhead.serve_block",
    "pierhead.settings",
    "pierhead.tasks",
    "pierhead.trace",
    "pierhead.tracebacks",
    "pierhead.trailers",
}
"""The root's ground floor: its modules import only each other."""


def room_of(module: str) -> str:
    """The room's name; "" for modules of the root."""
    first = module.split(".")[1:2]
    return first[0] if first and (FOLDER / first[0]).is_dir() else ""


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


def test_nothing_below_imports_what_stands_on_top() -> None:
    llm, names = ON_TOP
    assert {module for module in MODULES if within(imported(module, MODULES[module]), llm, names)} == set()
    assert {module for module in ALL if within({module}, llm) and within(imported(module, ALL[module]), names)} == set()


def test_imports_are_absolute_and_form_no_circle() -> None:
    assert circle(IMPORTS) == []
    for module, path in MODULES.items():
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert not any(node.level for node in imports), module
