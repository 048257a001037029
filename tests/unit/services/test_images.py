"""What holds for every service's Dockerfile."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

SERVICES = Path(__file__).parents[3] / "services"
BASE_OF_USERS = SERVICES.parent / "compose" / "python" / "Dockerfile"
DOCKERFILES = sorted(SERVICES.glob("**/Dockerfile"))
ON_THE_BASE = [path for path in DOCKERFILES if "\nFROM pierhead/python:" in path.read_text()]
NAMES = [str(path.parent.relative_to(SERVICES)) for path in DOCKERFILES]


def shared_stages(dockerfile: Path) -> str:
    """Everything from the first instruction to the mark; comments above it are the file's own."""
    text = dockerfile.read_text()
    return text[text.index("ARG PYTHON_BASE") : text.index("# own marks:")]


def test_there_are_images() -> None:
    assert NAMES == ["echo", "echo_proto", "llm/gateway", "llm/server", "recsys", "recsys/triton"]
    assert len(ON_THE_BASE) == 3


def test_the_first_stages_are_the_same_so_that_they_are_built_once() -> None:
    first, *others = [shared_stages(path) for path in {*DOCKERFILES, BASE_OF_USERS}.difference(ON_THE_BASE)]
    assert all(other == first for other in others)


@pytest.mark.parametrize("dockerfile", [*DOCKERFILES, BASE_OF_USERS], ids=[*NAMES, "python"])
def test_two_builds_install_the_same_packages(dockerfile: Path) -> None:
    text = re.sub(r"^#.*", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    installed = re.findall(r"(?:pip install|uv sync) [^&\n]*", text)
    assert installed or dockerfile in ON_THE_BASE
    for command in installed:
        is_locked = "--frozen" in command or "--no-deps" in command or "uv==" in command
        assert is_locked or "/locked.txt" in command, command


def test_a_replica_has_no_package_of_the_command() -> None:
    project = tomllib.loads((SERVICES / "runtime" / "pyproject.toml").read_text())["project"]
    assert {re.split("[<>=]", text)[0] for text in project["dependencies"]} == {
        *("aiohttp", "grpcio", "grpcio-health-checking", "grpcio-reflection", "prometheus-client", "protobuf")
    }
    for dockerfile in (*DOCKERFILES, BASE_OF_USERS):
        assert "uv sync" not in dockerfile.read_text(), "which installs the dependencies of the tool"


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=NAMES)
def test_the_service_is_the_first_process_and_not_root(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    last_stage = text.rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (.*)$", last_stage, re.MULTILINE)[-1:] in (["pierhead"], ["10001"])
    assert dockerfile in ON_THE_BASE or "\nSTOPSIGNAL SIGTERM\n" in last_stage
    first = json.loads(re.findall(r"^CMD (.*)$", text, re.MULTILINE)[-1])
    assert first[:2] == ["python", "-m"] or first[0] == "tritonserver", "exec form: signals reach it, not a shell"
    assert "ENTRYPOINT" not in text.replace("ENTRYPOINT []", "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=NAMES)
def test_what_a_service_imports_of_ours_is_in_its_image(dockerfile: Path) -> None:
    copied = re.findall(r"^COPY (.*) \S+$", dockerfile.read_text(), re.MULTILINE)
    copied = [
        path for paths in copied for path in paths.split() if path.startswith("services/") and "runtime" not in path
    ]
    modules = [path for copy in copied for path in sorted((SERVICES.parent / copy).rglob("*.py"))]
    modules += [SERVICES.parent / copy for copy in copied if copy.endswith(".py")]
    for module in modules:
        for name in re.findall(r"^\s*(?:from|import) (services\.\S+)", module.read_text(), re.MULTILINE):
            path = name.replace(".", "/") + ".py"
            assert any(path in (copy, f"{copy}.py") or path.startswith(f"{copy}/") for copy in copied), (module, name)
