"""Two controllers by mistake: one works, the other one refuses and says why; a dead one is followed at once."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from controller.engines.base import RunningController
from controller.errors import AnotherController, StoreError
from controller.lease import LOCK_NAME, only_controller, own_container_id, state_lock
from tests.fakes.fake_engine import FakeEngine
from tests.harness.machine import Pace, judge
from tests.harness.waiting import PATIENCE_S

PROJECT = "shop"
FIRST = RunningController("a" * 64, "shop-controller-1", 1000.0)
SECOND = RunningController("b" * 64, "shop-controller-run-77", 1001.0)

HOLD = """
import asyncio, sys
from pathlib import Path
from controller.lease import state_lock

async def hold():
    async with state_lock(Path(sys.argv[1]), "shop"):
        print("held", flush=True)
        await asyncio.sleep(600)

asyncio.run(hold())
"""


@asynccontextmanager
async def holder(directory: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another process that holds the state."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLD, str(directory)), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            assert await process.stdout.readline() == b"held\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_second_one_on_the_same_state_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    async with holder(tmp_path) as process:
        with pytest.raises(AnotherController) as refusal:
            async with state_lock(tmp_path, PROJECT, patience_s=0.2):
                pytest.fail("both hold the state")
        said = str(refusal.value)
        assert "project shop" in said
        assert f"process {process.pid}" in said
        assert re.search(r"since \d{4}-\d\d-\d\dT", said)
        assert "docker stop" in said
        assert refusal.value.exit_code == 3
        assert os.listdir(tmp_path) == [LOCK_NAME], "a refused one leaves no trace"


async def test_a_killed_one_is_followed_at_once(tmp_path: Path, pace: Pace) -> None:
    async with holder(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        began = time.monotonic()
        async with state_lock(tmp_path, PROJECT, patience_s=0.0):
            took_s = time.monotonic() - began
    judge(took_s < 1.0, f"followed at once, and it was {took_s:.1f} s", pace)


async def test_one_that_ends_meanwhile_is_waited_for(tmp_path: Path) -> None:
    async with holder(tmp_path) as process:
        asyncio.get_running_loop().call_later(0.2, process.kill)
        async with asyncio.timeout(10), state_lock(tmp_path, PROJECT, patience_s=10.0):
            assert (tmp_path / LOCK_NAME).exists()


async def test_what_fails_within_is_not_taken_for_the_lock(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="port in use"):
        async with state_lock(tmp_path, PROJECT):
            raise OSError("port in use")
    async with state_lock(tmp_path, PROJECT, patience_s=0.0):
        pass


async def test_a_state_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="state directory"):
        async with state_lock(tmp_path / "file" / "state", PROJECT):
            pass


async def test_of_two_with_states_of_their_own_the_first_stays() -> None:
    engine = FakeEngine(time.time)
    for order in itertools.permutations([FIRST, SECOND]):
        engine.daemons[PROJECT] = list(order)
        await only_controller(engine, PROJECT, FIRST.id, patience_s=0.0)
        with pytest.raises(AnotherController) as refusal:
            await only_controller(engine, PROJECT, SECOND.id, patience_s=0.0)
        assert "container shop-controller-1 (aaaaaaaaaaaa), running since 1970-01-01T00:16:40+00:00" in str(
            refusal.value
        )


async def test_of_two_started_in_the_same_moment_exactly_one_stays() -> None:
    engine = FakeEngine(time.time)
    twins = [RunningController(letter * 64, letter, 1000.0) for letter in "ba"]
    engine.daemons[PROJECT] = twins
    stayed = []
    for one in twins:
        try:
            await only_controller(engine, PROJECT, one.id, patience_s=0.0)
        except AnotherController:
            continue
        stayed.append(one.name)
    assert stayed == ["a"]


async def test_other_projects_do_not_matter() -> None:
    engine = FakeEngine(time.time, daemons={"other": [FIRST]})
    await only_controller(engine, PROJECT, SECOND.id, patience_s=0.0)
    await only_controller(engine, PROJECT, None, patience_s=0.0)


async def test_one_outside_of_containers_never_takes_over_from_one_inside() -> None:
    engine = FakeEngine(time.time, daemons={PROJECT: [FIRST]})
    with pytest.raises(AnotherController):
        await only_controller(engine, PROJECT, None, patience_s=0.0)


async def test_one_whose_end_the_engine_has_not_heard_of_yet_is_waited_for() -> None:
    engine = FakeEngine(time.time, daemons={PROJECT: [FIRST, SECOND]})
    asyncio.get_running_loop().call_later(0.2, engine.daemons[PROJECT].remove, FIRST)
    async with asyncio.timeout(PATIENCE_S):
        await only_controller(engine, PROJECT, SECOND.id, patience_s=5.0)


def test_a_container_knows_itself(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"602 580 254:1 /lib/docker/containers/{FIRST.id}/resolv.conf /etc/resolv.conf rw - ext4 /dev/vda rw\n"
    )
    assert own_container_id(mounts) == FIRST.id
    mounts.write_text("21 1 254:1 / / rw - ext4 /dev/vda rw\n")
    assert own_container_id(mounts) is None
    assert own_container_id(tmp_path / "absent") is None
