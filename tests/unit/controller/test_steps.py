"""A step shows that time passes, and what a program said where it failed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from controller.tool.project.programs import Programs
from controller.tool.project.steps import step, wait
from tests.harness.http_answers import sends, serving

ROOT = Path(__file__).resolve().parents[3]


def test_a_step_that_succeeds_says_its_beginning_and_its_end(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert step("Making it", ["sh", "-c", "echo $WORD; pwd >place"], {"WORD": "secret"}, tmp_path)
    assert capfd.readouterr() == ("Making it ...\nMaking it: done (0 s)\n", "")
    assert (tmp_path / "place").read_text().strip() == str(tmp_path)


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["sh", "-c", "seq 100; echo why >&2; exit 3"], ["  | 100", "  | why"]),
        (["no-such-program"], ["  | no-such-program: No such file or directory"]),
    ],
)
def test_a_step_that_fails_shows_the_last_lines(
    words: list[str], last: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert not step("Making it", words, {}, tmp_path)
    errors = capfd.readouterr().err.splitlines()
    assert errors[0] == "Making it: failed after 0 s. Its last lines:"
    assert errors[-len(last) :] == last
    assert len(errors) <= 26


def test_a_wait_looks_until_nothing_is_missing(capfd: pytest.CaptureFixture[str]) -> None:
    found = ["no answer", "503", ""]
    assert wait("Waiting", lambda: found.pop(0), 60.0)
    assert not wait("Waiting again", lambda: "503", 0.0)
    said = capfd.readouterr()
    assert said.out.startswith("Waiting ...\nWaiting: done (")
    assert said.err == "Waiting again: failed after 0 s. Its last lines:\n  | 503\n"


def test_what_this_machine_answers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    machine = Programs()
    with serving(lambda handler: sends(handler, 503, b"")) as server:
        assert machine.status(f"{server}/healthz") == 503
    assert machine.status(f"{server}/healthz") == 0
    done = machine.read(
        "sh", "-c", "cat; pwd; echo $PWD; echo told >&2", given="a\n", directory=tmp_path, complains=True
    )
    assert (done.lines, done.errors) == (["a", str(tmp_path), str(tmp_path)], "")
    assert machine.call("sh", "-c", "cat; exit 3", variables={}, given="b\n", directory=tmp_path) == 3
    assert capfd.readouterr() == ("b\n", "told\n")


PROGRAM = """
from pathlib import Path
from controller.tool.project.steps import step
try:
    program = "trap 'exit 9' INT; echo going >{pipe}; echo so far; sleep 60 & wait"
    step("Making it", ["sh", "-c", program], {{}}, Path("/"))
except KeyboardInterrupt:
    raise SystemExit(130)
"""


def test_ctrl_c_is_reported_as_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "going")
    command = [sys.executable, "-c", PROGRAM.format(pipe=pipe)]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        pipe.read_text()
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.startswith("Making it: interrupted after ")
    assert "failed" not in errors


def test_on_a_terminal_one_line_counts_the_seconds_and_is_gone_at_the_end(tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    program = PROGRAM.format(pipe="/dev/null").replace("sleep 60 & wait", "sleep 1.5")
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        try:
            while read := os.read(master, 4096):
                shown += read
        except OSError:  # the other end is closed
            pass
    os.close(master)
    assert process.returncode == 0
    assert b"Making it ... 1 s  so far" in shown
    assert shown.endswith(b"\r\x1b[KMaking it: done (2 s)\r\n") or b"Making it: done (1 s)" in shown
