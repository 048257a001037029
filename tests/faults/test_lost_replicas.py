"""One of two replicas is lost under load: how soon it is noticed, what fails, and that nothing fails any more then.

What may fail is what the lost replica may have begun: calls are never repeated for their caller, so that is the least.
How soon is judged last, and where the machine gave these processes their cores.
"""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from pierhead import ReplicaDied

from tests.faults.callers import Callers
from tests.faults.networks import island
from tests.faults.processes import Fleet, Running
from tests.harness.machine import Pace, judge
from tests.unit.runtime.harness import until

both_transports = pytest.mark.parametrize("transport", ["lane", pytest.param("grpc", marks=pytest.mark.long)])

SILENT_S = 5.0
"""A peer that says nothing is given up after so long: it is pinged after 2 s without a word, and has 3 s to answer."""

CALLER_SILENT_S = 15.0
"""A replica pings less often, as it has many callers: after 10 s without a word, with 5 s for the answer."""

BROKEN_S = 0.5
"""The kernel tells at once that a connection is broken."""

SLACK_S = 1.5
"""What busy cores may add."""

PATIENCE_S = 60.0
"""For what has to happen, however long it takes."""

ENOUGH = 500
"""Calls that have to go well before a test believes that things go well."""


class Loss:
    """From the moment before a replica is lost; `noticed` and what follows hold the world to what is promised."""

    def __init__(self, callers: Callers, replica: Running) -> None:
        self._callers = callers
        self._replica = replica
        self._since = self._looked_at = time.monotonic()
        self._begun = callers.at(replica)

    def _is_noticed(self) -> bool:
        if not self._callers.is_connected(self._replica):
            return True
        # The most that were there at a time: calls may learn of the loss one by one, before their connection does.
        self._looked_at, self._begun = time.monotonic(), max(self._begun, self._callers.at(self._replica))
        return False

    async def noticed(self) -> float:
        """Wait until callers know; then only what the replica may have begun has failed, and nothing fails again.

        Returns after how many seconds they knew.
        """
        callers, replica = self._callers, self._replica
        await until(self._is_noticed, f"{replica.name} is given up", PATIENCE_S)
        noticed_at = time.monotonic()
        await until(lambda: callers.at(replica) == 0, f"no call is at {replica.name} any more", PATIENCE_S)
        await callers.go_well(ENOUGH)
        between = sum(self._looked_at <= made.began <= noticed_at for made in callers.made)
        failed = callers.failed
        print(
            f"{replica.name} lost: noticed after {noticed_at - self._since:.3f} s, {len(failed)} calls failed, "
            f"{self._begun} were there, {len(callers.made)} made"
        )
        assert all(isinstance(made.error, ReplicaDied) for made in failed), callers.errors()
        assert all(made.began <= noticed_at for made in failed), "a call that began after the loss was known has failed"
        assert len(failed) <= self._begun + between, callers.errors()
        return noticed_at - self._since


async def in_the_midst(callers: Callers, *replicas: Running) -> None:
    """Wait until each has answered much, and several calls are at the last one at this moment."""
    since = time.monotonic()
    for replica in replicas:
        await until(lambda: callers.answered_by(replica, since) > 50, f"{replica.name} answers", PATIENCE_S)  # noqa: B023
    await until(lambda: callers.at(replicas[-1]) > 4, f"calls are at {replicas[-1].name}", PATIENCE_S)


async def is_used_again(callers: Callers, replica: Running) -> None:
    """Wait until it answers calls; no further call fails meanwhile, nor soon after."""
    failed, since = len(callers.failed), time.monotonic()
    await until(lambda: callers.answered_by(replica, since) > 0, f"{replica.name} is used again", PATIENCE_S)
    await callers.go_well(ENOUGH)
    assert len(callers.failed) == failed, callers.errors()


def judge_time(pace: Pace, noticed_s: float, within_s: float) -> None:
    """Whether the loss was noticed in time."""
    judge(noticed_s <= within_s + SLACK_S, f"given up after {within_s:g} s, and it was {noticed_s:.1f} s", pace)


@both_transports
async def test_a_replica_that_hangs(fleet: Fleet, transport: str) -> None:
    stays, hangs = await fleet.workers("stays", "hangs")
    with Pace() as pace:
        async with Callers([stays, hangs], transport) as callers:
            await in_the_midst(callers, stays, hangs)
            loss = Loss(callers, hangs)
            hangs.send(signal.SIGSTOP)
            noticed_s = await loss.noticed()
            hangs.send(signal.SIGCONT)
            await is_used_again(callers, hangs)
    judge_time(pace, noticed_s, SILENT_S)


@both_transports
async def test_a_replica_that_is_killed_and_started_again_at_its_address(fleet: Fleet, transport: str) -> None:
    stays, dies = await fleet.workers("stays", "dies")
    with Pace() as pace:
        async with Callers([stays, dies], transport) as callers:
            await in_the_midst(callers, stays, dies)
            loss = Loss(callers, dies)
            dies.send(signal.SIGKILL)
            noticed_s = await loss.noticed()
            again = await fleet.start("worker", "again", host=dies.host)
            await is_used_again(callers, again)
    judge_time(pace, noticed_s, BROKEN_S)


@both_transports
async def test_a_replica_whose_cable_is_pulled(fleet: Fleet, transport: str) -> None:
    with island() as far_away, Pace() as pace:
        near = await fleet.start("worker", "near")
        far = await fleet.start("worker", "far", host=far_away.host, inside=far_away.inside)
        async with Callers([near, far], transport) as callers:
            await in_the_midst(callers, near, far)
            loss = Loss(callers, far)
            far_away.pull_the_cable()
            noticed_s = await loss.noticed()
            far_away.plug_it_in()
            await is_used_again(callers, far)
    judge_time(pace, noticed_s, SILENT_S)


@pytest.mark.long
async def test_a_replica_that_is_cut_off_stops_working_for_its_callers(fleet: Fleet) -> None:
    with island() as far_away, Pace() as pace:
        far = await fleet.start("worker", "far", host=far_away.host, inside=far_away.inside)
        async with Callers([far], "lane", count=0, timeout_s=4 * PATIENCE_S) as callers:
            long_ones = [asyncio.create_task(callers.one(work_ms=3_600_000)) for _ in range(8)]
            await until(lambda: far.metric("pierhead_ongoing_requests") == 8, "all are worked on", PATIENCE_S)
            far_away.pull_the_cable()
            since = time.monotonic()
            await until(lambda: far.metric("pierhead_ongoing_requests") == 0, "none is worked on", PATIENCE_S)
            took_s = time.monotonic() - since
            print(f"the replica gave its callers up after {took_s:.1f} s")
            ended = await asyncio.gather(*long_ones, return_exceptions=True)
            assert [type(error) for error in ended] == [ReplicaDied] * 8
    judge_time(pace, took_s, CALLER_SILENT_S)


@both_transports
async def test_a_replica_that_is_told_to_stop_loses_no_call(fleet: Fleet, transport: str) -> None:
    stays, goes = await fleet.workers("stays", "goes")
    async with Callers([stays, goes], transport) as callers:
        await in_the_midst(callers, stays, goes)
        goes.send(signal.SIGTERM)
        assert await goes.ended() == 0
        await callers.go_well(ENOUGH)
        again = await fleet.start("worker", "again", host=goes.host)
        await is_used_again(callers, again)
    assert not callers.failed, callers.errors()
