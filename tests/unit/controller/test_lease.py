"""Two controllers by mistake: one works, the other one refuses and says why; a dead one is followed at once."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from controller.errors import AnotherController, StoreError
from controller.storage.lock import LOCK_NAME, state_lock
from controller.swarm.state.configs import Config, SwarmDocument
from controller.swarm.state.holder import StateHolder, state_lease
from controller.swarm.state.lease import NOBODY, Claim
from tests.fakes.fake_swarm_configs import FakeSwarm

PROJECT = "shop"

HOLD = """
import asyncio, sys
from pathlib import Path
from controller.storage.lock import state_lock

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


async def test_a_killed_one_is_followed_at_once(tmp_path: Path) -> None:
    async with holder(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        async with state_lock(tmp_path, PROJECT, patience_s=0.0):
            assert (tmp_path / LOCK_NAME).exists()


async def test_one_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    async with holder(tmp_path) as process:
        asyncio.get_running_loop().call_later(0.2, process.kill)
        async with asyncio.timeout(10), state_lock(tmp_path, PROJECT, patience_s=10.0):
            assert (tmp_path / LOCK_NAME).exists()


async def test_an_error_of_the_holder_is_passed_on_and_the_lock_released(tmp_path: Path) -> None:
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


async def test_a_lease_that_is_lost_ends_the_work_and_one_that_is_given_back_is_taken_at_once() -> None:
    swarm = FakeSwarm()
    managers = [swarm.manager() for _ in range(2)]
    first, second = (StateHolder(SwarmDocument(manager, "shop_pierhead-state")) for manager in managers)
    swarm.configs["shop_pierhead-state"] = Config("shop_pierhead-state", 1, Claim(NOBODY, 0, 0).labels(), b"{}")

    async def overtaken() -> None:
        async with state_lease(second):
            third = Claim("a third one", swarm.version + 1, 0)
            await managers[0].update("shop_pierhead-state", swarm.version, third.labels())
            await asyncio.Event().wait()

    async with asyncio.timeout(10):
        assert await first.take(asyncio.Event())
        async with state_lease(first):
            assert first.acts()
        assert not first.acts()
        assert await second.take(asyncio.Event())
        with pytest.raises(AnotherController, match="a third one"):
            await overtaken()
    stop = asyncio.Event()
    stop.set()
    assert not await first.take(stop), "a controller that is to end does not wait for the lease"
