"""`pierhead.testing.Stack`, with a command in the place of `pierhead` that notes what it is called with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pierhead.testing import Stack, StackFailed

from tests.harness.waiting import eventually

FAKE = """
import os, sys, time
with open("calls", "a") as calls:
    print(sys.argv[1], os.environ["COMPOSE_PROJECT_NAME"], os.environ["PIERHEAD_HTTP_PORT"],
          os.path.basename(os.environ.get("COMPOSE_FILE", "-")), os.environ.get("MINE", ""), *sys.argv[2:], file=calls)
if sys.argv[1] == "up" and os.environ.get("MINE") == "fails":
    print("no engine answers")
    raise SystemExit(1)
if sys.argv[1] == "up" and os.environ.get("MINE") == "waits":
    time.sleep(600)
"""


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "fake.py").write_text(FAKE)
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    return (sys.executable, str(tmp_path / "fake.py"))


def calls(folder: Path) -> list[list[str]]:
    file = folder / "calls"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def test_it_is_up_for_the_block(tmp_path: Path, command: tuple[str, ...]) -> None:
    with Stack(tmp_path / "compose.yaml", command=command, environment={"MINE": "x"}) as stack:
        port = stack.base_url.rpartition(":")[2]
        assert calls(tmp_path) == [["up", stack.project, port, "-", "x"]]
    assert calls(tmp_path)[1:] == [["down", stack.project, port, "-", "x", "--volumes", "--images"]]
    (tmp_path / "other.yaml").write_text("services: {}\n")
    with Stack(tmp_path / "other.yaml", command=command):
        assert calls(tmp_path)[-1][3] == "other.yaml"
    assert Stack(tmp_path / "compose.yaml").project != stack.project


def test_what_does_not_start_is_removed(tmp_path: Path, command: tuple[str, ...]) -> None:
    with pytest.raises(StackFailed, match=r"fake\.py up ended with 1:\nno engine answers"):
        Stack(tmp_path / "compose.yaml", command=command, environment={"MINE": "fails"}).__enter__()
    assert [verb for verb, *_ in calls(tmp_path)] == ["up", "down"]
    with pytest.raises(StackFailed, match=r"nothing.yaml does not exist"):
        Stack(tmp_path / "nothing.yaml", command=command).__enter__()


@pytest.mark.parametrize("when", ["waits", ""])
def test_it_is_removed_after_ctrl_c(tmp_path: Path, command: tuple[str, ...], when: str) -> None:
    program = (
        "import time; from pierhead.testing import Stack\n"
        f"with Stack('compose.yaml', command={command!r}, environment={{'MINE': {when!r}}}):\n    time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment, stderr=-3) as process:
        eventually(lambda: len(calls(tmp_path)) == 1, "up has begun")
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()
    assert [verb for verb, *_ in calls(tmp_path)] == ["up", "down"]
