"""The `pierhead` command, as a process against a real API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port
from typer.main import get_command

from controller.api_tokens import ApiToken, read_tokens
from controller.daemon.callers import Gatekeeper
from controller.errors import SpecError
from controller.status.documents import plan_words
from controller.status.view import View
from controller.tool.app import app
from controller.tool.completion import SHELLS, script
from controller.tool.errors import EXIT_CODES
from controller.tool.help import GROUPS
from tests.fakes.fake_engine import Behaviour, FakeEngine
from tests.fakes.fake_swarm_engine import FakeSwarmEngine
from tests.harness.virtual_time import wall_clock
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import gpus, service

ROOT = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-m", "controller.tool.command")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Command:
    """Runs `pierhead` against one API."""

    url: str

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PIERHEAD_API_URL": self.url, "PYTHONPATH": str(ROOT)}

    async def begin(self, *arguments: str, **changes: str) -> Process:
        env = {**self.environment(), **changes}
        return await asyncio.create_subprocess_exec(
            *COMMAND, *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=env, cwd="/"
        )

    async def __call__(self, *arguments: str, **changes: str) -> Done:
        process = await self.begin(*arguments, **changes)
        async with asyncio.timeout(30):
            out, err = await process.communicate()
        return Done(process.returncode or 0, out.decode(), err.decode())

    async def offers(self, line: str, tries: int = 5) -> list[str]:
        """What bash is offered at the end of a line; nothing where a busy machine answers late: it tries again."""
        number = str(len(line.split(" ")) - 1)
        done = await self(_PIERHEAD_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=number)
        assert (done.code, done.err) == (0, "")
        return done.out.split() or (await self.offers(line, tries - 1) if tries > 1 else [])


@contextlib.asynccontextmanager
async def served(control: Control, tokens: tuple[ApiToken, ...] = (), /, **replicas: int) -> AsyncIterator[Command]:
    async with control.running(**replicas) as controller:
        runner = web.AppRunner(controller.api(Gatekeeper(tokens, frozenset)).application(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield Command(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, service("web"), service("api", replicas=1))


async def line(process: Process) -> bytes:
    """The next line of its output."""
    assert process.stdout is not None
    async with asyncio.timeout(20):
        return await process.stdout.readline()


async def interrupted(process: Process) -> tuple[int | None, str]:
    """Exit code and errors after Ctrl-C."""
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(20):
        _, err = await process.communicate()
    return process.returncode, err.decode()


async def test_a_token_is_made_used_and_seen_in_the_audit(control: Control) -> None:
    done = await Command("http://127.0.0.1:9")("token", "ci", "--role", "scale")
    (token,), entry = done.out.splitlines(), done.err.splitlines()[-1]
    assert (done.code, token not in done.err, entry.startswith("ci:scale:")) == (0, True, True)
    async with served(control, read_tokens("secret", entry)) as pierhead:
        assert "the API answers with a token only" in (await pierhead("status")).err
        has_it = {"PIERHEAD_API_TOKEN": token}
        assert (await pierhead("scale", "web", "3", **has_it)).code == 0
        refused = await pierhead("restart", "web", **has_it)
        assert (refused.code, "ci has the role scale, and this needs deploy" in refused.err) == (2, True)
        seen = await pierhead("audit", **has_it)
        assert 'ci at 127.0.0.1: PUT services/web/scale {"replicas": 3}' in seen.out
        assert "restart" not in seen.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("token", "c/i"), "NAME: expected 1 to 40 letters, digits and ._-, found"),
        (("token", "ci", "--role", "boss"), "--role: expected read, scale, deploy, admin, found"),
    ],
)
async def test_a_token_that_cannot_be(words: tuple[str, ...], expected: str) -> None:
    done = await Command("http://127.0.0.1:9")(*words)
    assert (done.code, done.out, expected in done.err) == (2, "", True)


async def test_a_day_with_the_command(control: Control) -> None:
    control.engine.behaviours["api"] = Behaviour(output="one\ntwo\n")
    async with served(control) as pierhead:

        async def shown(*arguments: str) -> str:
            done = await pierhead(*arguments)
            assert (done.code, done.err) == (0, "")
            return done.out

        async def lines(*arguments: str) -> list[dict[str, Any]]:
            return [json.loads(line) for line in (await shown(*arguments, "-o", "json")).splitlines()]

        assert (await pierhead("wait-ready", "--timeout", "20")).out == "2 services, 3 replicas, all ready\n"
        scaled = await pierhead("scale", "web", "4")
        assert (scaled.out, "4 of 4" in scaled.err) == ("web: 4 of 4 ready\n", False), "it says the end once"
        assert control.row("web") == (4, 4, 4)
        status, routes = await shown("status"), await shown("routes")
        assert all(name in status and name in routes for name in control.router.ready("web"))
        assert json.loads(await shown("status", "-o", "json"))["project"] == "p"
        why = await shown("why", "web")
        assert why.startswith("web is HEALTHY: 4 of 4 replicas ready\n")
        assert "4 wanted: set by scale; the compose files say 2" in why
        assert json.loads(await shown("why", "web", "-o", "json"))["service"]["ready"] == 4
        assert await shown("plan") == "nothing to do\n"
        assert "web-" in await shown("plan", "--scale", "web:6", "--scale", "api:2")
        refused = await pierhead("plan", "--scale", "web")
        assert (refused.code, refused.out) == (2, "")
        assert "scale: expected name:replicas such as web:4, found 'web'" in refused.err
        assert control.row("web") == (4, 4, 4), "nothing was changed"
        assert "knows no GPU" in await shown("gpus")
        assert "current, stable" in await shown("revisions", "web")
        assert "5 of 5 replicas ready" in await shown("status", "--watch", "-n", "1")
        pictures = await lines("status", "--watch", "-n", "2", "--interval", "0.2")
        assert [len(picture["services"]) for picture in pictures] == [2, 2]

        assert "web: 2 -> 4 replicas" in await shown("events", "-n", "500")
        numbers = [event["seq"] for event in await lines("events")]
        assert numbers == sorted(numbers)
        assert {event["kind"] for event in await lines("events", "--kind", "replica_ready")} == {"replica_ready"}
        assert await shown("events", "--since", "1h")
        assert await shown("events", "--since", "2999-01-01") == ""
        done = await pierhead("events", "--kind", "rollback", "--kind", "spec_error")
        assert (done.code, done.out, done.err) == (0, "", "no event of kind rollback, spec_error is kept\n")

        assert [line["line"] for line in await lines("logs", "api")] == ["one", "two"]
        assert (await shown("logs", "api", "-n", "1")).endswith(" | two\n")
        assert (await shown("logs", "api", "--since", "1h")).count("\n") == 2
        assert await shown("logs", "api", "--since", "2999-01-01") == ""
        assert [line["line"] for line in await lines("logs", "api", "--grep", "^t.o$")] == ["two"]
        refused = await pierhead("logs", "api", "--grep", "(")
        assert (refused.code, refused.out) == (2, "")
        assert "--grep: '(' is no regular expression: missing )" in refused.err
        named = control.router.ready("web")[0]
        assert all(line["replica"] == named for line in await lines("logs", "web", "--replica", named))


async def test_a_call_of_a_service_that_does_not_exist_is_shown(control: Control) -> None:
    async with served(control, web=2) as pierhead:
        for name in control.router.ready("web"):
            control.controller.discovery_state.watch(["api", "wep"], name)
        sentence = 'it calls the service "wep", which no compose file has; did you mean "web"?'
        await until(lambda: any(sentence in row.message for row in control.view.services))
        assert sentence in (await pierhead("status")).out
        assert f"What is in the way\n  {sentence}" in (await pierhead("why", "web")).out
        assert (await pierhead("wait-ready")).code == 0, "its replicas are ready all the same"


async def test_a_followed_log_has_each_line_once(control: Control) -> None:
    control.engine.behaviours["api"] = Behaviour(output="begins\n")
    async with served(control, api=1) as pierhead:
        (name,) = control.router.ready("api")
        process = await pierhead.begin("logs", "-f", "api")
        seen = [await line(process)]
        for words in (["tick"] * 3, ["tick"], ["tock"]):  # each is logged when the one before has been shown
            control.engine.say(name, *words)
            seen += [await line(process) for _ in words]
        assert seen == [f"{name} | {word}\n".encode() for word in ["begins", *["tick"] * 4, "tock"]]
        assert await interrupted(process) == (130, "")


async def test_the_consoles_address_is_the_apis(control: Control) -> None:
    async with served(control) as pierhead:
        done = await pierhead("console")
        assert (done.code, done.err) == (0, "")
        assert re.fullmatch(r"http://127\.0\.0\.1:[0-9]+/\n", done.out)
        done = await pierhead("console", PIERHEAD_API_URL="unix:///run/pierhead/shop.sock")
        assert (done.code, done.out) == (2, "")
        assert "is a Unix socket, which no browser opens" in done.err


async def test_a_command_inside_a_replica_is_docker_s(control: Control, tmp_path: Path) -> None:
    docker = tmp_path / "programs" / "docker"
    docker.parent.mkdir()
    docker.write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    docker.chmod(0o755)
    path = {"PATH": f"{docker.parent}:{os.environ['PATH']}"}
    async with served(control, web=2) as pierhead:
        first, second = sorted(control.router.ready("web"))
        done = await pierhead("exec", "web", "ls", "-l", "--help", **path)
        assert (done.code, done.err) == (3, ""), "docker's own status"
        assert done.out in {f"exec --interactive {name} ls -l --help\n" for name in (first, second)}
        done = await pierhead("exec", "web", "--", "ls", **path)
        assert done.out.endswith(" ls\n")
        assert " -- " not in done.out
        done = await pierhead("exec", "--replica", second, "web", **path)
        assert done.out == f"exec --interactive {second} sh\n"
        done = await pierhead("exec", "--replica", "other", "web", **path)
        assert (done.code, done.out) == (2, "")
        assert "web has no replica other now; it has " in done.err
        done = await pierhead("exec", "web", PATH=str(tmp_path))
        assert (done.code, done.err) == (
            2,
            "exec needs the program docker on this machine: No such file or directory\n",
        )
        assert await pierhead.offers("pierhead exec --replica p-w") == [], "the service is not named yet"
        assert await pierhead.offers("pierhead logs web --replica p-w") == [first, second]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
async def test_what_other_shells_are_offered(control: Control, shell: str) -> None:
    """As their completion scripts ask."""
    assert f"complete_{shell}" in (await Command("http://127.0.0.1:9")("completion", shell)).out
    async with served(control, web=2) as pierhead:
        asks = {"_PIERHEAD_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        for line, expected in (("pierhead wh", "why"), ("pierhead why w", "web")):
            for _ in range(5):  # on a busy machine an answer may be late, and then there is none
                done = await pierhead(_TYPER_COMPLETE_ARGS=line, **asks)
                assert (done.code, done.err) == (0, "")
                if expected in done.out:
                    break
            assert expected in done.out


async def test_what_a_shell_is_offered(control: Control) -> None:
    async with served(control, web=2) as pierhead:
        assert await pierhead.offers("pierhead wh") == ["why"]
        assert await pierhead.offers("pierhead why ") == ["api", "web"]
        assert await pierhead.offers("pierhead deploy api w") == ["web"]
        assert await pierhead.offers("pierhead events --kind replica_r") == ["replica_ready"]
        (revision,) = control.controller.deployer.revisions("web")
        assert await pierhead.offers("pierhead rollback web --to ") == [revision.version]
    assert await pierhead.offers("pierhead why ", tries=1) == [], "nobody answers"
    done = await pierhead("completion", "bash")
    assert (done.code, done.out) == (0, f"{script('bash')}\n")
    for shell in SHELLS:
        assert "_PIERHEAD_COMPLETE" in script(shell)


@pytest.mark.parametrize("arguments", [("schema",), ("--help",), ("simulate", "step:rate=1,duration=5"), ("status",)])
async def test_a_closed_pipe_is_no_error(control: Control, arguments: tuple[str, ...]) -> None:
    async with served(control) as pierhead:
        read, write = os.pipe()
        os.close(read)
        try:
            command = [sys.executable, "-m", "controller.tool.command", *arguments]
            process = await asyncio.create_subprocess_exec(
                *command, stdout=write, stderr=PIPE, env=pierhead.environment(), cwd=control.directory
            )
        finally:
            os.close(write)
        async with asyncio.timeout(30):
            _, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("scale", "web", "-1"), "N: expected an integer of at least 0, or auto, found '-1'"),
        (("scale", "wep", "2"), "did you mean 'web'? Services: api, web"),
        (("status", "-o", "yaml"), "--output: expected text or json, found 'yaml'"),
        (("events", "-f", "--kind", "nope"), "kind: there are no events of kind 'nope'; kinds: add_server, "),
        (("events", "--since", "soon"), "--since: expected a time ago such as 10m or 2h30m"),
        (("statsu",), "Did you mean 'status', 'restart'?"),
        (("scale", "web"), "Missing argument 'N'. (`pierhead scale --help` explains it)"),
        (("mark", "GPU-1", "broken \udcff"), "argument 3: expected UTF-8, found b'broken \\xff'"),
    ],
)
async def test_bad_input_is_one_message_and_code_two(control: Control, arguments: tuple[str, ...], words: str) -> None:
    async with served(control, web=2) as pierhead:
        done = await pierhead(*arguments)
        assert (done.code, done.out) == (2, "")
        assert words in done.err
        assert len(done.err.splitlines()) == 1
        assert control.store.overrides == {}


async def test_auto_without_an_autoscaler_goes_back_to_the_files_number(control: Control) -> None:
    async with served(control) as pierhead:
        done = await pierhead("scale", "web", "3", "-o", "json")
        assert json.loads(done.out) == {"service": "web", "replicas": 3, "done": True, "message": "web: 3 of 3 ready"}
        done = await pierhead("scale", "web", "auto")
        assert (done.code, done.out) == (0, "web: the compose files decide, 2 replicas\nweb: 2 of 2 ready\n")
        assert control.row("web") == (2, 2, 2)
        assert control.store.overrides == {}


async def test_interrupted_it_leaves_the_target(control: Control) -> None:
    control.engine.behaviours["web"] = Behaviour(ready_after_s=3600)
    async with served(control) as pierhead:
        process = await pierhead.begin("scale", "web", "3")
        assert process.stderr is not None
        async with asyncio.timeout(20):
            while b"of 3 ready" not in await process.stderr.readline():
                pass
        code, err = await interrupted(process)
        assert code == 1
        assert "Stopped waiting. The target stays 3" in err
        assert control.store.overrides["web"].replicas == 3


def test_before_the_files_are_read_there_is_no_plan_and_nothing_is_wrong_with_them() -> None:
    assert plan_words(View(0.0, "shop"), ()) == "no plan yet: the compose files have not been read"


async def test_files_that_cannot_be_used_are_bad_input(control: Control) -> None:
    problem = "services.web.x-serve.rout: unknown key"
    control.source.error = SpecError([problem])
    async with served(control) as pierhead:
        await until(lambda: control.view.spec_problems)
        done = await pierhead("wait-ready")
        assert (done.code, done.err.count(problem)) == (2, 1), "shown once, and not while it waits too"
        assert problem in (await pierhead("status")).out
        done = await pierhead("plan")
        assert (done.code, done.out) == (2, f"no plan: the compose files cannot be used\n{problem}\n")
        control.source.error = None
        await control.controller.specs.read_again()
        await control.settled("web", 2)
        control.source.error = SpecError([problem])
        await control.controller.specs.read_again()
        await until(lambda: control.view.spec_problems)
        done = await pierhead("plan")
        assert done.code == 2
        assert done.out.splitlines() == [
            "the compose files cannot be used; what follows is the plan of the last good ones:",
            problem,
            "nothing to do",
        ]
        done = await pierhead("plan", "-o", "json")
        assert (done.code, json.loads(done.out)["spec_problems"]) == (2, [problem])


async def test_without_a_controller() -> None:
    pierhead = Command(f"http://127.0.0.1:{unused_port()}")
    done = await pierhead("status")
    assert (done.code, len(done.err.splitlines())) == (3, 1)
    shown = (await pierhead("--help")).out
    assert all(f"{code:3}  {words}" in shown for code, words in EXIT_CODES.items())


def test_the_help_has_every_command_in_a_group_with_its_whole_summary(capsys: pytest.CaptureFixture[str]) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    listed = sorted(name for name, command in commands.items() if not command.hidden)
    assert sorted(name for names in GROUPS.values() for name in names) == listed
    app(["--help"], prog_name="pierhead", standalone_mode=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "--version Show the version and build, and exit." in shown
    assert "Place no further replica on a GPU, for the reason REASON; its present replicas stay." in shown
    assert "..." not in shown.replace("[ARGS]...", "")


@pytest.mark.parametrize(("no_colour", "is_coloured"), [("", True), ("1", False)])
def test_the_help_is_coloured_on_a_terminal(no_colour: str, is_coloured: bool) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "NO_COLOR": no_colour, "TERM": "xterm"}
    try:
        command = [sys.executable, "-m", "controller.tool.command", "--help"]
        subprocess.run(command, stdout=theirs, env=environment, check=True, timeout=60)
        shown = os.read(ours, 100_000).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert ("\x1b[" in shown) is is_coloured


async def test_the_log_of_a_service_without_x_serve_is_compose_s(tmp_path: Path) -> None:
    async with served(Control.of(tmp_path, service())) as pierhead:
        await pierhead("wait-ready", "--timeout", "20")
        done = await pierhead("logs", "cache")
        assert (done.code, done.err.splitlines()[-1].rpartition(". ")[2]) == (
            2,
            "Of any other service: docker compose logs cache",
        )


async def test_a_gpu_is_taken_out_of_use_and_back(control: Control) -> None:
    control.engine.gpus = gpus(2)
    async with served(control) as pierhead:
        await pierhead("wait-ready", "--timeout", "20")
        done = await pierhead("mark", "GPU-1", "Xid 79 in the kernel's log")
        assert (done.code, done.out) == (0, "no replica is placed on GPU GPU-1 until `pierhead unmark GPU-1`\n")
        await until(lambda: any(gpu.fault for gpu in control.view.gpus))
        assert "not used: Xid 79 in the kernel's log" in (await pierhead("status")).out
        done = await pierhead("unmark", "GPU-1", "-o", "json")
        assert (done.code, json.loads(done.out)) == (0, {"gpu": "GPU-1", "fault": None})
        done = await pierhead("unmark", "GPU-1")
        assert (done.code, "GPU GPU-1 has no mark; with one: none" in done.err) == (2, True)
        done = await pierhead("mark", "GPU-7", "loud fan")
        assert (done.code, "this machine has GPU-0, GPU-1" in done.err) == (2, True)


# --------------------------------------------------------------------------------------- from one machine to a Swarm


async def test_the_numbers_of_scale_go_to_a_swarm_and_back_as_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "many-machines.md").read_text()
    [write_down] = re.findall(r"```\n(pierhead status -o json .*?>scale-targets\.sh\n)```", page, re.DOTALL)
    project = tmp_path / "project"
    project.mkdir()
    (project / "pierhead").write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    (project / "pierhead").chmod(0o755)
    path = {"PATH": f"{project}:{os.environ['PATH']}"}

    async def typed(command: Command, words: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-euc", words), cwd=project, env={**command.environment(), **path}, stdout=PIPE, stderr=PIPE
        )
        async with asyncio.timeout(60):
            _, err = await process.communicate()
        assert process.returncode == 0, err.decode()

    def stack(name: str, engine: FakeEngine | None = None) -> Control:
        (tmp_path / name).mkdir()
        return Control.of(tmp_path / name, service("web"), service("api", replicas=1), engine=engine)

    swarm = FakeSwarmEngine(wall_clock)
    swarm.add_node("n1")
    here, there = stack("here"), stack("there", swarm)
    async with served(here, api=1) as command:
        assert (await command("scale", "web", "3", "--no-wait")).code == 0
        await here.settled("web", 3)
        await typed(command, write_down)
    moved = "pierhead scale api auto --no-wait\npierhead scale web 3 --no-wait\n"
    assert (project / "scale-targets.sh").read_text() == moved
    async with served(there, web=2) as command:
        await typed(command, "sh scale-targets.sh")
        await there.settled("web", 3)
        (project / "scale-targets.sh").unlink()
        await typed(command, write_down)
    assert (project / "scale-targets.sh").read_text() == moved
