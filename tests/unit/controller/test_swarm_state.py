"""The state in Swarm's configs: what was confirmed is there for the next controller, whatever happened to this one."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.errors import AnotherController, NewerState, StateTooLarge, StoreError
from controller.model.reports import Event
from controller.storage.rows import EVENTS_KEPT, StateContent, StoredEvent
from controller.storage.store import Override, StateStore
from controller.swarm.state.configs import LIMIT, SwarmDocument
from controller.swarm.state.holder import StateHolder, prepare
from controller.swarm.state.lease import HOLD_S, LOOK_S, RENEW_S, TAKE_S, UNKNOWN, Claim
from controller.swarm.state.state_document import ASKED_S, OBSERVED_S, StateDocument
from tests.fakes.fake_swarm_configs import FakeConfigs, FakeSwarm, Fault
from tests.harness.virtual_time import VirtualLoop
from tests.unit.controller.control import until

pytestmark = pytest.mark.virtual_time

NAME = "shop_pierhead-state"
SOON_S = LOOK_S * 2 + 0.2
"""Longer than a look, and far shorter than waiting for a lease to run out."""


def holder_at(swarm: FakeSwarm, *, wall: Callable[[], float] = lambda: 1000.0) -> StateHolder:
    """A controller at one of the managers. The clock of its lease has begun at a time of its own."""
    began_s = random.Random(swarm.version).uniform(-1e6, 1e6)

    def clock() -> float:
        return began_s + asyncio.get_running_loop().time()

    return StateHolder(SwarmDocument(swarm.manager(), NAME), clock=clock, wall=wall, monotonic=clock)


@contextlib.asynccontextmanager
async def running(holder: StateHolder) -> AsyncIterator[StateStore]:
    """The store of a controller that has the lease; it is killed at the end."""
    assert await holder.take(asyncio.Event())
    task = asyncio.create_task(holder.run())
    try:
        yield StateStore(holder.rows)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, AnotherController):
            await task


async def test_the_next_controller_has_what_was_confirmed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    swarm = FakeSwarm()
    first, second = holder_at(swarm), holder_at(swarm)
    loop = asyncio.get_running_loop()
    async with running(first) as store:
        assert loop.time() == pytest.approx(TAKE_S, abs=SOON_S), "a head that was missing may have been removed by hand"
        store.overrides.put("web", Override(4, 2))
        await store.stored()
        store.append_event(Event(1.0, "scale", "web", "web", "m", "ok"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await second.take(asyncio.Event())
        assert "waiting for the controller that holds the lease" in caplog.text
    killed_at = loop.time()
    async with running(second) as store:
        assert loop.time() - killed_at == pytest.approx(TAKE_S, abs=SOON_S)
        assert dict(store.overrides) == {"web": Override(4, 2)}
        assert [stored.event.message for stored in store.events()] == ["m"], "written with a renewal"
        assert second.epoch > first.epoch
        assert not first.acts()


async def test_a_controller_that_ends_by_itself_is_followed_at_once() -> None:
    """And the first one of a new project need not wait either."""
    swarm = FakeSwarm()
    first, second = holder_at(swarm), holder_at(swarm)
    for _ in range(2):
        await prepare(SwarmDocument(swarm.manager(), NAME))
    async with running(first) as store:
        assert asyncio.get_running_loop().time() < SOON_S
    store.append_event(Event(1.0, "scale", "web", "web", "the last one", "ok"))
    await first.release()
    assert not first.acts()
    released_at = asyncio.get_running_loop().time()
    async with running(second) as store:
        assert asyncio.get_running_loop().time() - released_at < SOON_S
        assert [stored.event.message for stored in store.events()] == ["the last one"]


async def test_a_head_that_was_made_again_is_looked_at_now_and_then_until_somebody_has_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with changes that are due. It was removed by hand, and a controller that waits has made it again."""
    swarm, reads = FakeSwarm(), 0
    holder, read = holder_at(swarm), FakeConfigs._read

    async def counted(configs: FakeConfigs) -> None:
        nonlocal reads
        reads += 1
        assert reads < 100, "the managers are asked without a pause"
        await read(configs)

    async with running(holder) as store:
        await asyncio.sleep(OBSERVED_S)
        document = SwarmDocument(swarm.manager(), NAME)
        swarm.configs.clear()
        await document.create(Claim(UNKNOWN, 0, 0).labels())
        store.append_event(Event(1.0, "scale", "web", "web", "m", "ok"))
        monkeypatch.setattr(FakeConfigs, "_read", counted)
        await asyncio.sleep(2 * HOLD_S)
        assert not holder.acts()
        assert reads <= 2 * HOLD_S / LOOK_S + 2


async def test_without_an_answer_nothing_is_accepted_and_acting_ends_in_time() -> None:
    """And it continues with the same memory when Swarm answers again and nobody took over."""
    swarm = FakeSwarm()
    holder = holder_at(swarm)
    async with running(holder) as store:
        await asyncio.sleep(RENEW_S)
        swarm.is_down = True
        assert holder.acts()
        store.autoscaled.put("web", 3)
        await asyncio.sleep(HOLD_S)
        assert not holder.acts()
        with pytest.raises(StoreError, match="leader"):
            store.overrides.put("web", Override(4, 2))
        assert dict(store.overrides) == {}
        swarm.is_down = False
        await until(holder.acts)
        assert store.trouble == ""
        store.overrides.put("web", Override(5, 2))
        await store.stored()
    async with running(holder_at(swarm)) as store:
        assert (dict(store.overrides), dict(store.autoscaled)) == ({"web": Override(5, 2)}, {"web": 3})


async def test_one_that_was_overtaken_ends_and_has_changed_nothing() -> None:
    swarm = FakeSwarm()
    first, second = holder_at(swarm), holder_at(swarm)
    async with running(first) as old:
        pass  # from here on it hangs
    async with running(second) as store:
        store.overrides.put("web", Override(2, 2))
        await store.stored()
        before = dict(swarm.configs)
        old.overrides.put("web", Override(9, 2))
        with pytest.raises(AnotherController, match="taken over"):
            await first.run()
        assert not first.acts()
        assert dict(swarm.configs) == before


async def test_a_state_that_was_removed_by_hand_ends_the_controller() -> None:
    swarm = FakeSwarm()
    first = holder_at(swarm)
    async with running(first):
        pass
    swarm.configs.clear()
    with pytest.raises(AnotherController, match="removed"):
        await first.run()
    second = holder_at(swarm)
    began = asyncio.get_running_loop().time()
    async with running(second):
        assert asyncio.get_running_loop().time() - began > HOLD_S, "one that has not noticed yet may still act"
        assert second.epoch > first.epoch


@pytest.mark.parametrize("wall", [1000.0 - 120, 1000.0 + 120, 0.0])
async def test_a_wall_clock_two_minutes_off_moves_no_deadline(wall: float) -> None:
    swarm = FakeSwarm()
    first, second = holder_at(swarm), holder_at(swarm, wall=lambda: wall)
    async with running(first):
        await asyncio.sleep(300)
        at = first.controller_clock()
        assert at == pytest.approx(1000 + 300, abs=SOON_S + TAKE_S)
    async with running(second):
        assert at - RENEW_S <= second.controller_clock() <= at + SOON_S, "late by the gap, never early"


async def test_writes_are_few() -> None:
    """Each is kept by every manager."""
    swarm = FakeSwarm()
    async with running(holder_at(swarm)) as store:
        before = swarm.writes
        for number in range(600):
            store.append_event(Event(1.0, "scale", "web", "web", f"m{number}", "ok"))
            await asyncio.sleep(0.1)
        # For each content one config is created, the head is updated, and one config is removed.
        assert swarm.writes - before <= 60 / RENEW_S + 3 * 60 / OBSERVED_S + 5
        before = swarm.writes
        for number in range(1000):
            store.overrides.put("web", Override(number, 2))
            await asyncio.sleep(0.01)
        assert swarm.writes - before <= 3 * (10 / ASKED_S) + 5
        assert len(swarm.configs) == 2


async def test_a_damaged_state_is_set_aside() -> None:
    swarm = FakeSwarm()
    async with running(holder_at(swarm)) as store:
        store.overrides.put("web", Override(4, 2))
        await store.stored()
    (content,) = (config for config in swarm.configs.values() if config.name != NAME)
    swarm.configs[content.name] = type(content)(content.name, content.version, content.labels, b"damaged")
    async with running(holder_at(swarm)) as store:
        assert dict(store.overrides) == {}
        assert store.set_aside is not None
        assert swarm.configs[store.set_aside.removeprefix("config ")].data == b"damaged"
        store.overrides.put("web", Override(1, 2))
        await store.stored()
        assert store.set_aside.removeprefix("config ") in swarm.configs, "for a person to look at"
    async with running(holder_at(swarm)) as store:
        assert (store.set_aside, dict(store.overrides)) == (None, {"web": Override(1, 2)})


@pytest.mark.parametrize("fault", ["lost", "answer lost"])
async def test_a_restore_that_is_not_confirmed_is_none(fault: Fault) -> None:
    """Also where it was carried out: the former state is written over it."""
    swarm = FakeSwarm()
    async with running(holder_at(swarm)) as store:
        store.overrides.put("web", Override(4, 2))
        await store.stored()
        swarm.fault = lambda: fault
        with pytest.raises(StoreError, match="the former state stays"):
            await store.replace(StateContent((("moods", "1", "2"),)), Event(1.0, "asked", "", "", "m"))
        assert not store.is_replaced
        swarm.fault = lambda: ""
        await until(lambda: not store.trouble)
        await store.stored()
    async with running(holder_at(swarm)) as store:
        assert store.content().rows == (("override", '"web"', '{"replicas": 4, "spec_replicas": 2}'),)


async def test_a_restored_state_must_fit() -> None:
    swarm = FakeSwarm()
    async with running(holder_at(swarm)) as store:
        large = StateContent((("moods", "1", incompressible(1, 3 * LIMIT)),))
        with pytest.raises(StateTooLarge):
            await store.replace(large, Event(1.0, "asked", "", "", "m"))
        store.overrides.put("web", Override(4, 2))
        await store.stored()


async def test_a_state_of_a_newer_build_is_left_to_it() -> None:
    swarm = FakeSwarm()
    async with running(holder_at(swarm)) as store:
        store.overrides.put("web", Override(4, 2))
        await store.stored()
    (content,) = (config for config in swarm.configs.values() if config.name != NAME)
    newer = gzip.compress(gzip.decompress(content.data).replace(b'"layout":1', b'"layout":2'))
    swarm.configs[content.name] = replace(content, data=newer)
    older = holder_at(swarm)
    with pytest.raises(NewerState, match="in Swarm's configs is of version 2"):
        await older.take(asyncio.Event())
    assert not older.acts()
    assert swarm.configs[content.name].data == newer
    assert len(swarm.configs) == 2, "nothing is set aside"
    released_at = asyncio.get_running_loop().time()
    swarm.configs[content.name] = content
    async with running(holder_at(swarm)) as store:
        assert asyncio.get_running_loop().time() - released_at < SOON_S, "the newer build need not wait for the lease"
        assert dict(store.overrides) == {"web": Override(4, 2)}


NO_LAYOUT = gzip.compress(b'{"layout": -1, "last_seq": 0, "rows": [], "events": []}', mtime=0)
"""The same bytes in every process: tests are named by them."""


@pytest.mark.parametrize("content", [b"", b"{}", b"\x1f\x8b\x00", NO_LAYOUT])
def test_what_is_not_a_state_is_damaged(content: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        StateDocument(LIMIT, lambda: None).load(content)


def incompressible(seed: int, size: int) -> str:
    return random.Random(seed).randbytes(size // 2).hex()


def test_the_last_events_that_fit_are_kept_and_numbers_continue() -> None:
    rows = StateDocument(LIMIT, lambda: None)
    rows.put("override", '"web"', "{}", asked=False)
    for number in range(1, EVENTS_KEPT + 1):
        event = Event(1.0, "scale", "web", "web", incompressible(number, 4000), "ok")
        rows.add_event(StoredEvent(number, event, 1.0))
    draft = rows.draft(0.0)
    assert draft is not None
    assert LIMIT * 0.8 < len(draft.content) <= LIMIT
    found = StateDocument(LIMIT, lambda: None)
    found.load(draft.content)
    seqs = [stored.seq for stored in found.events()]
    assert seqs == list(range(EVENTS_KEPT + 1 - len(seqs), EVENTS_KEPT + 1))
    assert found.last_seq >= EVENTS_KEPT
    assert list(found.read("override")) == [('"web"', "{}")]


async def test_rows_that_do_not_fit_are_reported_the_lease_is_kept_and_a_removal_makes_room() -> None:
    swarm = FakeSwarm()
    holder = holder_at(swarm)
    async with running(holder) as store:
        store.rollouts.put("web", incompressible(1, 2 * LIMIT))
        with pytest.raises(StoreError, match="bytes without events"):
            await store.stored()
        await asyncio.sleep(60)
        assert holder.acts()
        with pytest.raises(StoreError, match="bytes without events"):
            store.overrides.put("web", Override(4, 2))
        with pytest.raises(StateTooLarge):
            holder.rows.draft(1e12)
        store.rollouts.drop("web")
        await asyncio.sleep(60)
        store.overrides.put("web", Override(4, 2))
        await store.stored()


# --------------------------------------------------------------------------------------------------------- under chance


class Chance:
    """Controllers that are killed, hang and lose answers. Each increases a counter, and notes what was confirmed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.swarm = FakeSwarm()
        self.swarm.fault = lambda: self.random.choices(("", "lost", "answer lost"), (12, 1, 1))[0]
        self.alive: list[StateHolder] = []
        self.confirmed = 0
        self.is_over = False

    async def controller(self) -> None:
        """One process after another."""
        while not self.is_over:
            holder = holder_at(self.swarm)
            self.alive.append(holder)
            try:
                async with asyncio.timeout(self.random.choice((5.0, 30.0, 120.0))):
                    await self.live(holder)
            except* (TimeoutError, AnotherController):
                pass
            if self.random.random() < 0.5:
                with contextlib.suppress(StoreError):
                    await holder.release()
            # else: killed. It still counts as acting until its own deadline.

    async def live(self, holder: StateHolder) -> None:
        await holder.take(asyncio.Event())
        store = StateStore(holder.rows)
        count = store.autoscaled.get("count", 0)
        assert count >= self.confirmed, "what was confirmed is there"
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(holder.run())
            while True:
                await asyncio.sleep(self.random.choice((0.1, 1.0, 4.0)))
                if not holder.acts():
                    continue
                count += 1
                with contextlib.suppress(StoreError):
                    store.overrides.put("count", Override(count, 0))
                    store.autoscaled.put("count", count)
                    await store.stored()
                    self.confirmed = max(self.confirmed, count)

    async def watch(self) -> None:
        while not self.is_over:
            assert sum(holder.acts() for holder in self.alive) <= 1
            await asyncio.sleep(0.05)

    async def outages(self) -> None:
        while not self.is_over:
            await asyncio.sleep(self.random.uniform(5, 60))
            self.swarm.is_down = True
            await asyncio.sleep(self.random.uniform(0.1, 20))
            self.swarm.is_down = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for work in (self.controller, self.controller, self.watch, self.outages):
                tasks.create_task(work())
            await asyncio.sleep(600)
            self.is_over = True
        self.swarm.fault = lambda: ""
        async with running(holder_at(self.swarm)) as store:
            assert store.autoscaled.get("count", 0) >= self.confirmed
            await until(lambda: len(self.swarm.configs) == 2)  # contents that no head names are removed
        assert self.confirmed > 20


@given(seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_never_two_act_and_nothing_confirmed_is_lost(seed: int) -> None:
    with contextlib.closing(VirtualLoop()) as loop:
        loop.run_until_complete(Chance(seed).run())
