"""Imports run one way: CONTRIBUTING.md, "Layout and imports"."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = "services/runtime/pierhead/*/v1/*"

OUTSIDE_THE_CORE = {
    "aiohttp",
    "asyncio",
    "docker",
    "grpc",
    "logging",
    "os",
    "random",
    "socket",
    "sqlite3",
    "subprocess",
}
"""Nothing that reads or changes the world, or remembers that it did."""


def module_of(path: Path) -> str:
    """The name under which a file is imported."""
    relative = path.relative_to(ROOT).with_suffix("")
    parts = relative.parts[2:] if relative.parts[:2] == ("services", "runtime") else relative.parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(path: Path) -> set[str]:
    """The modules a file names, imports inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found - {"controller"}  # `from controller import plan` names controller.plan too


GRAPH = {
    module_of(path): imports_of(path)
    for folder in ("controller", "services", "dashboards")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.match(GENERATED)
}


def inside(module: str, *packages: str) -> bool:
    """Whether a module is one of these, or in one of them."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def within(*packages: str) -> list[str]:
    return [module for module in GRAPH if inside(module, *packages)]


def reachable(module: str) -> set[str]:
    """All modules of the controller that importing this one brings along, itself included."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if current in GRAPH and current not in found:
            found.add(current)
            waiting += [name for name in GRAPH[current] if inside(name, "controller")]
    return found


@pytest.mark.parametrize("module", within("services", "pierhead"))
def test_services_know_nothing_of_the_controller(module: str) -> None:
    assert [name for name in GRAPH[module] if inside(name, "controller", "dashboards", "tests")] == []


@pytest.mark.parametrize("module", within("pierhead"))
def test_the_runtime_knows_no_service(module: str) -> None:
    assert [name for name in GRAPH[module] if inside(name, "services")] == []


@pytest.mark.parametrize("module", within("controller"))
def test_the_controller_knows_of_services_what_the_protos_say(module: str) -> None:
    foreign = [name for name in GRAPH[module] if inside(name, "services", "pierhead", "tests", "dashboards")]
    assert [name for name in foreign if not inside(name, "pierhead.discovery")] == []


@pytest.mark.parametrize("package", ["controller.engines", "controller.routing"])
def test_what_is_outside_is_reached_through_the_model(package: str) -> None:
    allowed = (package, "controller.model", "controller.errors")
    for module in within(package):
        assert [name for name in GRAPH[module] if inside(name, "controller") and not inside(name, *allowed)] == []


@pytest.mark.parametrize("module", ["controller.spec", "controller.scale", "controller.plan", "controller.plan_text"])
def test_the_core_is_pure(module: str) -> None:
    for reached in reachable(module):
        assert {name.split(".")[0] for name in GRAPH[reached]} & OUTSIDE_THE_CORE == set(), reached
        assert not inside(reached, "controller.engines", "controller.routing", "controller.loop"), reached
