"""A HAProxy that hangs is restarted after a bounded silence; one whose answers cannot be read is named in status."""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest

from controller.daemon.assembly import Controller
from controller.errors import EngineError, RoutingError
from controller.model.actions import RestartRouter
from controller.model.desired import Desired
from controller.model.observed import Observed
from controller.model.world import RouterSilence
from controller.plan import plan
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import service

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, service("web"))


def restarts(control: Control) -> list[RestartRouter]:
    return [action for action in control.engine.done if isinstance(action, RestartRouter)]


def planned(silent_s: float, restarts: int = 0, limit_s: float = 10.0, **changes: Any) -> tuple[str, float | None]:
    silence = RouterSilence(since=1000.0, restarts=restarts)
    seen = Observed(router_silence=silence, **changes)
    made = plan(Desired(project="p", router_silence_s=limit_s), seen, 1000.0 + silent_s)
    return str(made), made.next_look_s


def test_a_restart_is_planned_after_the_silence_and_later_after_each_one_that_did_not_help() -> None:
    assert planned(9.0) == ("nothing to do", 1.0)
    cause = "HAProxy hangs: neither its runtime API nor its HTTP port has answered for"
    assert planned(10.0) == (f"#1 kill and start haproxy: {cause} 10 s", None)
    assert planned(10.0, in_progress=(RestartRouter(target="haproxy"),)) == ("nothing to do", None)
    assert planned(4.0, limit_s=3.0) == (f"#1 kill and start haproxy: {cause} 4 s", None)
    assert planned(10.0, restarts=1) == ("nothing to do", 10.0)
    assert planned(20.0, restarts=1)[0] == f"#1 kill and start haproxy: {cause} 20 s"
    assert planned(319.0, restarts=50) == ("nothing to do", 1.0), "32 times as late at most"
    assert planned(320.0, restarts=50)[0].startswith("#1 kill and start haproxy")


async def test_a_haproxy_that_hangs_is_restarted_until_it_helps_and_gets_its_servers_back(control: Control) -> None:
    at: list[float] = []

    def restarted() -> None:
        at.append(control.clock())
        if len(at) == 4:
            control.router.hangs = False
            control.router.restart()

    control.engine.restart_router = restarted
    async with control.running(web=2):
        control.router.hangs = True
        at.append(control.clock())
        await until(lambda: not control.router.hangs, within_s=300.0)
        await until(lambda: len(control.router.ready("web")) == 2, within_s=2.0)
        words = "neither its runtime API nor its HTTP port has answered for 1"
        assert words in control.said("restart_router")[0]
    assert at[1] - at[0] < 12.0
    waits = [later - earlier for earlier, later in itertools.pairwise(at)]
    for wait, least in zip(waits, (10.0, 20.0, 40.0), strict=True):
        assert least <= wait < least + 5.0


async def test_a_haproxy_whose_http_port_answers_is_not_restarted(control: Control) -> None:
    async with control.running(web=2):
        control.router.up = False  # the runtime API alone is silent
        await asyncio.sleep(100.0)
        assert restarts(control) == []


async def test_a_restart_that_the_engine_refuses_is_reported_and_tried_again(control: Control) -> None:
    async with control.running(web=2) as loop:
        control.engine.fail_next(RestartRouter, EngineError("Compose made no container of service haproxy"))
        control.engine.restart_router = lambda: setattr(control.router, "hangs", False)
        control.router.hangs = True
        await until(lambda: _notice(loop, "Compose made no container of service haproxy"), within_s=30.0)
        await until(lambda: not control.router.hangs, within_s=60.0)


async def test_why_haproxys_answers_cannot_be_read_is_an_error_that_status_shows(
    control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    async with control.running(web=2) as loop:
        words = "HAProxy's answers cannot be read: KeyError('Pid'); is this really HAProxy 3.0 or newer?"
        control.router.problem = RoutingError(words)
        await until(lambda: _notice(loop, words))
        await asyncio.sleep(30.0)
        told = [record for record in caplog.records if words in record.getMessage()]
        assert [record.levelno for record in told] == [logging.WARNING], "once, not in every tick"
        assert restarts(control) == [], "it answers: it does not hang"
        control.router.problem = None
        await until(lambda: not loop.view.notices)


def _notice(loop: Controller, words: str) -> bool:
    return any(words in notice for notice in loop.view.notices)
