"""Imports run one way: nouns <- pure decisions <- what acts <- what constructs. The data plane knows no controller."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

NOUNS = {"controller.model", "controller.errors"}
PURE = {
    "controller.answers",
    "controller.autoscale",
    "controller.callees",
    "controller.differences",
    "controller.loads",
    "controller.log_lines",
    "controller.recovery",
    "controller.revisions",
    "controller.rollout",
    "controller.rollout_words",
    "controller.scale",
    "controller.event_kinds",
    "controller.gpu_faults",
    "controller.shares",
    "controller.swaps",
    "controller.phases",
    "controller.placement",
    "controller.plain_text",
    "controller.plan",
    "controller.planning",
    "controller.plan_text",
    "controller.user_config",
}
ACTING = {
    "controller.apply",
    "controller.deployer",
    "controller.engine_watch",
    "controller.perform",
    "controller.observe",
    "controller.probe",
    "controller.scaler",
    "controller.store",
    "controller.events",
    "controller.loop",
    "controller.api",
    "controller.discovery",
    "controller.metrics",
    "controller.down",
    "controller.spec_watch",
}
READERS = {
    "controller.cli.commands.offline": (
        "controller.compose",
        "controller.errors",
        "controller.serve_schema",
        "controller.simulate",
    ),
    "controller.cli.commands.llm": ("controller.errors", "controller.spec"),
}
"""What commands without a running stack do: they read files as the daemon does, with its own code."""
IO_LIBRARIES = {"aiohttp", "asyncio", "docker", "grpc", "logging", "random", "socket", "sqlite3", "subprocess", "time"}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(folder: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield module_of(path), path


def imported(path: Path) -> set[str]:
    """Full names of everything a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(names: set[str], *packages: str) -> set[str]:
    return {name for name in names for package in packages if name == package or name.startswith(f"{package}.")}


CONTROLLER = dict(sources("controller"))


@pytest.mark.parametrize("module", sorted(NOUNS))
def test_nouns_import_nothing_of_ours_but_nouns(module: str) -> None:
    ours = within(imported(CONTROLLER[module]), "controller", "services", "pierhead")
    assert ours - within(ours, *NOUNS, "controller.plan_text") == set()


@pytest.mark.parametrize("module", sorted(within(set(CONTROLLER), *PURE)))
def test_decisions_are_pure(module: str) -> None:
    names = imported(CONTROLLER[module])
    assert within(names, "controller") - within(names, *NOUNS, *PURE) == set()
    assert within(names, *IO_LIBRARIES) == set()


@pytest.mark.parametrize("module", [name for name in CONTROLLER if name.startswith("controller.engines")])
def test_engines_know_the_nouns_and_each_other(module: str) -> None:
    names = imported(CONTROLLER[module])
    assert within(names, "controller") - within(names, *NOUNS, "controller.engines") == set()


@pytest.mark.parametrize("module", [name for name in CONTROLLER if name.startswith("controller.routing")])
def test_routers_know_the_nouns_and_each_other(module: str) -> None:
    names = imported(CONTROLLER[module])
    assert within(names, "controller") - within(names, *NOUNS, "controller.routing") == set()


@pytest.mark.parametrize("module", [name for name in CONTROLLER if name not in {"controller.__main__"}])
def test_only_main_knows_the_real_boundaries(module: str) -> None:
    if module.startswith(("controller.engines", "controller.routing")):
        return
    real = within(imported(CONTROLLER[module]), "controller.engines", "controller.routing")
    assert real - within(real, "controller.engines.base", "controller.routing.base") <= {
        "controller.engines",
        "controller.routing",
    }


@pytest.mark.parametrize(
    "module", [name for name in CONTROLLER if name not in ACTING and name != "controller.__main__"]
)
def test_nothing_imports_the_loop_from_below(module: str) -> None:
    assert within(imported(CONTROLLER[module]), "controller.loop", "controller.api", "controller.__main__") == set()


def test_the_daemon_does_not_import_the_command() -> None:
    for module, path in CONTROLLER.items():
        if not module.startswith("controller.cli"):
            assert within(imported(path), "controller.cli", "typer", "rich") == set(), module


def test_the_command_does_not_import_the_daemon() -> None:
    for module, path in CONTROLLER.items():
        if module.startswith("controller.cli"):
            names = imported(path)
            allowed = within(names, "controller.cli", *READERS.get(module, ()))
            assert within(names, "controller") - allowed == set(), module


def test_only_the_commands_that_need_readers_pay_for_them() -> None:
    program = (
        "import sys, controller.cli.app; print(*sorted(name for name in sys.modules if name.startswith('controller')))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name for name in done.stdout.split() if not name.startswith("controller.cli")} == {"controller"}


@pytest.mark.parametrize("folder", ["services"])
def test_services_never_import_the_controller(folder: str) -> None:
    for module, path in sources(folder):
        assert within(imported(path), "controller") == set(), module


def test_the_runtime_imports_no_service() -> None:
    for module, path in sources("services/runtime"):
        assert within(imported(path), "services") == set(), module
