"""What every place of the state does, asked of the SQLite file and of the document that is kept in Swarm's configs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from controller.errors import StoreError
from controller.model.desired import Revision
from controller.model.reports import Event
from controller.model.world import FailureRecord, Retirement
from controller.storage.events import EventLog
from controller.storage.file import FILE_NAME, StateFile
from controller.storage.rows import EVENTS_KEPT, Rows, StateContent, StoredEvent
from controller.storage.store import Override, StateStore
from controller.swarm.state.configs import LIMIT
from controller.swarm.state.state_document import StateDocument


class State(Protocol):
    """One state, which outlives the processes that open it."""

    def opened(self) -> Rows:
        """As a new process finds it; nothing is closed."""
        ...

    def without_writes(self) -> contextlib.AbstractContextManager[None]:
        """Nothing can be written in the body."""
        ...

    async def replaces(self, rows: Rows, content: StateContent) -> None:
        """Replace the content of the rows that were opened last."""
        ...


class InFile:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def opened(self) -> Rows:
        return StateFile(self._directory)

    @contextlib.contextmanager
    def without_writes(self) -> Iterator[None]:
        with contextlib.closing(sqlite3.connect(self._directory / FILE_NAME)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.rollback()

    async def replaces(self, rows: Rows, content: StateContent) -> None:
        await rows.replace(content)


class InDocument:
    """Its holder is left out: what is due is written when the next process opens it."""

    def __init__(self) -> None:
        self._processes: list[StateDocument] = []
        self._content = b""

    def opened(self) -> Rows:
        if self._processes:
            self._write()
        self._processes.append(StateDocument(LIMIT, lambda: None))
        if self._content:
            self._processes[-1].load(self._content)
        return self._processes[-1]

    def _write(self) -> None:
        rows = self._processes[-1]
        if draft := rows.draft(math.inf):
            self._content = draft.content
            rows.written(draft, 0.0)
            rows.went("")

    @contextlib.contextmanager
    def without_writes(self) -> Iterator[None]:
        self._processes[-1].went("no answer")
        yield
        self._processes[-1].went("")

    async def replaces(self, rows: Rows, content: StateContent) -> None:
        replacing = asyncio.create_task(rows.replace(content))
        await asyncio.sleep(0)
        self._write()
        await replacing


@pytest.fixture(params=["file", "document"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> State:
    return InFile(tmp_path) if request.param == "file" else InDocument()


def retirement(container_id: str) -> Retirement:
    return Retirement("web-1", container_id, 10.0, None, "3 replicas, 2 wanted", failed=True)


def event(message: str = "m") -> Event:
    return Event(1.0, "scale", "web", "web", message, "ok")


def revision(version: str) -> Revision:
    return Revision("web", version, 5.0, "image/web", "sha256:1", "{}")


def test_rows_are_of_a_kind_and_a_new_process_reads_them(state: State) -> None:
    rows = state.opened()
    for kind, key, value in (("a", "1", "x"), ("a", "2", "y"), ("b", "1", "z"), ("a", "1", "\u00e9 '; --")):
        rows.put(kind, key, value, asked=False)
    rows.put("a", "2", None, asked=True)
    rows.put("a", "none", None, asked=False)
    found = state.opened()
    assert dict(found.read("a")) == {"1": "\u00e9 '; --"}
    assert dict(found.read("b")) == {"1": "z"}
    assert (list(found.read("c")), found.set_aside, found.trouble) == ([], None, "")
    found.close()
    rows.close()


def test_events_are_kept_in_their_order_and_their_numbers_are_not_given_again(state: State) -> None:
    rows = state.opened()
    assert (rows.last_seq, rows.events()) == (0, [])
    kept = [StoredEvent(number, event(str(number)), 1.0) for number in (1, 2, 3)]
    for one in kept:
        rows.add_event(one)
    rows.repeat_event(1, 9.0, 4)
    rows.drop_event(3)
    rows.drop_event(77)
    found = state.opened()
    assert found.events() == [replace(kept[0], last_at=9.0, times=4), kept[1]]
    assert found.last_seq >= 3
    found.close()
    rows.close()


def test_while_nothing_can_be_written_what_is_asked_for_is_refused_and_what_is_seen_is_kept(state: State) -> None:
    rows = state.opened()
    rows.put("a", "1", "before", asked=True)
    seen = StoredEvent(1, event(), 1.0)
    with state.without_writes():
        with pytest.raises(StoreError):
            rows.put("a", "1", "asked", asked=True)
        assert rows.trouble
        rows.put("a", "2", "seen", asked=False)
        rows.add_event(seen)
    rows.settle()
    assert rows.trouble == ""
    found = state.opened()
    assert (dict(found.read("a")), found.events()) == ({"1": "before", "2": "seen"}, [seen])
    found.close()
    rows.close()


def a_content() -> StateContent:
    events = tuple(StoredEvent(number, event(str(number)), 2.0, 3) for number in (5, 9))
    return StateContent((("a", "1", "new"), ("moods", "2", "\u00e9")), events, 70)


async def test_everything_is_replaced_in_one_step_and_nothing_is_written_after_it(state: State) -> None:
    rows = state.opened()
    rows.put("a", "1", "old", asked=False)
    rows.put("b", "1", "old", asked=False)
    rows.add_event(StoredEvent(1, event(), 1.0))
    await state.replaces(rows, a_content())
    rows.put("a", "1", "late", asked=False)
    rows.put("b", "2", None, asked=False)
    rows.add_event(StoredEvent(71, event("late"), 1.0))
    rows.repeat_event(9, 9.0, 9)
    rows.drop_event(5)
    rows.settle()
    found = state.opened()
    assert set(found.content().rows) == set(a_content().rows)
    assert tuple(found.events()) == found.content().events == a_content().events
    assert found.last_seq >= 70
    assert (found.set_aside, found.trouble) == (None, "")
    found.close()
    rows.close()


async def test_a_content_is_what_another_state_can_have(state: State, tmp_path: Path) -> None:
    rows = state.opened()
    rows.put("b", "1", "x", asked=True)
    for number in (1, 2):
        rows.add_event(StoredEvent(number, event(str(number)), 1.0))
    content = rows.content()
    assert (content.rows, [each.seq for each in content.events], content.last_seq) == ((("b", "1", "x"),), [1, 2], 2)
    other = StateFile(tmp_path / "other")
    await other.replace(content)
    assert other.content() == content
    other.close()
    rows.close()


async def test_while_nothing_can_be_written_nothing_is_replaced(state: State) -> None:
    rows = state.opened()
    rows.put("a", "1", "before", asked=True)
    before = rows.content()
    with state.without_writes(), pytest.raises(StoreError):
        await rows.replace(a_content())
    rows.settle()
    rows.put("a", "2", "after", asked=True)
    found = state.opened()
    assert set(found.content().rows) == {*before.rows, ("a", "2", "after")}
    found.close()
    rows.close()


async def test_a_kill_in_the_middle_of_it_leaves_the_former_content(tmp_path: Path) -> None:
    """Of a file: a document is replaced by one change of a label (test_document_contract.py)."""
    place, killed = tmp_path / "state", tmp_path / "killed"
    rows = StateFile(place)
    rows.put("a", "1", "before", asked=True)

    def dying() -> Iterator[tuple[str, str, str]]:
        for number in range(5000):
            yield "new", str(number), "x" * 100
        shutil.copytree(place, killed)

    content: Any = dying()
    await rows.replace(replace(a_content(), rows=content))
    found = StateFile(killed)
    assert (found.set_aside, found.content()) == (None, StateContent((("a", "1", "before"),), (), 0))
    found.close()
    rows.close()


# --------------------------------------------------------------------------------------------- what the store has of it


def test_everything_is_there_after_a_kill(state: State) -> None:
    store = StateStore(state.opened())
    store.overrides.put("web", Override(4, 2))
    store.overrides.put("api", Override(1, 2))
    store.overrides.drop("api")
    store.retire(retirement("c1"))
    store.retire(retirement("c2"))
    before = store.retirements.snapshot()
    store.stopping("c1", 12.5)
    store.stopping("c1", 99.0)  # the first time counts
    store.retire(retirement("c1"))
    store.stopping("unknown", 1.0)
    store.note_ready("c2", 7.0)
    store.forget("c2")
    store.forget("c2")
    store.note_ready("c3", 7.0)
    store.failure(("web", "v1"), 3.0, "code 1")
    store.failure(("web", "v1"), 4.0, "code 2")
    store.failure(("web", "v2"), 4.0, "code 2")
    store.failures.drop(("web", "v2"))
    store.autoscaled.put("llm", 3)
    store.autoscaled.put("old", 2)
    store.autoscaled.drop("old")
    store.rollouts.put("web", '{"stable":"v1"}')
    store.rollouts.put("old", "{}")
    store.rollouts.drop("old")
    store.revisions.put(("web", "v1"), revision("v1"))
    store.revisions.put(("web", "v2"), revision("v2"))
    store.revisions.drop(("web", "v2"))
    assert store.append_event(event()) == 1
    assert set(before) == {"c1", "c2"}, "a snapshot does not change"
    found = StateStore(state.opened())
    assert dict(found.overrides) == {"web": Override(4, 2)}
    assert found.retirements == {"c1": Retirement("web-1", "c1", 10.0, 12.5, "3 replicas, 2 wanted", failed=True)}
    assert found.containers() == {"c1", "c3"}
    assert found.failures == {("web", "v1"): FailureRecord(2, 4.0, "code 2")}
    assert dict(found.autoscaled) == {"llm": 3}
    assert dict(found.rollouts) == {"web": '{"stable":"v1"}'}
    assert dict(found.revisions) == {("web", "v1"): revision("v1")}
    assert (found.seen_ready("c3", 7.0), found.seen_ready("c3", 8.0)) == (True, False)
    assert [stored.event for stored in found.events()] == [event()]
    found.close()
    store.close()


def test_only_the_last_events_are_kept_and_no_number_is_given_twice(state: State) -> None:
    store = StateStore(state.opened())
    for number in range(EVENTS_KEPT + 5):
        store.append_event(event(str(number)))
    store.repeat_event(EVENTS_KEPT, 9.0, 3)
    kept = store.events()
    assert (len(kept), kept[0].seq, kept[-1].seq) == (EVENTS_KEPT, 6, EVENTS_KEPT + 5)
    assert (kept[-6].seq, kept[-6].last_at, kept[-6].times) == (EVENTS_KEPT, 9.0, 3)
    found = StateStore(state.opened())
    assert found.events() == kept
    assert found.append_event(event()) > EVENTS_KEPT + 5
    found.close()
    store.close()


@pytest.mark.parametrize("seconds", [0.1, 10.0], ids=["in a burst", "over hours"])
def test_a_large_scale_erases_no_history_of_others(state: State, seconds: float) -> None:
    """What is dropped is the oldest of the service that has the most."""
    store, now = StateStore(state.opened()), [100.0]
    log = EventLog(store, lambda: now[0])
    for number in range(40):
        log.record("scale", str(number), service=f"other{number % 4}")
        now[0] += 20.0
    for number in range(3000):
        for kind in ("create_container", "replica_ready"):
            log.record(kind, f"{kind} {number}", service="web", target=f"web-{number}", outcome="ok")
        now[0] += seconds
    kept = log.select(limit=5000)
    assert [stored.event.message for stored in kept if stored.event.service != "web"] == [str(n) for n in range(40)]
    assert len(kept) <= EVENTS_KEPT
    assert log.last_seq == kept[-1].seq
    again = StateStore(state.opened())
    assert EventLog(again).select(limit=5000) == kept
    again.close()
    store.close()
