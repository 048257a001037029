"""`python -m tests.environments.triton [check]`: a Triton server for this machine's CPU, for the tests with a real one.

It is that that PyPI's nvidia-pytriton contains, in .state/triton. Its Python backend loads the system's libpython3.11
and its numpy. Seconds and 240 MB the first time.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from tests.environments.made import Environment, NotMade, command, with_uv
from tests.harness.imports import ROOT

PYTRITON = "nvidia-pytriton==0.7.0"
NUMPY = "numpy==1.26.4"
"""The Python backend of this server returns empty tensors with numpy 2."""
SYSTEMS = "/usr/bin/python3"
TRITON = Environment(ROOT / ".state" / "triton", f"{PYTRITON} {NUMPY}\n".encode())
SERVER = TRITON.directory / "pytriton" / "tritonserver"


def make() -> None:
    """Raises NotMade."""
    if not (_prints([SYSTEMS, "--version"], "Python 3.11.") and _prints(["ldconfig", "-p"], "libpython3.11")):
        raise NotMade(
            "Triton's Python backend needs the system's Python 3.11 and its library. On Debian 12 install "
            "libpython3.11 and repeat; or run the tests with a real Triton on such a machine."
        )
    shutil.rmtree(TRITON.directory, ignore_errors=True)
    pip = ("uv", "pip", "install", "--python", SYSTEMS, "--no-deps", "--target")
    with_uv(f"Installing {PYTRITON}", *pip, str(TRITON.directory), PYTRITON)
    stub = SERVER / "python_backend_stubs" / "3.11" / "triton_python_backend_stub"
    shutil.move(stub, SERVER / "backends" / "python" / stub.name)
    with_uv(f"Installing {NUMPY}", *pip, str(SERVER / "backends" / "python"), NUMPY)


def _prints(words: list[str], text: str) -> bool:
    try:
        return text in subprocess.run(words, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(command(TRITON, make))
