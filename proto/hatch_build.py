"""Generates the gRPC stubs from proto/pierhead/**/*.proto whenever the project is installed or built, and gives the
wheel the controller and the stack's files.

The stubs land inside the hand-written package (services/runtime/pierhead/<area>/v1), are ignored by git and are never
edited. Package path and proto path are the same, so the generated imports need no rewriting.
"""

from __future__ import annotations

import runpy
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

STACK, INSTALLED = "pierhead_stack", "proto/installed.py"
"""The package of the stack's files, and its code."""


class ProtoBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Runs protoc over every .proto file of the project; names what the wheel has in addition to the runtime."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate stubs into the package; fails the build with protoc's own message when a .proto is wrong."""
        root = Path(__file__).resolve().parents[1]
        generate(root)
        if self.target_name == "wheel" and Path(self.root) == root:
            if version == "editable":
                build_data["force_include_editable"] = self._editable(root)
            else:
                build_data["force_include"] = included(root)

    def _editable(self, root: Path) -> dict[str, str]:
        """The way to this clone."""
        text = (root / INSTALLED).read_text(encoding="utf-8")
        made = Path(self.directory) / "editable" / "__init__.py"
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(text.replace("Path(__file__).resolve().parent", f"Path({str(root)!r})"), encoding="utf-8")
        return {str(made): f"{STACK}/__init__.py"}


def included(root: Path) -> dict[str, str]:
    """What the wheel has in addition to the runtime: the path in the clone, and that in the wheel."""
    carried = runpy.run_path(str(root / "controller/tool/project/carried.py"))["FILES"]
    files = {str(root / path): f"{STACK}/{path}" for path in carried}
    return {str(root / INSTALLED): f"{STACK}/__init__.py", **files}


def generate(root: Path) -> None:
    """Write `*_pb2.py`, `*_pb2_grpc.py` and their `.pyi` files for every .proto below `root/proto`."""
    import grpc_tools
    from grpc_tools import protoc

    proto_dir = root / "proto"
    out_dir = root / "services" / "runtime"
    files = sorted(str(path) for path in proto_dir.glob("pierhead/**/*.proto"))
    if not files:
        sys.exit(f"no .proto files below {proto_dir}")
    for stale in out_dir.glob("pierhead/*/v1"):
        shutil.rmtree(stale)
    out_dir.mkdir(parents=True, exist_ok=True)
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    scripts = Path(sysconfig.get_path("scripts"))
    arguments = [
        "protoc",
        f"--proto_path={proto_dir}",
        f"--proto_path={well_known}",
        f"--plugin=protoc-gen-mypy={_plugin(scripts, 'protoc-gen-mypy')}",
        f"--plugin=protoc-gen-mypy_grpc={_plugin(scripts, 'protoc-gen-mypy_grpc')}",
        f"--python_out={out_dir}",
        f"--grpc_python_out={out_dir}",
        f"--mypy_out={out_dir}",
        f"--mypy_grpc_out={out_dir}",
        *files,
    ]
    status = protoc.main(arguments)
    if status != 0:
        sys.exit(f"protoc failed with status {status}; its message is above")
    for file in files:  # for contracts that import them: users' tensors are pierhead.tensor.v1.Tensor
        shutil.copyfile(file, out_dir / Path(file).relative_to(proto_dir))


def _plugin(scripts: Path, name: str) -> str:
    """Find a protoc plug-in in the build environment's script folder, else on PATH."""
    script = scripts / name
    found = str(script) if script.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name} is missing: it comes with mypy-protobuf, which pyproject.toml's [build-system] names")
    return found


if __name__ == "__main__":
    generate(Path(__file__).resolve().parent.parent)
