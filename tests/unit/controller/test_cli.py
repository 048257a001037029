"""The `pierhead` command, as a process against a real API; and the pure parts of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port
from hypothesis import given
from hypothesis import strategies as st

from controller.api import Api
from controller.callers import Gatekeeper
from controller.cli.tables import event_line
from controller.cli.wait import ScaleWait, TargetMovedError, judge_all, new_lines
from controller.errors import SpecError
from tests.fakes.fake_engine import Behaviour
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import gpu_service, gpus, service

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Command:
    """Runs `pierhead` against one API."""

    url: str

    async def begin(self, *arguments: str) -> Process:
        env = {**os.environ, "PIERHEAD_API_URL": self.url, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        command = [sys.executable, "-m", "controller.cli", *arguments]
        return await asyncio.create_subprocess_exec(
            *command, stdout=PIPE, stderr=PIPE, env=env, cwd="/", preexec_fn=hear_interrupts
        )

    async def __call__(self, *arguments: str) -> Done:
        process = await self.begin(*arguments)
        async with asyncio.timeout(30):
            out, err = await process.communicate()
        return Done(process.returncode or 0, out.decode(), err.decode())


def hear_interrupts() -> None:
    """A test run in the background hands on that Ctrl-C is ignored; the command is typed in a terminal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.asynccontextmanager
async def served(control: Control) -> AsyncIterator[Command]:
    async with control.running() as loop:
        runner = web.AppRunner(Api(loop, Gatekeeper(None, frozenset)).application(), shutdown_timeout=0.1)
        await runner.setup()
        port = unused_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield Command(f"http://127.0.0.1:{port}")
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("scale", "web", "-1"), "N: expected an integer from 0 to 1000, or auto, found '-1'"),
        (("scale", "web", "abc"), "N: expected an integer from 0 to 1000, or auto, found 'abc'"),
        (("scale", "wep", "2"), "did you mean 'web'? Services: api, web"),
        (("logs", "../plan"), "there is no service '../plan'"),
        (("status", "-o", "yaml"), "--output: expected text or json, found 'yaml'"),
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


async def test_the_wait_has_an_end(control: Control) -> None:
    control.engine.behaviours["web"] = Behaviour(ready_after_s=3600)
    async with served(control) as pierhead:
        done = await pierhead("scale", "web", "3", "--timeout", "0.5")
        assert done.code == 1
        assert "not there after 0.5 s: web: 0 of 3 ready; 3 starting" in done.err


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


async def test_files_that_cannot_be_used_are_bad_input(control: Control) -> None:
    control.source.error = SpecError(["services.web.x-serve.rout: unknown key"])
    async with served(control) as pierhead:
        await until(lambda: control.loop.view.spec_problems)
        done = await pierhead("wait-ready")
        assert done.code == 2
        assert "services.web.x-serve.rout: unknown key" in done.err
        assert "services.web.x-serve.rout: unknown key" in (await pierhead("status")).out


async def test_no_controller_is_one_line() -> None:
    done = await Command(f"http://127.0.0.1:{unused_port()}")("status")
    assert done.code == 1
    assert "start the stack with `make up`" in done.err
    assert len(done.err.splitlines()) == 1


# ---------------------------------------------------------------------------------------------------------- pure parts


def row(**changes: Any) -> dict[str, Any]:
    plain = {"name": "web", "wanted": 2, "ready": 2, "message": "", "converged": True, "blocked": ""}
    return {**plain, **changes}


def test_a_scale_waits_until_the_world_agrees() -> None:
    wait = ScaleWait(2)
    assert "not taken up" in wait.judge(row(wanted=4)).message
    verdict = wait.judge(row(ready=2, converged=False, message="2 draining"))
    assert (verdict.done, verdict.message) == (False, "web: 2 of 2 ready; 2 draining")
    assert wait.judge(row()).done
    assert wait.judge(row(converged=False, blocked="no GPU")).hopeless
    with pytest.raises(TargetMovedError, match="to 5 meanwhile"):
        wait.judge(row(wanted=5))


def all_of(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"services": rows, "spec_problems": [], "notices": [], "settled": True, **changes}


def test_everything_is_waited_for_before_the_hopeless_are_told() -> None:
    blocked = row(name="ranker", converged=False, blocked="no GPU")
    starting = row(name="api", converged=False, message="1 starting")
    assert not judge_all(all_of(blocked, starting)).hopeless
    assert judge_all(all_of(blocked, row())).hopeless
    assert judge_all(all_of(row(), row(name="api"))).message == "2 services, 4 replicas, all ready"
    assert not judge_all(all_of(settled=False)).done
    assert judge_all(all_of(spec_problems=["x"])).exit_code == 2


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(0, 30), st.integers(1, 10))
def test_followed_logs_lose_no_line(log: list[str], seen: int, tail: int) -> None:
    before, now = log[:seen][-tail:], log[-tail:]
    fresh = new_lines(before, now)
    assert now[len(now) - len(fresh) :] == fresh
    assert len(fresh) <= max(len(log) - seen, 0) or not before


def test_followed_logs_of_distinct_lines_are_exact() -> None:
    log = [str(number) for number in range(20)]
    assert new_lines(log[:10][-8:], log[:12][-8:]) == ["10", "11"]
    assert new_lines([], log) == log
    assert new_lines(log, log) == []
    assert new_lines(log[:5], log[10:]) == log[10:], "more was logged than is shown at once"


def test_an_event_on_its_lines() -> None:
    event = {"at": 0.0, "outcome": "failed", "message": "web-1: exited\nlast line", "times": 3}
    first, second = event_line(event).splitlines()
    assert first.endswith(" FAILED  web-1: exited (3 times)")
    assert second.strip() == "last line"


async def test_a_gpu_is_taken_out_of_use_and_back(control: Control) -> None:
    control.engine.gpus = gpus(2)
    async with served(control) as pierhead:
        await pierhead("wait-ready", "--timeout", "20")
        assert (await pierhead("mark", "GPU-1", "Xid 79 in the kernel's log")).code == 0
        await until(lambda: any(gpu.fault for gpu in control.loop.view.gpus))
        done = await pierhead("status")
        assert "not used: Xid 79 in the kernel's log" in done.out
        assert (await pierhead("unmark", "GPU-1")).code == 0
        done = await pierhead("unmark", "GPU-1")
        assert (done.code, "GPU GPU-1 has no mark; with one: none" in done.err) == (2, True)
        done = await pierhead("mark", "GPU-7", "loud fan")
        assert (done.code, "this machine has GPU-0, GPU-1" in done.err) == (2, True)
