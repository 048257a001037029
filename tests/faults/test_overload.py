"""Ten times the load that the replicas can take: the rest is refused at once and told when to come back, memory stays
flat, and when the load has gone everything is as before.

The work is time and not computation, and takes so long that ten times the capacity is a thousand requests a second: so
there is processor time for the overload itself on a slow machine, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from tests.faults.load import arrivals, users
from tests.faults.processes import Fleet, Running
from tests.unit.runtime.harness import until

TIMES = 10
"""How many times the capacity comes."""

AFTERWARDS_S = 1.0
"""What is looked at when the last request of the overload has been answered: all of it has to be normal. It is fewer
requests than may wait, so none is refused though all came at once."""

MEMORY_MB = {"worker": 4, "ingress": 16}
"""What a process may grow by, from before the overload to its height. An ingress has a connection of 20 KiB or so for
each request that is being answered; of those that it refuses it keeps nothing."""

LEFT_S = 30.0
"""Within which counts of what is in work are 0 once nobody asks for anything."""

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Setting:
    """What is known beforehand. Callers with as many ingresses as places, or fewer."""

    workers: int
    ingresses: int
    places: int
    """Calls that each worker takes at a time."""
    work_s: float
    queue: int
    """Calls that may wait in each ingress."""
    status: int
    """What a client gets that is refused."""

    @property
    def capacity(self) -> float:
        """Requests a second, as an upper bound: work takes as long as it says, and a little more."""
        return self.workers * self.places / self.work_s

    @property
    def path(self) -> str:
        return f"/work?ms={self.work_s * 1000:g}"

    @property
    def most_before(self) -> int:
        """How many requests may be answered between one that is accepted as the last in line, and its answer.

        All that wait, and in each place one that is being worked on when it comes; while it is worked on itself, each
        other place may end one and begin and end another. Callers that know nothing of each other are not served in
        the order of their requests: one may be overtaken by as many again.
        """
        places = self.workers * self.places
        return (self.ingresses * self.queue + 3 * places) * (1 if self.ingresses == 1 else 2)


class Memory:
    """The most that each process had while the block ran, compared with what it had before."""

    def __init__(self, processes: Sequence[Running]) -> None:
        self._before = {process: process.resident() for process in processes}
        self._peak = dict(self._before)

    async def __aenter__(self) -> Self:
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._looking.cancel()
        await asyncio.wait([self._looking])

    async def _look(self) -> None:
        while True:
            self._peak = {process: max(peak, process.resident()) for process, peak in self._peak.items()}
            await asyncio.sleep(0.1)

    def assert_flat(self) -> None:
        for process, before in self._before.items():
            grown = (self._peak[process] - before) / 2**20
            print(f"{process.name}: {before / 2**20:.1f} MB before, at most {grown:.1f} MB more")
            assert grown <= MEMORY_MB[process.program], f"{process.name} has grown by {grown:.1f} MB"


async def overload(fleet: Fleet, turns: Path, setting: Setting, seconds: float) -> None:
    """Measure the peak, bring ten times as much, and look at what comes of it."""
    workers = await fleet.workers(
        *[f"worker-{n}" for n in range(setting.workers)], max_ongoing_requests=setting.places, turns=turns
    )
    ingresses = await fleet.ingresses(
        setting.ingresses,
        workers,
        max_queued_requests=setting.queue,
        backpressure_status_code=setting.status,
        turns=turns,
    )
    addresses, processes = [ingress.address for ingress in ingresses], [*workers, *ingresses]
    peak = await users(addresses, setting.path, 3 * setting.workers * setting.places, 4.0)
    async with Memory(processes) as memory:
        over = await arrivals(addresses, setting.path, TIMES * setting.capacity, seconds)
    after = await arrivals(addresses, setting.path, 0.1 * setting.capacity, AFTERWARDS_S)
    print(f"\npeak: {peak}\n{TIMES} times that: {over}\nrefused with {dict(over.refused_with)}\nafterwards: {after}")
    print(f"answered while one waits: p50 {over.answered_meanwhile(0.5)}, p99 {over.answered_meanwhile(0.99)}")
    memory.assert_flat()
    assert not peak.other + over.other + after.other
    assert set(over.refused_with) == {setting.status}, "the rest is refused, and told when to come back"
    assert len(over.good) + len(over.refused) + over.unsent == int(TIMES * setting.capacity * seconds)
    in_turn = over.answered_meanwhile(0.99) <= setting.most_before
    # Callers that know nothing of each other overtake each other where one of them waits for a core.
    assert in_turn or setting.ingresses > 1, "an accepted request waits for those before it only"
    assert (len(after.refused), after.unsent) == (0, 0), "everything is normal again"
    for process, name in [(each, "ongoing") for each in workers] + [(each, "queued") for each in ingresses]:
        gauge = f"pierhead_{name}_requests"
        await until(lambda: process.metric(gauge) == 0, f"{gauge} of {process.name} is 0", LEFT_S)  # noqa: B023


@pytest.fixture
def turns(tmp_path: Path) -> Path:
    """Where workers count what they have done."""
    directory = tmp_path / "turns"
    directory.mkdir()
    return directory


async def test_one_caller(fleet: Fleet, turns: Path) -> None:
    setting = Setting(workers=1, ingresses=1, places=4, work_s=0.040, queue=40, status=503)
    await overload(fleet, turns, setting, seconds=30.0)


async def test_callers_that_know_nothing_of_each_other(fleet: Fleet, turns: Path) -> None:
    setting = Setting(workers=2, ingresses=4, places=4, work_s=0.080, queue=5, status=429)
    await overload(fleet, turns, setting, seconds=20.0)
