"""The state file: what is written is there after any end of the process, and a damaged file stops nobody."""

from __future__ import annotations

import contextlib
import json
import secrets
import sqlite3
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from controller.errors import NewerState, StoreError
from controller.model.keys import ServiceKey
from controller.model.reports import Event
from controller.model.world import FailureRecord, Retirement
from controller.storage.events import BURST_S, ONE_BY_ONE, EventLog
from controller.storage.file import FILE_NAME, StateFile
from controller.storage.rows import StateContent
from controller.storage.store import Override, StateStore
from controller.storage.version import MIGRATIONS, VERSION, brought_up


def retirement(container_id: str = "c1") -> Retirement:
    return Retirement("web-1", container_id, 10.0, None, "3 replicas, 2 wanted", failed=True)


def event(message: str = "m", at: float = 1.0) -> Event:
    return Event(at, "scale", "web", "web", message, "ok")


def test_replicas_that_were_there_together_fail_as_one_try(tmp_path: Path) -> None:
    """And a loop of crashes grows by one a generation, however many replicas go through it out of step."""
    store = StateStore(StateFile(tmp_path))
    key = ("web", "v1")
    for ended_at in (10.0, 10.1, 12.0):
        store.failure(key, ended_at, "code 137", 9.0)
    assert store.failures[key] == FailureRecord(1, 10.0, "code 137")
    for began_at, ended_at in ((10.5, 14.0), (12.5, 16.0), (14.5, 18.0), (16.5, 20.0), (18.5, 22.0)):
        store.failure(key, ended_at, "code 1", began_at)
    assert store.failures[key] == FailureRecord(4, 22.0, "code 1")
    store.failure(key, 23.0, "nobody knows when it began")
    assert store.failures[key].count == 5


def test_a_row_that_cannot_be_read_costs_that_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = StateStore(StateFile(tmp_path))
    store.autoscaled.put("web", 2)
    store.autoscaled.put("api", 3)
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as db:
        db.execute("UPDATE state SET value = '{' WHERE key = '\"web\"'")
    found = StateStore(StateFile(tmp_path))
    assert (found.set_aside, dict(found.autoscaled)) == (None, {"api": 3})
    assert 'autoscaled "web" in the state file cannot be read' in caplog.text
    found.close()


def overwritten(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + b"\xff" * 6000 + content[middle + 6000 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"SQLite format 3\x00" + b"x" * 4096,
        overwritten,
        lambda content: content.replace(b"value TEXT", b"va\xffue TEXT"),
        "DROP TABLE state; CREATE TABLE overrides (service TEXT PRIMARY KEY, replicas INTEGER NOT NULL);",
        "DROP TABLE state; DROP TABLE events; PRAGMA user_version = -1;",
    ],
    ids=["only its head", "pages", "a byte of a definition", "other tables", "no tables, and a version"],
)
def test_a_damaged_or_other_file_is_set_aside(tmp_path: Path, damage: Callable[[bytes], bytes] | str) -> None:
    store, path = StateStore(StateFile(tmp_path)), tmp_path / FILE_NAME
    for number in range(500):
        store.append_event(event(str(number) * 20))
    store.close()
    if isinstance(damage, str):
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.executescript(damage)
    else:
        path.write_bytes(damage(path.read_bytes()))
    damaged = path.read_bytes()
    store = StateStore(StateFile(tmp_path, clock=lambda: 77.0))
    aside = tmp_path / f"{FILE_NAME}.aside-77"
    assert store.set_aside == str(aside)
    assert aside.read_bytes() == damaged
    store.overrides.put("web", Override(1, 2))
    store.close()
    found = StateStore(StateFile(tmp_path))
    assert (found.set_aside, dict(found.overrides)) == (None, {"web": Override(1, 2)})
    found.close()


def version_of(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def set_version(path: Path, version: int) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {version}")


def test_a_state_of_a_newer_build_is_left_as_it_is(tmp_path: Path) -> None:
    store, path = StateStore(StateFile(tmp_path)), tmp_path / FILE_NAME
    store.overrides.put("web", Override(4, 2))
    store.close()
    set_version(path, VERSION + 1)
    before = path.read_bytes()
    with pytest.raises(NewerState, match=rf"state\.db is of version {VERSION + 1}.*this build has version {VERSION}"):
        StateFile(tmp_path)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("*aside*"))


def test_what_a_killed_newer_build_has_not_tidied_up_stays_for_it(tmp_path: Path) -> None:
    """Its last writes are in the side file until it is started again."""
    store, path = StateStore(StateFile(tmp_path)), tmp_path / FILE_NAME
    store.close()
    newer = StateFile(tmp_path)
    newer.db.execute(f"PRAGMA user_version = {VERSION + 1}")
    newer.put("override", '"web"', "{}", asked=True)
    before = [Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-wal")]
    with pytest.raises(NewerState):
        StateFile(tmp_path)
    assert [Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-wal")] == before
    newer.close()


def test_a_file_from_before_there_were_versions_is_taken_over(tmp_path: Path) -> None:
    store, path = StateStore(StateFile(tmp_path)), tmp_path / FILE_NAME
    assert version_of(path) == VERSION
    store.overrides.put("web", Override(4, 2))
    for number in range(3):
        store.append_event(event(str(number)))
    kept = store.events()
    store.close()
    set_version(path, 0)
    found = StateStore(StateFile(tmp_path))
    assert (found.set_aside, dict(found.overrides), found.events()) == (None, {"web": Override(4, 2)}, kept)
    assert found.append_event(event()) == 4
    found.close()
    assert version_of(path) == VERSION


def test_migrations_lead_from_each_version_to_this_one() -> None:
    content = StateContent((("a", "1", "2"),), (), 7)
    assert sorted(MIGRATIONS) == list(range(VERSION))
    assert all(brought_up(content, version) == content for version in (*MIGRATIONS, VERSION))
    with pytest.raises(ValueError, match="no version -1"):
        brought_up(content, -1)
    path = {VERSION - 1: lambda each: replace(each, last_seq=8), VERSION: lambda each: replace(each, rows=())}
    assert brought_up(content, VERSION - 1, path) == StateContent((), (), 8), "one after the other"


def test_what_another_build_has_in_a_row_stays_there(tmp_path: Path) -> None:
    """A newer build of the same version finds everything again that it has written, and its rows count here."""
    file = StateFile(tmp_path)
    key = {**asdict(ServiceKey("team", "00", 1.0, services=("web",))), "colour": "red"}
    file.put("service_key", '"team"', json.dumps(key), asked=True)
    file.put("override", '"web"', '{"replicas": 4, "spec_replicas": 2, "until": 9.0}', asked=True)
    file.put("override", '"api"', '{"replicas": 1, "spec_replicas": 2, "until": 9.0}', asked=True)
    file.put("moods", '"web"', '"good"', asked=False)
    store = StateStore(file)
    assert dict(store.service_keys) == {"team": ServiceKey("team", "00", 1.0, services=("web",))}
    assert store.overrides["web"] == Override(4, 2)
    store.overrides.put("web", Override(5, 2))
    store.overrides.drop("api")
    store.overrides.put("api", Override(7, 2))
    rows = {kind: dict(file.read(kind)) for kind in ("service_key", "override", "moods")}
    assert json.loads(rows["service_key"]['"team"']) == json.loads(json.dumps(key))
    assert json.loads(rows["override"]['"web"']) == {"replicas": 5, "spec_replicas": 2, "until": 9.0}
    assert json.loads(rows["override"]['"api"']) == {"replicas": 7, "spec_replicas": 2}, "that is another one"
    assert rows["moods"] == {'"web"': '"good"'}
    store.close()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="state directory"):
        StateStore(StateFile(tmp_path / "file"))


def fill_the_disk(file: StateFile) -> None:
    """As far as SQLite can tell: the file may not grow, and has no room left."""
    pages = file.db.execute("PRAGMA page_count").fetchone()[0]
    file.db.execute(f"PRAGMA max_page_count = {pages}")
    with contextlib.suppress(sqlite3.OperationalError):
        while True:
            file.db.execute("INSERT INTO state VALUES ('filler', ?, '1')", (f"filler-{secrets.token_hex(400)}",))


def make_room(file: StateFile) -> None:
    file.db.execute("PRAGMA max_page_count = 1000000")


def test_on_a_full_disk_memory_continues_and_the_file_follows(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    store = StateStore(file)
    fill_the_disk(file)
    names = [f"c{number}-{secrets.token_hex(300)}" for number in range(40)]
    for name in names:
        store.retire(retirement(name))
        store.append_event(event("x" * 500))
    store.failure(("web", "v1"), 1.0, "y" * 500)
    assert "full" in store.trouble
    with pytest.raises(StoreError, match=r"full; look at the disk of the controller's state volume"):
        store.overrides.put(f"web-{'z' * 9000}", Override(4, 2))
    assert dict(store.overrides) == {}, "what an operator asks for is done or refused"
    for name in names[:39]:
        store.forget(name)
    assert list(store.retirements) == names[39:]
    store.settle()
    assert "full" in store.trouble, "still"
    make_room(file)
    store.settle()
    assert store.trouble == ""
    kept = store.events()
    store.close()
    again = StateStore(StateFile(tmp_path))
    assert list(again.retirements) == names[39:]
    assert again.failures[("web", "v1")].count == 1
    assert [stored.seq for stored in again.events()] == [stored.seq for stored in kept] == list(range(1, 41))
    assert again.append_event(event()) == 41
    again.close()


def test_a_lock_of_another_process_on_the_file_delays_nothing(tmp_path: Path) -> None:
    """The controller's event loop waits for each write: probes, drains and the API stand still during it."""
    store = StateStore(StateFile(tmp_path))
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as other:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        for number in range(10):
            store.append_event(event(str(number)))
        with pytest.raises(StoreError, match="locked"):
            store.overrides.put("web", Override(4, 2))
        took_s = time.monotonic() - began
        assert "locked" in store.trouble
        other.rollback()
    store.settle()
    assert store.trouble == ""
    assert len(store.events()) == 10
    store.close()
    assert took_s < 5, "a single wait for the lock took as long"


# -------------------------------------------------------------------------------------------------------------- events


def test_repetitions_are_counted_on_the_first(tmp_path: Path) -> None:
    store, now = StateStore(StateFile(tmp_path)), [100.0]
    log = EventLog(store, lambda: now[0])
    for _ in range(5):
        log.record("pull_image", "failed: no such image", service="web", outcome="failed")
        log.record("pull_image", "failed: no such image", service="api", outcome="failed")
        now[0] += 1.0
    log.record("pull_image", "failed: timeout", service="web", outcome="failed")
    log.record("start", "started", service="web", outcome="ok")
    log.record("start", "started", service="web", outcome="ok")
    expected = [("web", 5), ("api", 5), ("web", 1), ("web", 1), ("web", 1)]
    assert [(stored.event.service, stored.times) for stored in log.select()] == expected
    assert [(stored.event.service, stored.times) for stored in EventLog(store).select()] == expected
    store.close()


def test_events_are_selected_by_number_and_service(tmp_path: Path) -> None:
    store = StateStore(StateFile(tmp_path))
    log = EventLog(store)
    for number in range(10):
        log.record("scale", str(number), service="web" if number % 2 else "api")
    assert [stored.event.message for stored in log.select(limit=3)] == ["7", "8", "9"]
    assert [stored.event.message for stored in log.select(since=2, limit=3)] == ["2", "3", "4"]
    assert [stored.event.message for stored in log.select(service="api", limit=2)] == ["6", "8"]
    store.close()


def test_the_rest_of_a_burst_is_one_entry_with_a_count(tmp_path: Path) -> None:
    store, now = StateStore(StateFile(tmp_path)), [100.0]
    log = EventLog(store, lambda: now[0])
    for number in range(ONE_BY_ONE + 500):
        log.record("create_container", f"create web-{number}", service="web", target=f"web-{number}", outcome="ok")
        log.record("replica_failed", "exited", service="web", target=f"web-{number}", outcome="failed")
        now[0] += 0.1
    created = log.select(kinds=["create_container"], limit=5000)
    assert [stored.event.target for stored in created] == [*(f"web-{n}" for n in range(ONE_BY_ONE)), "web"]
    rest = created[-1]
    assert rest.times == 500
    assert rest.last_at == pytest.approx(now[0] - 0.1)
    assert f"the first of them: create web-{ONE_BY_ONE}" in rest.event.message
    assert log.select(kinds=["replica_failed"], limit=5000)[-1].times == 500, "each kind has its own count"
    now[0] += BURST_S
    log.record("create_container", "create web-9999", service="web", target="web-9999", outcome="ok")
    assert log.select()[-1].event.message == "create web-9999", "later events are listed one by one"
    now[0] = 1.0
    log.record("create_container", "create web-1", service="web", target="web-1", outcome="ok")
    assert log.select()[-1].event.target == "web-1", "so are those after the clock was set back"
    store.close()


def test_that_a_replica_was_told_to_sleep_outlives_the_controller_and_an_earlier_row_is_read(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    earlier = {key: value for key, value in asdict(retirement("c2")).items() if key != "sleeping_since"}
    file.put("retirement", '"c2"', json.dumps(earlier), asked=False)
    store = StateStore(file)
    store.retire(retirement())
    for now in (20.0, 21.0):
        store.sleeping("c1", now)
    assert store.latest_at == 20.0, "the first time counts"
    store.close()
    again = StateStore(StateFile(tmp_path))
    assert dict(again.retirements) == {"c1": replace(retirement(), sleeping_since=20.0), "c2": retirement("c2")}
    again.close()
