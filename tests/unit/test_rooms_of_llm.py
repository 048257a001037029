"""The rooms of pierhead.llm: which may import which. Late imports count as any other."""

from __future__ import annotations

import pytest

from tests.harness.imports import ROOT, circle, graph_of, imported, modules_of, within

MODULES = modules_of(ROOT / "services" / "runtime" / "pierhead" / "llm", "pierhead.llm")
GRAPH = graph_of(MODULES, types=True)

FLOORS = {
    "gateway": (
        {"__main__"},
        {"app"},
        {"exchange"},
        {"gateway"},
        {"meter", "settings"},
        {"body", "charges", "keys", "models"},
        {"endpoints", "errors", "metrics"},
    ),
    "server": (
        {"__main__"},
        {"service"},
        {"llm_server"},
        {"engines.openai", "engines.vllm", "registry", "settings"},
        {"models"},
        {"background", "bodies", "direct", "events", "exposition", "watchdog"},
        {"engine"},
        {"errors"},
    ),
    "mock": ({"engine"}, {"answer", "schedule"}, {"cache", "text"}, {"arguments"}),
}
"""From the top: folders and modules, each of which may import itself and what stands on lower floors."""

SHARED = {"pierhead.llm.objects", "pierhead.llm.openai_error"}
"""What gateway and server both import; it imports nothing of them."""

SEAM = {f"pierhead.llm.server.{module}" for module in ("bodies", "engine", "errors")}
"""What engines elsewhere import of the server, as those of users do."""

PRIVATE = {
    "gateway": ("pierhead.calls", "pierhead.edge", "pierhead.http", "pierhead.lanes", "pierhead.replica"),
    "server": ("pierhead.calls", "pierhead.edge", "pierhead.http", "pierhead.lanes"),
    "mock": ("pierhead.calls", "pierhead.edge", "pierhead.http", "pierhead.lanes", "pierhead.replica"),
}
"""Rooms of the runtime that are its own."""


def place_of(module: str) -> tuple[str, str]:
    """gateway, server or mock, and the folder or module of FLOORS."""
    part, *rest = module.removeprefix("pierhead.llm.").split(".")
    if rest[0] == "engines":
        return part, ".".join(rest[:2])
    return part, rest[0]


def floor_of(part: str, place: str) -> int:
    (floor,) = [number for number, places in enumerate(FLOORS[part]) if place in places]
    return floor


OURS = sorted(module for module in MODULES if module not in SHARED)


@pytest.mark.parametrize("module", OURS)
def test_a_room_imports_itself_and_lower_floors(module: str) -> None:
    part, place = place_of(module)
    for name in GRAPH[module] - SHARED - (SEAM if part == "mock" else set()):
        other, target = place_of(name)
        assert other == part, f"{module} imports {name}: gateway and server share {sorted(SHARED)} alone"
        assert target == place or floor_of(part, target) > floor_of(part, place), f"{module} imports {name}"


@pytest.mark.parametrize("module", OURS)
def test_what_the_runtime_has_for_itself_is_not_imported(module: str) -> None:
    part, _ = place_of(module)
    assert within(imported(module, MODULES[module], types=True), *PRIVATE[part]) == set()


def test_no_circles() -> None:
    assert circle(GRAPH) == []


def test_what_both_share_imports_nothing_of_ours() -> None:
    assert {name for module in SHARED for name in GRAPH[module]} <= SHARED


def test_every_floor_is_there() -> None:
    places = {place_of(module) for module in OURS}
    assert places == {(part, place) for part, floors in FLOORS.items() for floor in floors for place in floor}
