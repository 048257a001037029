"""What is for terminals only: bars, colours, pictures that replace each other; and what is not."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import os
import pty
import re
import struct
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import IO, cast

import pytest

from controller.status.records.services import Obstacle
from controller.tool import patience
from controller.tool.errors import TimedOut
from controller.tool.output import Console
from controller.tool.progress import Progress
from controller.tool.wait import Part, WaitVerdict
from tests.fakes.fake_engine import Behaviour
from tests.unit.controller.control import Control, until
from tests.unit.controller.test_cli import COMMAND, Command, served
from tests.unit.controller.worlds import service

CLI = Path(patience.__file__).parent


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, service("web"), service("api", replicas=1))


async def on_a_terminal(pierhead: Command, *arguments: str, **environment: str) -> str:
    """What a command that succeeds writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {**pierhead.environment(), "TERM": "xterm", **environment}
    for name in ("COLUMNS", "LINES", *(["NO_COLOR"] if "NO_COLOR" not in environment else [])):
        env.pop(name, None)
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd="/"
    )
    os.close(theirs)
    reader = asyncio.StreamReader()
    written = b""
    with os.fdopen(ours, "rb", buffering=0) as file:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), file
        )
        async with asyncio.timeout(30):
            with contextlib.suppress(OSError):  # how Linux says that the terminal's last writer has gone
                while chunk := await reader.read(4096):
                    written += chunk
            assert await process.wait() == 0
        transport.close()
    return written.decode().replace("\r\n", "\n")


async def test_what_is_for_terminals_only(control: Control) -> None:
    line = '{"level": "error", "logger": "a", "message": "no", "error": "Traceback\\nValueError"}'
    control.engine.behaviours["api"] = Behaviour(output=f"{line}\n")
    async with served(control, web=2, api=1) as pierhead:
        assert "\x1b[32mHEALTHY" in await on_a_terminal(pierhead, "status")
        written = await on_a_terminal(pierhead, "status", NO_COLOR="1")
        assert "\x1b[3" not in written
        assert max(len(re.sub(r"\x1b\[\d*m", "", line)) for line in written.splitlines()) <= 80
        assert "\x1b" not in (await pierhead("status")).out
        written = await on_a_terminal(pierhead, "status", "--watch", "-n", "2", "--interval", "0.2")
        assert written.count("replicas ready") >= 2
        assert "\x1b[1A" in written, "the cursor goes up to draw again"
        logged = (await on_a_terminal(pierhead, "logs", "api")).splitlines()
        assert [shown.split(" | ")[1] for shown in logged] == ["ERROR   a no", "  Traceback", "  ValueError"]
        assert (await pierhead("logs", "api")).out.endswith(f" | {line}\n")


OWNED = "\x1b]0;owned\x07 \x1b[2J \x9b31m \u202egnp.exe"
"""Sets the terminal's title, wipes it, colours it, and turns the direction of what follows."""
ACTS = ("\x1b]", "\x07", "\x1b[2J", "\x9b", "\u202e")


async def test_what_a_replica_writes_does_nothing_to_the_terminal(control: Control) -> None:
    """Its log lines and its errors, in every command that shows them, on a terminal and in a pipe."""
    control.engine.behaviours["web"] = Behaviour(
        output=f"log {OWNED}\n", ready_after_s=600.0, exits_after_s=0.1, exit_code=1
    )
    control.engine.behaviours["api"] = Behaviour(output=f"log {OWNED}\n", ready_after_s=600.0)
    control.starts["api"] = (1, f"stage {OWNED}")
    shown = {"logs api": "log", "events": "log", "why web": "log", "why api": "stage", "status": "stage", "plan": ""}
    async with served(control) as pierhead:
        await until(lambda: {"replica_failed", "replica_progress"} <= set(control.kinds()))
        for arguments, word in shown.items():
            for written in (
                await on_a_terminal(pierhead, *arguments.split()),
                (await pierhead(*arguments.split())).out,
            ):
                assert (word in written, [each for each in ACTS if each in written]) == (True, []), arguments
        waited = await pierhead("deploy", "api", "--timeout", "7")
        assert ("stage" in waited.err, [each for each in ACTS if each in waited.err]) == (True, [])
        (line,) = (await pierhead("logs", "api", "-o", "json")).out.splitlines()
        assert json.loads(line)["line"] == f"log {OWNED}", "a program gets the line as it is"


def test_bars_write_nothing_that_a_replica_says_to_the_terminal_as_it_is() -> None:
    screen = io.StringIO()
    with Progress(Console(file=screen, force_terminal=True, width=80, color_system=None)) as progress:
        progress.show(WaitVerdict("", parts=(Part("web", 1, 3, f"stage {OWNED}"),)))
    assert "stage" in screen.getvalue()
    assert [each for each in ACTS if each in screen.getvalue()] == []


def test_the_command_writes_at_one_place() -> None:
    """`controller/tool/output.py` makes text harmless; what writes elsewhere would not."""
    writers = re.compile(r"std(out|err)\.write|(?<!\.)\bprint\(|typer\.echo|from rich\.console import .*\bConsole\b")
    rooms = [CLI, CLI / "commands"]
    assert [path.name for room in rooms for path in room.glob("*.py") if writers.search(path.read_text())] == [
        "output.py"
    ]


def test_bars_for_each_service_and_nothing_stays() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    with Progress(console) as progress:
        progress.show(WaitVerdict("the controller reads the compose files"))
        progress.show(WaitVerdict("", parts=(Part("web", 1, 3, "2 starting"), Part("api", 0, None))))
        progress.show(WaitVerdict("", parts=(Part("web", 0, 0), Part("api", 2, 2))))
        progress.show(WaitVerdict("", parts=(Part("web", 1, 3, "a long story " * 20), Part("api", 2, 2))))
    written = screen.getvalue()
    assert "1/3" in written
    assert "2/2" in written
    assert 0 < written.count("a long story") < 20, "a bar has one line"
    assert written.rstrip().endswith("\x1b[2K"), "what was drawn is wiped"


def test_elsewhere_a_line_for_each_change() -> None:
    log = io.StringIO()
    with Progress(Console(file=log, force_terminal=False, width=20)) as progress:
        for left_s, ready, state in ((3, 1, "UPDATING"), (2, 1, "UPDATING"), (0, 3, "UPDATING"), (0, 3, "HEALTHY")):
            message = f"web: {ready} of 3 ready; next try in {left_s} s"
            progress.show(WaitVerdict(message, parts=(Part("web", ready, 3, key=(state,)),)))
    assert log.getvalue() == "web: 1 of 3 ready; next try in 3 s\nweb: 3 of 3 ready; next try in 0 s\n"


def verdict(retry_in_s: int) -> WaitVerdict:
    reason = Obstacle(
        f"could not start p-web-1, next try in {retry_in_s} s: no space left", ("refusal", "start p-web-1")
    )
    return WaitVerdict("web: 0 of 1 ready", parts=(Part("web", 0, 1, reasons=(reason,)), Part("api", 1, 1)))


@pytest.mark.parametrize("quiet", [False, True])
def test_each_reason_is_printed_once_and_only_when_it_takes_long(monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    now = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: now, sleep=pass_time))
    shown: list[tuple[float, str]] = []
    log = SimpleNamespace(write=lambda text: shown.append((now, text)), flush=lambda: None)
    monkeypatch.setattr(patience, "Console", lambda **_: Console(file=cast("IO[str]", log), width=80))
    with pytest.raises(TimedOut):
        patience.wait(lambda: verdict(int(60 - now)), 20.0, "It continues.", quiet=quiet)
    said = [(at, text.strip()) for at, text in shown if text.strip()]
    if not quiet:
        assert said.pop(0) == (0.0, "web: 0 of 1 ready")
    ((at, words),) = said
    assert words == "web: could not start p-web-1, next try in 54 s: no space left"
    assert patience.REASONS_AFTER_S <= at < patience.REASONS_AFTER_S + 2 * patience.POLL_S
