"""One of two replicas is lost under load: how soon it is noticed, what fails, and that nothing fails any more then.

What may fail is what the lost replica may have begun: calls are never repeated for their caller, so that is the least.
How soon it is noticed is printed: 5 s after the last word of a replica that hangs or whose cable is pulled, 15 s where
the replica notices that its callers are cut off.
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
from tests.unit.runtime.harness import until

PLAIN = pytest.param("grpc", marks=pytest.mark.long)
both_transports = pytest.mark.parametrize("transport", ["lane", PLAIN])
every_way = pytest.mark.parametrize("way", ["lane", "lane at a socket", PLAIN])

NOTICED_S = 25.0
"""A loss is noticed by then on a machine that is busy, too; without keep-alive pings it would take minutes."""

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

    async def noticed(self) -> None:
        """Wait until callers know; then only what the replica may have begun has failed, and nothing fails again."""
        callers, replica = self._callers, self._replica
        await until(self._is_noticed, f"{replica.name} is given up", NOTICED_S)
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


def prepared(fleet: Fleet, way: str) -> str:
    """The transport that callers of the fleet use."""
    transport, _, place = way.partition(" ")
    if place:
        fleet.use_sockets()
    return transport


async def in_the_midst(callers: Callers, *replicas: Running) -> None:
    """Wait until each has answered much, and several calls are at the last one at this moment."""
    since = time.monotonic()
    for replica in replicas:
        await until(lambda: callers.answered_by(replica, since) > 50, f"{replica.name} answers", PATIENCE_S)  # noqa: B023
    await until(lambda: callers.at(replicas[-1]) > 4, f"calls are at {replicas[-1].name}", PATIENCE_S)


async def is_used_again(callers: Callers, replica: Running) -> None:
    """Wait until it answers calls; no further call fails until then, nor soon after."""
    failed, since = len(callers.failed), time.monotonic()
    await until(lambda: callers.answered_by(replica, since) > 0, f"{replica.name} is used again", PATIENCE_S)
    await callers.go_well(ENOUGH)
    assert len(callers.failed) == failed, callers.errors()


@pytest.mark.parametrize("dies", [False, True], ids=["it hangs", "it is killed, and started again at its address"])
@every_way
async def test_a_replica_that_answers_no_more(fleet: Fleet, way: str, dies: bool) -> None:
    transport = prepared(fleet, way)
    stays, lost = await fleet.workers("stays", "lost")
    async with Callers([stays, lost], transport) as callers:
        await in_the_midst(callers, stays, lost)
        loss = Loss(callers, lost)
        lost.send(signal.SIGKILL if dies else signal.SIGSTOP)
        await loss.noticed()
        if dies:
            lost = await fleet.start("worker", "again", host=lost.host)
        else:
            lost.send(signal.SIGCONT)
        await is_used_again(callers, lost)


@both_transports
async def test_a_replica_whose_cable_is_pulled(fleet: Fleet, transport: str) -> None:
    with island() as far_away:
        near = await fleet.start("worker", "near")
        far = await fleet.start("worker", "far", host=far_away.host, inside=far_away.inside)
        async with Callers([near, far], transport) as callers:
            await in_the_midst(callers, near, far)
            loss = Loss(callers, far)
            far_away.pull_the_cable()
            await loss.noticed()
            far_away.plug_it_in()
            await is_used_again(callers, far)


@pytest.mark.long
async def test_a_replica_that_is_cut_off_stops_working_for_its_callers(fleet: Fleet) -> None:
    with island() as far_away:
        far = await fleet.start("worker", "far", host=far_away.host, inside=far_away.inside)
        async with Callers([far], "lane", count=0, timeout_s=4 * PATIENCE_S) as callers:
            long_ones = [asyncio.create_task(callers.one(work_ms=3_600_000)) for _ in range(8)]
            await until(lambda: far.metric("pierhead_ongoing_requests") == 8, "all are worked on", PATIENCE_S)
            far_away.pull_the_cable()
            since = time.monotonic()
            await until(lambda: far.metric("pierhead_ongoing_requests") == 0, "none is worked on", NOTICED_S)
            took_s = time.monotonic() - since
            print(f"the replica gave its callers up after {took_s:.1f} s")
            ended = await asyncio.gather(*long_ones, return_exceptions=True)
            assert [type(error) for error in ended] == [ReplicaDied] * 8


@every_way
async def test_a_replica_that_is_stopped_loses_no_call(fleet: Fleet, way: str) -> None:
    transport = prepared(fleet, way)
    stays, goes = await fleet.workers("stays", "goes")
    async with Callers([stays, goes], transport) as callers:
        await in_the_midst(callers, stays, goes)
        goes.send(signal.SIGTERM)
        assert await goes.ended() == 0
        await callers.go_well(ENOUGH)
        again = await fleet.start("worker", "again", host=goes.host)
        await is_used_again(callers, again)
    assert not callers.failed, callers.errors()
