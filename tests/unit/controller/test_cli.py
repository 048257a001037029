"""The `pierhead` command, as a process against a real API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

from controller.api import Gatekeeper
from controller.cli.completion import SHELLS, script
from controller.cli.errors import EXIT_CODES
from controller.errors import SpecError
from controller.model.spec import GpuRequest, GpuSlot, RolloutSpec
from controller.model.world import Gpu, current_version
from tests.fakes.fake_engine import Behaviour
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import gpu_service, gpus, service

ROOT = Path(__file__).resolve().parents[3]
COMMAND = ("env", "--default-signal=INT", sys.executable, "-m", "controller.cli")
"""A test run in the background hands on that Ctrl-C is ignored; the command is typed in a terminal. No function of ours
between fork and exec says so: where other tests have left threads of gRPC's, the new process would abort."""


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

    async def begin_with(self, *arguments: str, env: Mapping[str, str], stream: int) -> Process:
        """The same with all three standard streams on one file, a terminal for example."""
        return await asyncio.create_subprocess_exec(
            *COMMAND, *arguments, stdin=stream, stdout=stream, stderr=stream, env=dict(env), cwd="/"
        )

    async def __call__(self, *arguments: str, **changes: str) -> Done:
        process = await self.begin(*arguments, **changes)
        async with asyncio.timeout(30):
            out, err = await process.communicate()
        return Done(process.returncode or 0, out.decode(), err.decode())

    async def offers(self, line: str) -> list[str]:
        """What bash is offered at the end of a line."""
        number = str(len(line.split(" ")) - 1)
        done = await self(_PIERHEAD_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=number)
        assert (done.code, done.err) == (0, "")
        return done.out.split()


@contextlib.asynccontextmanager
async def served(control: Control) -> AsyncIterator[Command]:
    async with control.running() as controller:
        runner = web.AppRunner(controller.api(Gatekeeper(None, frozenset)).application(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield Command(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, service("web"), service("api", replicas=1))


async def test_a_day_with_the_command(control: Control) -> None:
    control.engine.behaviours["api"] = Behaviour(output="one\ntwo\n")
    async with served(control) as pierhead:
        done = await pierhead("wait-ready", "--timeout", "20")
        assert (done.code, done.out) == (0, "2 services, 3 replicas, all ready\n")
        done = await pierhead("scale", "web", "4")
        assert (done.code, done.out) == (0, "web: 4 of 4 ready\n")
        assert control.row("web") == (4, 4, 4)
        done = await pierhead("status")
        assert done.code == 0
        assert "4/4" in done.out
        assert all(name in done.out for name in control.router.ready("web"))
        done = await pierhead("plan")
        assert (done.code, done.out) == (0, "nothing to do\n")
        done = await pierhead("events", "-n", "500")
        assert "web: 2 -> 4 replicas" in done.out
        events = [json.loads(line) for line in (await pierhead("events", "-o", "json")).out.splitlines()]
        assert [event["seq"] for event in events] == sorted(event["seq"] for event in events)
        done = await pierhead("logs", "api", "-n", "1")
        assert done.out.endswith(" | two\n")
        assert json.loads((await pierhead("status", "-o", "json")).out)["project"] == "p"


async def test_pages_and_documents(control: Control) -> None:
    control.engine.behaviours["api"] = Behaviour(output="one\ntwo\n")
    async with served(control) as pierhead:
        await control.settled("web", 2)
        control.controller.commands.scale("web", 4)
        await control.settled("web", 4)
        await control.settled("api", 1)
        done = await pierhead("why", "web")
        assert done.out.startswith("web is HEALTHY: 4 of 4 replicas ready\n")
        assert "4 wanted: set by scale; the compose files say 2" in done.out
        assert json.loads((await pierhead("why", "web", "-o", "json")).out)["service"]["ready"] == 4
        done = await pierhead("routes")
        assert "/web" in done.out
        assert all(name in done.out for name in control.router.ready("web"))
        assert "knows no GPU" in (await pierhead("gpus")).out
        done = await pierhead("top", "--once")
        assert done.code == 0
        assert "5 of 5 replicas ready" in done.out
        pictures = (await pierhead("top", "-n", "2", "--interval", "0.2", "-o", "json")).out.splitlines()
        assert [len(json.loads(picture)["services"]) for picture in pictures] == [2, 2]
        done = await pierhead("scale", "web", "3", "-o", "json")
        assert json.loads(done.out) == {"service": "web", "replicas": 3, "done": True, "message": "web: 3 of 3 ready"}
        lines = [json.loads(line) for line in (await pierhead("logs", "api", "-o", "json")).out.splitlines()]
        assert [line["line"] for line in lines] == ["one", "two"]
        assert (await pierhead("logs", "api", "--since", "1h")).out.count("\n") == 2
        assert (await pierhead("logs", "api", "--since", "2999-01-01")).out == ""


async def test_a_call_of_a_service_that_does_not_exist_is_told(control: Control) -> None:
    async with served(control) as pierhead:
        await control.settled("web", 2)
        watchers = [control.controller.board.watch(["api", "wep"], name) for name in control.router.ready("web")]
        sentence = 'it calls the service "wep", which no compose file has; did you mean "web"?'
        await until(lambda: any(sentence in row.message for row in control.view.services))
        assert sentence in (await pierhead("status")).out
        assert f"What is in the way\n  {sentence}" in (await pierhead("why", "web")).out
        found = json.loads((await pierhead("why", "web", "-o", "json")).out)
        assert found["service"]["unknown_callees"] == {"wep": sentence}
        assert (await pierhead("wait-ready")).code == 0, "replicas are there all the same"
        for watcher in watchers:
            control.controller.board.leave(watcher)
        await until(lambda: not any(row.message for row in control.view.services))


async def test_events_are_chosen_by_kind_and_time(control: Control) -> None:
    async with served(control) as pierhead:
        await control.settled("web", 2)
        done = await pierhead("events", "--kind", "replica_ready", "-o", "json")
        events = [json.loads(line) for line in done.out.splitlines()]
        assert {event["kind"] for event in events} == {"replica_ready"}
        done = await pierhead("events", "--kind", "rollback", "--kind", "scale")
        assert (done.code, done.out, done.err) == (0, "", "no event of kind rollback, scale is kept\n")
        done = await pierhead("events", "--kind", "replica_ready", "--since", "2999-01-01")
        assert (done.code, done.err) == (0, "no event of kind replica_ready since then\n")
        assert (await pierhead("events", "--since", "1h")).out
        assert (await pierhead("events", "--since", "2999-01-01")).out == ""


async def test_followed_events_go_on_with_what_is_asked_for(control: Control) -> None:
    async with served(control) as pierhead:
        await control.settled("web", 2)
        process = await pierhead.begin("events", "-f", "-n", "1", "--kind", "scale", "--service", "api")
        control.controller.commands.scale("web", 3)
        control.controller.commands.scale("api", 2)
        assert process.stdout is not None
        async with asyncio.timeout(20):
            line = await process.stdout.readline()
        assert b"api: 1 -> 2 replicas" in line
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            _, err = await process.communicate()
        assert (process.returncode, err) == (130, b"")


async def test_a_followed_log_says_each_line_once(control: Control) -> None:
    control.engine.behaviours["api"] = Behaviour(output="begins\n")
    async with served(control) as pierhead:
        await control.settled("api", 1)
        (name,) = control.router.ready("api")
        process = await pierhead.begin("logs", "-f", "api")
        assert process.stdout is not None
        seen = []
        for lines in [["tick"] * 3, ["tick"], ["tock"]]:  # each is said when the one before has been shown
            async with asyncio.timeout(20):
                seen.append((await process.stdout.readline()).decode())
                while len(lines) == 1 and seen.count(f"{name} | tick\n") < 3:
                    seen.append((await process.stdout.readline()).decode())
            control.engine.say(name, *lines)
        async with asyncio.timeout(20):
            while not seen[-1].endswith("| tock\n"):
                seen.append((await process.stdout.readline()).decode())
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            _, err = await process.communicate()
        assert seen == [f"{name} | {line}\n" for line in ["begins", *["tick"] * 4, "tock"]]
        assert (process.returncode, err) == (130, b"")


async def test_it_ends_with_whoever_called_it_from_outside_a_container(control: Control) -> None:
    async with served(control) as pierhead:
        await control.settled("web", 2)
        process = await pierhead.begin("events", "-f", PIERHEAD_ENDS_WITH_STDIN="1")
        assert process.stdout is not None
        assert process.stdin is not None
        async with asyncio.timeout(20):
            await process.stdout.readline()
        process.stdin.close()
        async with asyncio.timeout(20):
            _, err = await process.communicate()
        assert (process.returncode, err) == (130, b"")


async def test_top_ends_with_zero_when_interrupted(control: Control) -> None:
    async with served(control) as pierhead:
        await control.settled("web", 2)
        process = await pierhead.begin("top", "--interval", "0.2")
        assert process.stdout is not None
        async with asyncio.timeout(20):
            while b"web" not in await process.stdout.readline():
                pass
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            _, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")


async def test_what_a_shell_is_offered(control: Control) -> None:
    async with served(control) as pierhead:
        await control.settled("web", 2)
        assert await pierhead.offers("pierhead wh") == ["why"]
        assert await pierhead.offers("pierhead why ") == ["api", "web"]
        assert await pierhead.offers("pierhead deploy api w") == ["web"]
        assert await pierhead.offers("pierhead events --kind replica_r") == ["replica_ready"]
        (revision,) = control.controller.deployer.revisions("web")
        assert await pierhead.offers("pierhead rollback web --to ") == [revision.version]
    assert await pierhead.offers("pierhead why ") == [], "nobody answers"
    done = await pierhead("completion", "bash")
    assert (done.code, done.out) == (0, f"{script('bash')}\n")
    for shell in SHELLS:
        assert "_PIERHEAD_COMPLETE" in script(shell)


async def test_a_reader_who_has_read_enough_is_no_error(control: Control) -> None:
    async with served(control) as pierhead:
        await control.settled("web", 2)
        shell = f"{sys.executable} -m controller.cli events -n 1000 2>errors | head -n 1; cat errors >&2"
        process = await asyncio.create_subprocess_shell(
            shell, stdout=PIPE, stderr=PIPE, env=pierhead.environment(), cwd=control.directory
        )
        async with asyncio.timeout(30):
            out, err = await process.communicate()
        assert (len(out.splitlines()), err) == (1, b"")


@pytest.mark.parametrize("arguments", [("schema",), ("--help",), ("simulate", "step:rate=1,duration=5"), ("status",)])
async def test_a_reader_who_reads_nothing_is_no_error(control: Control, arguments: tuple[str, ...]) -> None:
    async with served(control) as pierhead:
        read, write = os.pipe()
        os.close(read)
        try:
            command = [sys.executable, "-m", "controller.cli", *arguments]
            process = await asyncio.create_subprocess_exec(
                *command, stdout=write, stderr=PIPE, env=pierhead.environment(), cwd=control.directory
            )
        finally:
            os.close(write)
        async with asyncio.timeout(30):
            _, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")


async def test_an_argument_that_is_no_text_is_bad_input(control: Control) -> None:
    async with served(control) as pierhead:
        done = await pierhead("mark", "GPU-1", "broken \udcff")
        assert (done.code, done.out) == (2, "")
        assert done.err == "argument 3: expected UTF-8, found b'broken \\xff'\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("scale", "web", "-1"), "N: expected an integer of at least 0, or auto, found '-1'"),
        (("scale", "web", "abc"), "N: expected an integer of at least 0, or auto, found 'abc'"),
        (("scale", "wep", "2"), "did you mean 'web'? Services: api, web"),
        (("logs", "../plan"), "there is no service '../plan'"),
        (("status", "-o", "yaml"), "--output: expected text or json, found 'yaml'"),
        (("why", "wep"), "did you mean 'web'? Services: api, web"),
        (("events", "--service", "wep"), "did you mean 'web'? Services: api, web"),
        (("events", "--kind", "replica_redy"), "kind: there are no events of kind 'replica_redy'; kinds: add_server, "),
        (("events", "-f", "--kind", "nope"), "replica_ready, "),
        (("events", "--since", "soon"), "--since: expected a time ago such as 10m or 2h30m"),
        (("events", "-n", "0"), "Invalid value for '-n'"),
        (("top", "--interval", "x"), "Invalid value for '--interval'"),
        (("statsu",), "Did you mean 'status'?"),
        (("scale", "web"), "Missing argument 'N'. (`pierhead scale --help` explains it)"),
        (("status", "--wide"), "No such option: --wide"),
        (("completion", "tcsh"), "SHELL: expected bash, zsh, fish, found 'tcsh'"),
    ],
)
async def test_bad_input_is_one_message_and_exit_code_two(
    control: Control, arguments: tuple[str, ...], words: str
) -> None:
    async with served(control) as pierhead:
        await control.settled("web", 2)
        done = await pierhead(*arguments)
        assert (done.code, done.out) == (2, "")
        assert words in done.err
        assert len(done.err.splitlines()) == 1
        assert control.store.overrides == {}


async def test_a_gpu_shortage_ends_the_wait_at_once(tmp_path: Path) -> None:
    control = Control.of(tmp_path, gpu_service("ranker", replicas=1))
    control.engine.gpus = gpus(2)
    async with served(control) as pierhead:
        await control.settled("ranker", 1)
        done = await pierhead("scale", "ranker", "3")
        assert done.code == 1
        assert "ranker: 2 of 3 ready; 1 pending: it asks for 1 GPU and 0 of 2 are free" in done.err
        assert "The target stays 3" in done.err


async def test_status_shows_memory_and_slots_of_gpus(tmp_path: Path) -> None:
    gib = 1024**3
    half = GpuRequest(1, slot=GpuSlot(memory_bytes=16 * gib))
    control = Control.of(tmp_path, gpu_service("llm", replicas=2, gpu=half))
    control.engine.gpus = tuple(Gpu(f"GPU-{n}", name="L40", memory_bytes=48 * gib) for n in range(3))
    control.engine.gpu_memory = {"GPU-0": gib // 2, "GPU-1": 40 * gib}
    async with served(control) as pierhead:
        await control.settled("llm", 2)
        done = await pierhead("status")
        assert (done.code, done.err) == (0, "")
        shown = done.out.splitlines()
        (row,) = [line for line in shown if line.startswith("GPU-0")]
        assert row.split()[:8] == ["GPU-0", "L40", "48.0", "GiB", "0.5", "GiB", "16.0", "GiB"]
        assert "(16 GiB)" in row
        ends = [line.rsplit("GiB", 1)[1].strip() for line in shown if line.startswith(("GPU-1", "GPU-2"))]
        assert ends == ["other processes", "free"]


async def test_the_wait_has_an_end(control: Control) -> None:
    control.engine.behaviours["web"] = Behaviour(ready_after_s=3600)
    async with served(control) as pierhead:
        done = await pierhead("scale", "web", "3", "--timeout", "0.5")
        assert done.code == 4
        assert "not there after 0.5 s: web: 0 of 3 ready; 3 starting" in done.err


async def test_auto_without_an_autoscaler_goes_back_to_the_files_number(control: Control) -> None:
    async with served(control) as pierhead:
        await control.settled("web", 2)
        control.controller.commands.scale("web", 4)
        await control.settled("web", 4)
        done = await pierhead("scale", "web", "auto")
        assert (done.code, done.out) == (0, "web: the compose files decide, 2 replicas\nweb: 2 of 2 ready\n")
        assert control.row("web") == (2, 2, 2)
        assert control.store.overrides == {}
        done = await pierhead("scale", "web", "auto", "-o", "json")
        assert json.loads(done.out) == {
            "service": "web",
            "replicas": "auto",
            "message": "web: 2 of 2 ready",
            "wanted": 2,
            "done": True,
        }


async def test_interrupted_it_leaves_the_target(control: Control) -> None:
    control.engine.behaviours["web"] = Behaviour(ready_after_s=3600)
    async with served(control) as pierhead:
        process = await pierhead.begin("scale", "web", "3")
        await until(lambda: control.store.overrides, within_s=20)
        assert process.stderr is not None
        async with asyncio.timeout(20):
            while b"of 3 ready" not in await process.stderr.readline():
                pass
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            _, err = await process.communicate()
        assert process.returncode == 1
        assert "Not waiting any more. The target stays 3" in err.decode()
        assert control.store.overrides["web"].replicas == 3


async def test_interrupted_while_it_is_imported_it_ends_without_a_word(tmp_path: Path) -> None:
    slow = "import sys\nprint('importing', flush=True)\nsys.stdin.read()\n"
    (tmp_path / "typer.py").write_text(slow)
    process = await Command("http://127.0.0.1:1").begin("status", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert process.stdout is not None
    async with asyncio.timeout(20):
        assert await process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert (process.returncode, err) == (130, b"")


async def test_who_is_overtaken_at_once_is_told_so(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(control) as pierhead:
        await control.settled("web", 2)
        scale = control.controller.commands.scale

        def overtaken(service: str, replicas: int | None) -> str:
            said = scale(service, replicas)
            scale(service, 3)
            return said

        monkeypatch.setattr(control.controller.commands, "scale", overtaken)
        done = await pierhead("scale", "web", "5", "--timeout", "20")
        assert (done.code, done.out) == (1, "")
        assert done.err.splitlines()[-1] == "web: somebody else set the target to 3 meanwhile"


async def test_a_version_that_was_rolled_back_fails_the_wait_at_once_and_again(control: Control) -> None:
    good, bad = service("web"), service("web", definition_hash="d2", rollout=RolloutSpec(bake_s=0.1))
    other = service("api", replicas=1)
    version = current_version(bad, control.engine.images)
    assert version is not None
    control.engine.behaviours[version] = Behaviour(exits_after_s=0.0, exit_code=1, output="no such model\n")
    async with served(control) as pierhead:
        await control.settled("web", 2)
        control.source.edit(bad, other)
        await until(lambda: "rolled_back" in control.kinds(), within_s=20)
        for arguments in ((), ("--serving",)):
            done = await pierhead("wait-ready", *arguments)
            assert (done.code, done.out) == (1, "")
            said = f"web: the files ask for version {version}, which was rolled back: it does not become ready"
            assert said in done.err
            assert "with `pierhead deploy web`." in done.err
        assert control.row("web") == (2, 2, 2)
        control.source.edit(good, other)
        done = await pierhead("wait-ready", "--serving")
        assert done.code == 0, f"what was corrected a moment ago is read first: {done.err}"


async def test_files_that_cannot_be_used_are_bad_input(control: Control) -> None:
    control.source.error = SpecError(["services.web.x-serve.rout: unknown key"])
    async with served(control) as pierhead:
        await until(lambda: control.view.spec_problems)
        done = await pierhead("wait-ready")
        assert done.code == 2
        assert done.err.count("services.web.x-serve.rout: unknown key") == 1, "told once, and not while it waits too"
        assert "services.web.x-serve.rout: unknown key" in (await pierhead("status")).out
        done = await pierhead("plan")
        assert done.code == 2
        assert done.out == "no plan: the compose files cannot be used\nservices.web.x-serve.rout: unknown key\n"


async def test_a_plan_of_the_last_good_files_says_so(control: Control) -> None:
    async with served(control) as pierhead:
        await pierhead("wait-ready", "--timeout", "20")
        control.source.error = SpecError(["services.web.x-serve.rout: unknown key"])
        await control.controller.specs.read_again()
        await until(lambda: control.view.spec_problems)
        done = await pierhead("plan")
        assert done.code == 2
        assert done.out.splitlines() == [
            "the compose files cannot be used; what follows is the plan of the last good ones:",
            "services.web.x-serve.rout: unknown key",
            "nothing to do",
        ]
        done = await pierhead("plan", "-o", "json")
        assert done.code == 2
        assert json.loads(done.out)["spec_problems"] == ["services.web.x-serve.rout: unknown key"]
        control.source.error = None
        await control.controller.specs.read_again()
        await until(lambda: not control.view.spec_problems)
        done = await pierhead("plan")
        assert (done.code, done.out) == (0, "nothing to do\n")


async def test_no_controller_is_one_line() -> None:
    done = await Command(f"http://127.0.0.1:{unused_port()}")("status")
    assert done.code == 3
    assert "start the stack with `make up`" in done.err
    assert len(done.err.splitlines()) == 1


def test_exit_codes_are_told_where_people_look() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "controller.cli", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for code, words in EXIT_CODES.items():
        assert f"{code:3}  {words}" in done.stdout


async def test_a_gpu_is_taken_out_of_use_and_back(control: Control) -> None:
    control.engine.gpus = gpus(2)
    async with served(control) as pierhead:
        await pierhead("wait-ready", "--timeout", "20")
        assert (await pierhead("mark", "GPU-1", "Xid 79 in the kernel's log")).code == 0
        await until(lambda: any(gpu.fault for gpu in control.view.gpus))
        done = await pierhead("status")
        assert "not used: Xid 79 in the kernel's log" in done.out
        assert (await pierhead("unmark", "GPU-1")).code == 0
        done = await pierhead("mark", "GPU-0", "loud  fan", "-o", "json")
        assert (done.code, json.loads(done.out)) == (0, {"gpu": "GPU-0", "fault": "loud fan"})
        done = await pierhead("unmark", "GPU-0", "-o", "json")
        assert (done.code, json.loads(done.out)) == (0, {"gpu": "GPU-0", "fault": None})
        done = await pierhead("unmark", "GPU-1")
        assert (done.code, "GPU GPU-1 has no mark; with one: none" in done.err) == (2, True)
        done = await pierhead("mark", "GPU-7", "loud fan")
        assert (done.code, "this machine has GPU-0, GPU-1" in done.err) == (2, True)
