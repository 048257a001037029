"""The runtime used with its wheel alone: the project of the site's page, in an empty place."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.tool.project.version import release_of
from tests.harness.ports import own_address
from tests.harness.stack import ROOT
from tests.harness.waiting import eventually
from tests.harness.wheel import build_wheel, environment, uv

PAGE = ROOT / "docs" / "how-to" / "own-repository.md"
TENSORS = PAGE.with_name("large-tensors.md")

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def shown(language: str, page: Path = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel"))


def lowest() -> list[str]:
    """The lower bounds of what the stubs need, and the generator of that age."""
    declared = tomllib.loads((ROOT / "services" / "runtime" / "pyproject.toml").read_text())
    bounds = [text.split(",")[0].replace(">=", "==") for text in declared["project"]["dependencies"]]
    [generator] = [text for text in declared["build-system"]["requires"] if text.startswith("grpcio-tools")]
    return [generator, *(text for text in bounds if text.startswith(("grpcio", "protobuf")))]


@pytest.fixture(params=["lowest", "highest"])
def project(wheel: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The directory that the page describes, with an environment of its own: protobuf 6, and protobuf 7."""
    service, caller = shown("python")
    [proto] = shown("proto")
    for name, text in (("greeter.proto", proto), ("service.py", service), ("caller.py", caller)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    versions = lowest() if request.param == "lowest" else ["grpcio-tools", "protobuf>=7"]
    environment(tmp_path / "venv", wheel, *versions)
    run(tmp_path, "-m", "grpc_tools.protoc", "-I.", "--python_out=.", "--grpc_python_out=.", "greeter.proto")
    return tmp_path


def variables(**settings: str) -> dict[str, str]:
    """Nothing of this test's: no PYTHONPATH, no settings of a replica."""
    return {"PATH": os.environ["PATH"], **{f"PIERHEAD_{name}": value for name, value in settings.items()}}


def run(project: Path, *arguments: str, **settings: str) -> str:
    """Run the project's Python; returns what it prints."""
    done = subprocess.run(
        ["venv/bin/python", *arguments], cwd=project, env=variables(**settings), capture_output=True, text=True,
        timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def service(project: Path) -> Iterator[str]:
    """The project's service, running; its address."""
    host, log = own_address(), project / "service.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["venv/bin/python", "service.py"], cwd=project, env=variables(HOST=host), stderr=output
        )
    try:
        eventually(lambda: '"ready"' in log.read_text(), f"the service is ready; see {log}", within_s=120)
        yield f"{host}:50051"
    finally:
        process.terminate()
        status = process.wait(timeout=120)
    assert status == 0, log.read_text()


BY_LANE = """
from pierhead.calls.clients import Clients
connections = [replica.connection for replica in Clients.current().pool("greeter", "lane").replicas()]
print([type(connection).__name__ for connection in connections], all(c._lane.outbox.sent for c in connections))
"""


def test_a_service_and_its_caller(project: Path, service: str) -> None:
    assert run(project, "caller.py", STATIC_GREETER=service) == "Hello, Ada\n"
    where = run(project, "-c", "import pierhead; print(pierhead.__file__)").strip()
    assert Path(where).is_relative_to(project / "venv"), "the runtime is the wheel's"


ASK = """
import asyncio, numpy
from detector_pb2 import DetectRequest
from detector_pb2_grpc import DetectorStub
from pierhead import close_handles, handle, tensors

async def main():
    reply = await handle(DetectorStub, "greeter").Detect(DetectRequest(image=tensors.from_numpy(numpy.arange(9))))
    print(tensors.to_numpy(reply.boxes).sum())
    await close_handles()

asyncio.run(main())
"""


@pytest.fixture
def detector(project: Path) -> None:
    """The page on large tensors makes the project's service a detector."""
    [proto], [command], [source, _] = (shown(language, TENSORS) for language in ("proto", "bash", "python"))
    (project / "detector.proto").write_text(proto, encoding="utf-8")
    (project / "service.py").write_text(source, encoding="utf-8")
    uv("pip", "install", "--python", project / "venv/bin/python", "numpy")
    path = {"PATH": f"{project}/venv/bin:{os.environ['PATH']}"}
    subprocess.run(["bash", "-euc", command], cwd=project, env=path, check=True, timeout=180)


@pytest.mark.usefixtures("detector")
def test_a_contract_of_tensors(project: Path, service: str) -> None:
    assert run(project, "-c", ASK, STATIC_GREETER=service) == f"{9 * 255 - 36}\n"


def test_they_speak_by_lane(project: Path, service: str) -> None:
    caller = (project / "caller.py").read_text()
    by_lane = BY_LANE.replace("\n", "\n    ")
    asked = caller.replace("    await close_handles()", f"    {by_lane.strip()}\n    await close_handles()")
    assert run(project, "-c", asked, STATIC_GREETER=service).splitlines()[1] == "['LaneConnection'] True"


def test_the_wheel_holds_the_runtime_the_controller_and_the_stacks_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        listed = {each.filename: each.external_attr >> 16 & 0o777 for each in archive.infolist()}
    assert {name.split("/")[0] for name in listed} == {
        *("pierhead", "pierhead_stack", f"pierhead-{release_of(ROOT)}.dist-info")
    }, "no generic name lands in site-packages"
    assert {"pierhead/py.typed", "pierhead/lane/v1/lane_pb2.py", "pierhead/lane/v1/lane.proto"} <= set(listed)
    assert {"pierhead_stack/controller/tool/place.py", "pierhead_stack/controller/Dockerfile"} <= set(listed)
    assert {"pierhead_stack/compose/compose.yaml", "pierhead_stack/haproxy/haproxy.cfg.j2"} <= set(listed)
    assert listed["pierhead_stack/compose/machine/engine.sh"] == 0o755
    assert not [name for name in listed if "__pycache__" in name]


TOOLS_FILES = """
from pathlib import Path
import pierhead_stack
from controller.tool.project import stack_files
stack_files.write(Path("."))
print(stack_files.build(), stack_files.version(), stack_files.release())
"""


def test_the_installed_tool_writes_what_the_clone_would(project: Path) -> None:
    build, version, release = run(project, "-c", TOOLS_FILES).split()
    assert version == release, "the wheel of an archive without git"
    written = project / ".pierhead"
    assert (written / "build").read_text() == f"{build}\n"
    ours = {path.relative_to(ROOT / "controller") for path in (ROOT / "controller").rglob("*.py")}
    assert {path.relative_to(written / "controller") for path in (written / "controller").rglob("*.py")} == ours
    for proto in (ROOT / "proto").rglob("*.proto"):
        assert (written / proto.relative_to(ROOT)).read_bytes() == proto.read_bytes()
    assert f"PIERHEAD_TAG={release}" in (written / "compose" / ".env").read_text()
    said = subprocess.run(
        [project / "venv/bin/pierhead", "--help"], env=variables(), cwd="/", capture_output=True, text=True, check=True
    )
    assert "Start the project of this directory" in said.stdout
