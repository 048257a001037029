"""The generated stubs and the bounds of what they need: code of one protobuf major runs on that major and the next."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.harness.stack import ROOT

DECLARED = tomllib.loads((ROOT / "services" / "runtime" / "pyproject.toml").read_text())
STUBS = sorted((ROOT / "services/runtime/pierhead").glob("*/v1/*_pb2.py"))


def bound(package: str) -> str:
    """What follows the package's name, `>=...` or `==...`, in all that pyproject.toml declares."""
    project = DECLARED["project"]
    [found] = [
        text.removeprefix(package)
        for text in [*project["dependencies"], *project["optional-dependencies"]["triton"]]
        if re.match(rf"{re.escape(package)}[<>=]", text)
    ]
    return str(found)


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: path.stem)
def test_a_stub_runs_on_the_lowest_versions_that_are_declared_and_on_both_majors(stub: Path) -> None:
    [generated] = re.findall(r"^# Protobuf Python Version: (.*)$", stub.read_text(), re.MULTILINE)
    assert bound("protobuf") == f">={generated},<{int(generated.split('.')[0]) + 2}", "run compose/machine/venv.sh"
    [grpc] = re.findall(r"GRPC_GENERATED_VERSION = '(.*)'", stub.with_name(f"{stub.stem}_grpc.py").read_text())
    assert bound("grpcio") == bound("grpcio-health-checking") == bound("grpcio-reflection") == f">={grpc}"


def test_a_resolver_takes_the_tritonclient_that_is_pinned() -> None:
    """Its bound of protobuf must have versions in common with ours, or resolvers take one of years ago."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    locked = {package["name"]: package.get("version", "dynamic") for package in packages}
    assert bound("tritonclient[grpc]") == f"=={locked['tritonclient']}"
    assert locked["protobuf"].startswith("6.")
