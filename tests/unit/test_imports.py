"""Imports of the controller run one way, from room to room, and the data plane does not know the controller."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pierhead
import pytest

from tests.harness.imports import ROOT, circle, graph_of, imported, modules_of, within

CONTROLLER = modules_of(ROOT / "controller", "controller")
SERVICES = modules_of(ROOT / "services", "services")
GRAPH = graph_of(CONTROLLER)
RUNTIME = modules_of(ROOT / "services" / "runtime" / "pierhead", "pierhead")

GROUND_FLOOR = {"api_tokens", "build", "docker_http", "errors", "settings", "outlive"}
"""Modules of the root that every room may import. They import nothing of ours but each other."""
TOP_FLOOR = {"__main__"}
"""The daemon's start. No room imports it."""
ROOMS = {
    "model": set[str](),
    "storage": {"model"},
    "engines": {"model"},
    "routing": {"model"},
    "files": {"model"},
    "observe": {"model", "storage", "engines", "routing"},
    "desired": {"model", "storage"},
    "plan": {"model"},
    "status": {"model", "storage", "engines", "routing", "files", "observe", "desired", "plan", "status.records"},
    "status.records": {"model"},
    "daemon": {
        *("model", "storage", "engines", "routing", "files", "observe", "desired", "plan", "status", "status.records"),
    },
    "tool": {"model", "files", "plan", "status.records", "tool.project"},
    "tool.project": {"files"},
    "swarm": {"swarm.engine", "swarm.edges", "swarm.state", "swarm.files", "plan"},
    "swarm.engine": {"model", "engines"},
    "swarm.edges": {"model", "routing"},
    "swarm.state": {"model", "storage"},
    "swarm.files": {"model", "files", "swarm.state"},
    "swarm.nodes": {"tool.project"},
    "swarm.up": {"model", "files", "swarm.files", "swarm.nodes", "swarm.state"},
    "swarm.tool": {"tool", "tool.project", "swarm.nodes", "swarm.up"},
}
"""Each room -> the rooms that it may import. `model` imports nothing, not even the ground floor."""
ANNEX = "controller.swarm"
ANNEX_GROUND = {"swarm.names", "swarm.certificates"}
"""Modules that every room of the annex may import."""
ANNEX_TOP = {"swarm.boundaries", "swarm.node_commands"}
"""Modules of the annex that know the top floor: they are what the daemon is given."""
COMPOSITION = {"controller.__main__", "controller.tool.commands.offline"}
"""Modules that choose between one machine and the annex: the daemon, and what reads the files of either."""
PURE_ROOMS = ("model", "plan")
PURE_MODULES = (
    "controller.desired.answers",
    "controller.desired.autoscale",
    "controller.desired.contracts",
    "controller.desired.targets",
    "controller.desired.edge",
    "controller.desired.loads",
    "controller.desired.revisions",
    "controller.desired.rollout",
    "controller.observe.gpu_faults",
    "controller.swarm.edges.offer",
    "controller.swarm.edges.shares",
    "controller.swarm.edges.states",
    "controller.routing.haproxy_text",
    "controller.swarm.nodes.engine_settings",
    "controller.swarm.up.preflight",
    "controller.status.reasons",
    "controller.status.services",
    "controller.status.transitions",
    "controller.status.view",
)
IO_LIBRARIES = {"aiohttp", "asyncio", "docker", "grpc", "logging", "random", "socket", "sqlite3", "subprocess", "time"}


def room_of(module: str) -> str:
    """ "root" for modules of the root; the longest room name that the module is in."""
    inner = module.removeprefix("controller").lstrip(".")
    rooms = [room for room in ROOMS if inner == room or inner.startswith(f"{room}.")]
    return max(rooms, key=len, default="root")


def floor_of(module: str) -> str:
    return module.removeprefix("controller").lstrip(".")


def test_every_module_of_the_root_is_on_a_floor() -> None:
    root = {floor_of(module) for module in CONTROLLER if room_of(module) == "root"} - {""}
    assert root - GROUND_FLOOR - TOP_FLOOR == set()


@pytest.mark.parametrize("module", sorted(CONTROLLER))
def test_rooms_import_only_what_they_may(module: str) -> None:
    room = room_of(module)
    if floor_of(module) in TOP_FLOOR | ANNEX_TOP:
        return
    allowed = {room, *ROOMS.get(room, set())} - {"root"}
    ground = set() if room == "model" else GROUND_FLOOR
    ground = ground | ANNEX_GROUND if room.startswith("swarm") else ground
    wrong = {other for other in GRAPH[module] if floor_of(other) not in ground and room_of(other) not in allowed}
    assert wrong - COMPOSED.get(module, set()) == set()


COMPOSED = {module: within(GRAPH[module], ANNEX) for module in COMPOSITION}


def test_the_core_does_not_import_the_annex() -> None:
    knows = {module for module in CONTROLLER if within(GRAPH[module], ANNEX) and not within({module}, ANNEX)}
    assert knows == COMPOSITION


NAMES_IT = {
    *COMPOSITION,
    *("controller.settings", "controller.daemon.boundaries", "controller.engines.base", "controller.storage.rows"),
    *("controller.files.dialect", "controller.tool.project.engines", "controller.tool.project.carried"),
}
"""Where the core may name Swarm: what composes, the settings, the files of the seams."""


def test_the_core_does_not_name_the_annex() -> None:
    core = {module: path for module, path in CONTROLLER.items() if not within({module}, ANNEX)}
    assert {module for module, path in core.items() if "swarm" in path.read_text().lower()} <= NAMES_IT


def test_the_controller_has_no_circle() -> None:
    assert circle(GRAPH) == []


@pytest.mark.parametrize("module", [name for name in CONTROLLER if room_of(name) in PURE_ROOMS or name in PURE_MODULES])
def test_decisions_do_no_io(module: str) -> None:
    assert within(imported(module, CONTROLLER[module]), *IO_LIBRARIES) == set()


def test_only_two_modules_know_the_real_boundaries() -> None:
    knows = {"controller.daemon.boundaries", "controller.daemon.one_machine"}
    for module, path in CONTROLLER.items():
        if room_of(module) in {"engines", "routing"} or module in knows or within({module}, ANNEX):
            continue
        real = within(imported(module, path), "controller.engines", "controller.routing")
        known = within(real, "controller.engines.base", "controller.routing.base")
        assert real - known <= {"controller.engines", "controller.routing"}, module


OF_A_USER = ("controller.tool", "controller.swarm.nodes", "controller.swarm.tool")
DAEMON = {module: path for module, path in CONTROLLER.items() if not within({module}, *OF_A_USER)}


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [(DAEMON, ("controller.tool", "typer", "rich")), (SERVICES, ("controller",)), (RUNTIME, ("services",))],
    ids=["the daemon: no command", "services: no controller", "the runtime: no service"],
)
def test_what_a_part_never_imports(modules: dict[str, Path], forbidden: tuple[str, ...]) -> None:
    for module, path in modules.items():
        assert within(imported(module, path), *forbidden) == set(), module


def test_the_command_starts_without_the_rooms_of_the_daemon() -> None:
    program = (
        "import sys, controller.tool.app; print(*sorted(name for name in sys.modules if name.startswith('controller')))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name for name in done.stdout.split() if not name.startswith("controller.tool")} == {
        "controller",
        "controller.build",
        "controller.model",
        "controller.model.text",
    }


SIMULATED = {"errors", "model", "files", "plan", "desired", "storage"}


def test_the_simulator_runs_the_controllers_decisions_and_one_command_knows_it() -> None:
    simulator = modules_of(ROOT / "simulator", "simulator")
    used = {name for module, path in simulator.items() for name in imported(module, path) if name in CONTROLLER}
    assert {floor_of(name).partition(".")[0] for name in used} <= SIMULATED
    knows = {module for module, path in CONTROLLER.items() if within(imported(module, path), "simulator")}
    assert knows == {"controller.tool.commands.offline"}


def test_the_command_starts_without_the_packages_of_a_replica() -> None:
    program = "import sys, controller.tool.app, controller.tool.place; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"grpc", "aiohttp", "google.protobuf", "prometheus_client"} & set(done.stdout.split()) == set()


def test_a_public_name_is_of_no_module_that_is_imported_later() -> None:
    modules = {name for name in pierhead.__all__ if isinstance(getattr(pierhead, name), ModuleType)}
    assert {name for name in pierhead.__all__ if f"pierhead.{name}" in RUNTIME} == modules - {"http_errors"}


def test_imports_inside_the_controller_are_relative() -> None:
    for module, path in CONTROLLER.items():
        assert "from controller" not in path.read_text(), module
