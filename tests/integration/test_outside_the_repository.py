"""The runtime as somebody uses it who has nothing but its wheel: the project of the site's page, in an empty directory.

Wheels come from uv's cache where it holds them, so that no network is needed on a machine that has made .venv.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.ports import own_address
from tests.harness.stack import ROOT
from tests.harness.waiting import eventually

PAGE = ROOT / "docs" / "how-to" / "own-repository.md"
TENSORS = PAGE.with_name("large-tensors.md")
SOURCES = ("services/runtime", "proto", "README.md", "LICENSE", "pyproject.toml")
NO_NETWORK = re.compile(r"network|connect|resolve host|dns error|Failed to fetch|timed out", re.IGNORECASE)

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def shown(language: str, page: Path = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def uv(*arguments: str | Path) -> None:
    """Run uv from its cache alone, or else with the network; skips the test where there is neither."""
    command = ["uv"] if shutil.which("uv") else [sys.executable, "-m", "uv"]
    for option in (["--offline"], []):
        done = subprocess.run(
            [*command, *arguments, *option], cwd="/", capture_output=True, text=True, timeout=200, check=False
        )
        if done.returncode == 0:
            return
    if NO_NETWORK.search(done.stderr):
        pytest.skip(f"needs packages that are neither in uv's cache nor to be had: {done.stderr[-300:]}")
    pytest.fail(done.stderr)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: the build generates stubs into its sources, which other tests are using."""
    copy, into = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source, target = ROOT / name, copy / name
        if source.is_dir():
            shutil.copytree(
                source, target, ignore=shutil.ignore_patterns("__pycache__", "v1") if "runtime" in name else None
            )
        else:
            shutil.copy(source, target)
    uv("build", "--wheel", "--out-dir", into, copy)
    [built] = into.glob("pierhead-*.whl")
    return built


def lowest() -> list[str]:
    """The lower bounds of what the stubs need, and the generator of that age."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
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
    uv("venv", "--python", sys.executable, tmp_path / "venv")
    versions = lowest() if request.param == "lowest" else ["grpcio-tools", "protobuf>=7"]
    uv("pip", "install", "--python", tmp_path / "venv/bin/python", wheel, *versions)
    run(tmp_path, "-m", "grpc_tools.protoc", "-I.", "--python_out=.", "--grpc_python_out=.", "greeter.proto")
    return tmp_path


def environment(**settings: str) -> dict[str, str]:
    """Nothing of this test's: no PYTHONPATH, no settings of a replica."""
    return {"PATH": os.environ["PATH"], **{f"PIERHEAD_{name}": value for name, value in settings.items()}}


def run(project: Path, *arguments: str, **settings: str) -> str:
    """Run the project's Python; returns what it prints."""
    done = subprocess.run(
        ["venv/bin/python", *arguments], cwd=project, env=environment(**settings), capture_output=True, text=True,
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
            ["venv/bin/python", "service.py"], cwd=project, env=environment(HOST=host), stderr=output
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


def test_the_wheel_holds_the_runtime_and_nothing_else(project: Path, wheel: Path) -> None:
    listed = run(
        project, "-c", f"import zipfile; print(*zipfile.ZipFile({str(wheel)!r}).namelist(), sep='\\n')"
    ).split()
    assert {name.split("/")[0] for name in listed} == {"pierhead", "pierhead-0.1.0.dist-info"}
    assert "pierhead/py.typed" in listed
    assert "pierhead/lane/v1/lane_pb2.py" in listed
