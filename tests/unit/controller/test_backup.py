"""Backups of the controller's state: what one has, who may ask for it, and that all of it is back after a restore."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession
from aiohttp.test_utils import unused_port

from controller.__main__ import _serve as serve
from controller.api_tokens import ROLES, digest_of, read_tokens
from controller.daemon import api
from controller.daemon.assembly import World
from controller.daemon.backup import backup_of, content_of
from controller.daemon.bodies import restore_in
from controller.daemon.boundaries import Boundaries
from controller.daemon.callers import Gatekeeper
from controller.daemon.llm_replicas import operate
from controller.errors import BeginsAgain, InvalidRequest
from controller.model.actions import CreateContainer
from controller.model.reports import Event
from controller.settings import Settings
from controller.storage.file import FILE_NAME, StateFile
from controller.storage.rows import EVENTS_KEPT, StateContent, StoredEvent
from controller.storage.store import Override, StateStore
from controller.storage.version import VERSION
from controller.tool.output import json_text
from controller.tool.project.direct import connects
from tests.fakes.fake_swarm_configs import FakeSwarm
from tests.unit.controller.control import Control, until, version
from tests.unit.controller.test_api import Client, bearer, error_of, serving
from tests.unit.controller.test_cli import served
from tests.unit.controller.test_openapi import checked
from tests.unit.controller.worlds import service

BACKUP, RESTORE = "/api/v1/backup", "/api/v1/restore"
WEB = service("web", auth="key")


@pytest.fixture(params=["file", "document"])
def control(request: pytest.FixtureRequest, tmp_path: Path) -> Control:
    control = Control.of(tmp_path, WEB, service("api", replicas=1))
    if request.param == "document":
        control.swarm = FakeSwarm()
    return control


@pytest.fixture
def on_a_file(tmp_path: Path) -> Control:
    return Control.of(tmp_path, WEB, service("api", replicas=1))


def plain() -> dict[str, Any]:
    """A backup that can be restored."""
    events = [{
        "seq": 4, "at": 1.0, "kind": "scale", "service": "web", "target": "web", "message": "m", "outcome": "ok",
        "last_at": 1.0, "times": 1,
    }]  # fmt: skip
    rows = [{"kind": "override", "key": '"web"', "value": '{"replicas": 3, "spec_replicas": 2}'}]
    return {
        "version": VERSION, "project": "p", "at": 5.0, "build": "b", "last_seq": 4, "rows": rows, "events": events,
    }  # fmt: skip


async def restored(client: Client, backup: object, **more: object) -> ClientResponse:
    return await client.post(RESTORE, json={"backup": backup, **more})


async def events(client: Client, since: int = 0) -> list[dict[str, Any]]:
    answer = await (await client.get(f"/api/v1/events?since={since}&limit=1000")).json()
    return list(answer["events"])


async def test_all_is_back_after_a_restore(control: Control) -> None:
    async with serving(control, web=2, api=1) as client:
        made = await (await client.post("/api/v1/keys", json={"name": "team", "per_minute": 60})).json()
        await client.put("/api/v1/services/web/scale", json={"replicas": 3})
        await control.settled("web", 3)
        first = version(control, WEB)
        changed = replace(WEB, definition_hash="d2")
        control.source.edit(changed, service("api", replicas=1))
        await until(lambda: control.controller.deployer.state("web").stable == version(control, changed))
        backup = await checked(await client.get(BACKUP), "backup")
        token, before = control.store.token_of("web-1"), backup["events"]
        await client.delete("/api/v1/keys/team")
        await client.post("/api/v1/keys", json={"name": "later"})
        await client.put("/api/v1/services/web/scale", json={"replicas": 1})
        await client.put("/api/v1/services/api/scale", json={"replicas": 2})
        last = (await events(client))[-1]["seq"]
        assert not control.has_ended.is_set()
        answer = await checked(await restored(client, backup), "restore")
        assert answer == {
            "project": "p", "at": backup["at"], "rows": len(backup["rows"]), "events": len(backup["events"]),
        }  # fmt: skip
        assert control.has_ended.is_set()
        control.controller.events.record("scale", "of the controller that ends", service="web")
    control.router.keys = replace(control.router.keys, keys=(), digest="")
    async with serving(control) as client:
        await until(lambda: {each.name for each in control.router.keys.keys} == {"team"})
        assert control.router.keys.keys[0].digest == digest_of(made["key"])
        await control.settled("web", 3)
        await control.settled("api", 1)
        assert control.store.token_of("web-1") == token
        revisions = await (await client.get("/api/v1/services/web/revisions")).json()
        assert {each["version"] for each in revisions["revisions"]} == {first, version(control, changed)}
        assert control.controller.deployer.state("web").previous == (first,)
        after = await events(client)
        assert after[: len(before)] == before
        [noted] = [each for each in after if each["message"].startswith("this machine at 127.0.0.1: POST restore of")]
        assert noted["kind"] == "asked"
        assert noted["seq"] > last
        assert "of the controller that ends" not in {each["message"] for each in after}
        since = [each["seq"] for each in after if each["seq"] > noted["seq"]]
        assert since, "this controller's"
        assert since == sorted(since)
        assert since[0] > last + 2, "not a number that the controller before has given after the restore"


async def test_between_the_restore_and_its_end_a_controller_does_nothing(control: Control) -> None:
    async with serving(control, web=2, api=1) as client:
        assert (await restored(client, plain())).status == 200
        done = len(control.engine.done)
        late = await client.put("/api/v1/services/web/scale", json={"replicas": 9})
        assert (await error_of(late))[:2] == (503, "not_yet"), "it would be lost"
        assert (await client.delete("/api/v1/keys/team")).status == 503
        control.source.edit(WEB, service("api", replicas=5))
        seen = control.controller.view.at
        await until(lambda: control.controller.view.at > seen + 0.1)
        assert not [each for each in control.engine.done[done:] if isinstance(each, CreateContainer)]
    async with serving(control):
        await control.settled("web", 3)


async def test_a_new_machine_continues_from_the_backup_of_another_one(tmp_path: Path) -> None:
    """Its images were built there, so it has other versions."""
    old, new = (Control.of(tmp_path / name, WEB, service("api", replicas=1)) for name in ("old", "new"))
    async with serving(old, web=2, api=1) as client:
        await client.put("/api/v1/services/web/scale", json={"replicas": 3})
        await client.post("/api/v1/keys", json={"name": "team"})
        await old.settled("web", 3)
        backup = await (await client.get(BACKUP)).json()
    new.engine.add_image(WEB.image, "sha256:built-again")
    async with serving(new, web=2, api=1) as client:
        here = version(new, WEB)
        assert here != version(old, WEB)
        assert (await restored(client, backup)).status == 200
    async with serving(new) as client:
        await new.settled("web", 3)
        await new.settled("api", 1)
        assert {each.name for each in new.router.keys.keys} == {"team"}
        await until(lambda: new.controller.deployer.state("web").stable == here)
        assert {each.version for each in new.engine.containers.values() if each.service == "web"} == {here}


async def test_a_restore_that_cannot_be_kept_changes_nothing(on_a_file: Control) -> None:
    control = on_a_file
    async with serving(control, web=2) as client:
        control.set_disk_full(True)
        status, code, said = await error_of(await restored(client, plain()))
        assert (status, code, "look at the disk" in said) == (500, "store_error", True)
        control.set_disk_full(False)
        await client.put("/api/v1/services/web/scale", json={"replicas": 4})
        await control.settled("web", 4)
        assert not control.has_ended.is_set()


async def test_a_backup_has_everything_or_is_refused(on_a_file: Control) -> None:
    async with serving(on_a_file, web=2) as client:
        on_a_file.set_disk_full(True)
        on_a_file.store.autoscaled.put("web", 7)
        assert (await client.get(BACKUP)).status == 500
        on_a_file.set_disk_full(False)
        backup = await (await client.get(BACKUP)).json()
        assert ["autoscaled", '"web"', "7"] in [list(row.values()) for row in backup["rows"]]


async def test_both_need_an_admin_and_are_in_the_audit_without_what_they_have(on_a_file: Control) -> None:
    named = ",".join(f"{role}:{role}:{digest_of(role)}" for role in ROLES)
    async with serving(on_a_file, Gatekeeper(read_tokens("secret", named), frozenset), web=2) as client:
        for role in ROLES:
            may = role == "admin"
            got = await client.get(BACKUP, headers=bearer(role))
            assert (got.status == 200) is may, role
            assert (await client.head(BACKUP, headers=bearer(role))).status == (200 if may else 403)
            wrong = await client.post(RESTORE, json={"wrong": 1}, headers=bearer(role))
            assert wrong.status == (400 if may else 403), role
        for answer in (await client.get(BACKUP), await client.post(RESTORE, json={})):
            assert answer.status == 403
        await client.post(RESTORE, json={"backup": plain()}, headers=bearer("admin"))
    async with serving(on_a_file) as client:
        found = await events(client)
    assert [each["message"] for each in found if each["kind"] == "asked"] == [
        "admin at 127.0.0.1: POST restore of the backup of p that was made at 1970-01-01T00:00:05+00:00"
    ]


async def test_who_reads_a_backup_is_in_the_audit(on_a_file: Control) -> None:
    async with serving(on_a_file, web=2) as client:
        await client.get(BACKUP)
        assert [each["message"] for each in await events(client) if each["kind"] == "asked"] == [
            "this machine at 127.0.0.1: GET backup"
        ]


def changed(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda backup: {**backup, **changes}


def row(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda backup: {**backup, "rows": [{**backup["rows"][0], **changes}]}


def event(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda backup: {**backup, "events": [{**backup["events"][0], **changes}]}


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda backup: None, "backup: expected what `pierhead backup` writes"),
        (lambda backup: [], "backup: expected what"),
        (lambda backup: {}, "backup.version: expected what `pierhead backup` writes: Field required"),
        (
            changed(version=VERSION + 1, rows="of later days"),
            f"version: expected at most {VERSION}, found {VERSION + 1}",
        ),
        (changed(version=0.5), "backup.version: expected what"),
        (changed(version=-1), "backup.version: there is no version -1"),
        (changed(project=None), "backup.project: expected what"),
        (changed(project="shop"), "the backup is of project 'shop', and this is 'p': nothing was changed"),
        (changed(at=-1.0), "backup.at: expected a unix time"),
        (changed(at=1e300), "backup.at: expected a unix time"),
        (changed(more=1), "backup.more: expected what"),
        (changed(last_seq=3), "backup.events.0: expected rising numbers up to last_seq, found 4"),
        (changed(last_seq=2**60), "backup.last_seq: expected a number up to"),
        (lambda backup: {**backup, "rows": backup["rows"] * 2}, 'backup.rows.1: override "web" is there twice'),
        (lambda backup: {**backup, "events": backup["events"] * 2}, "backup.events.1: expected rising numbers"),
        (row(key="web"), "backup.rows.0: override web is not what this build has there"),
        (row(key="5"), "backup.rows.0: override 5 is not what"),
        (row(value="{"), 'backup.rows.0: override "web" is not what'),
        (row(value='{"replicas": 3}'), 'backup.rows.0: override "web" is not what'),
        (row(value='{"replicas": "many", "spec_replicas": 2}'), "is not what this build has there"),
        (row(kind="key_use", value="NaN"), "NaN is not finite"),
        (row(kind="key_use", value="1e999"), "1e999 is not finite"),
        (row(kind="moods", value="good"), "backup.rows.0: moods"),
        (row(value=5), "backup.rows.0.value: expected what"),
        (row(key="\ud800"), "backup.rows.0.key: expected what|body: expected what"),
        (event(seq=0), "backup.events.0: expected rising numbers"),
        (event(times=0), "backup.events.0: expected rising numbers"),
        (event(at=float("inf")), "backup.events.0"),
        (event(outcome="great"), "backup.events.0.outcome: expected what"),
    ],
)
async def test_what_is_not_restored(on_a_file: Control, edit: Callable[[dict[str, Any]], Any], words: str) -> None:
    async with serving(on_a_file) as client:
        await client.put("/api/v1/services/web/scale", json={"replicas": 4})
        before = dict(on_a_file.file.read("override"))
        status, _, said = await error_of(await restored(client, edit(plain())))
        assert (status, bool(re.search(words, said))) == (400, True), said
        assert len(said) < 1000
        assert dict(on_a_file.file.read("override")) == before
        assert not on_a_file.has_ended.is_set()


async def test_another_projects_with_force_and_rows_of_another_build(on_a_file: Control) -> None:
    async with serving(on_a_file) as client:
        backup = plain() | {"project": "shop\n"}
        backup["rows"].append({"kind": "moods", "key": '"web"', "value": '"good"'})
        backup["rows"][0]["value"] = '{"replicas": 3, "spec_replicas": 2, "until": 9.0}'
        assert (await restored(client, backup, force=True)).status == 200
    async with serving(on_a_file) as client:
        assert dict(on_a_file.store.overrides) == {"web": Override(3, 2)}
        again = await (await client.get(BACKUP)).json()
        assert again["project"] == "p"
        assert [each for each in backup["rows"] if each not in again["rows"]] == []


async def test_a_body_is_bounded(on_a_file: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(api.CALLS, "restore", replace(api.CALLS["restore"], longest_body=100_000))
    async with serving(on_a_file) as client:
        too_large = plain() | {"build": "x" * 100_000}
        assert await error_of(await restored(client, too_large)) == (
            413, "request_entity_too_large", "body: expected at most 100000 bytes",
        )  # fmt: skip
        status, _, said = await error_of(await client.post("/api/v1/keys", json={"name": "x" * 70_000}))
        assert (status, said) == (413, "body: expected at most 65536 bytes")
        assert (await restored(client, plain() | {"build": "x" * 90_000})).status == 200, "more than other bodies"


async def test_the_daemon_ends_after_its_answer_so_that_docker_starts_the_next_one(
    on_a_file: Control, tmp_path: Path
) -> None:
    control, stop, store = on_a_file, asyncio.Event(), StateStore(StateFile(tmp_path))
    local = Gatekeeper((), frozenset)
    parts = Boundaries(control.engine, control.router, control.source, store, control.clock, local)
    asked = {name: getattr(control, name) for name in ("ask", "query", "series", "rules", "give", "tell_to_sleep")}
    world = World("p", parts, **asked, operate=operate, end=stop.set)
    settings = Settings("p", tmp_path, api_host="127.0.0.1", api_port=unused_port(), discovery_port=unused_port())
    daemon = asyncio.create_task(serve(settings, world, stop))
    await until(lambda: connects("127.0.0.1", settings.api_port))
    async with ClientSession(f"http://127.0.0.1:{settings.api_port}") as client:
        answer = await client.post(RESTORE, json={"backup": plain()})
        assert (await answer.json())["project"] == "p"
    with pytest.raises(BeginsAgain) as end:
        await daemon
    assert end.value.exit_code == 4, "any policy of Docker's but `no` starts it again"
    store.close()
    next_one = StateStore(StateFile(tmp_path))
    assert dict(next_one.overrides) == {"web": Override(3, 2)}
    next_one.close()


async def test_the_command(control: Control, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    async with served(control, web=2) as pierhead:
        await pierhead("scale", "web", "3", "--no-wait")
        made = await pierhead("backup", str(file))
        assert (made.code, made.err) == (0, "")
        assert re.fullmatch(rf"{file} has the state of p: \d+ rows and \d+ events\.\n", made.out)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        first = file.read_text()
        assert json.loads(first)["project"] == "p"
        twice = await pierhead("backup", str(file))
        assert (twice.code, twice.out, "exists; choose another name" in twice.err) == (2, "", True)
        assert file.read_text() == first
        file.chmod(0o644)
        assert (await pierhead("backup", str(file), "--force")).code == 0
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.read_text() != first
        printed = await pierhead("backup", "-")
        assert json.loads(printed.out).keys() == json.loads(first).keys()
        nowhere = await pierhead("backup", str(tmp_path / "none" / "state.json"))
        assert (nowhere.code, "No such file or directory; nothing was written" in nowhere.err) == (1, True)
        for content in ("", "[]", "{", "\0", "[" * 100_000):
            (tmp_path / "wrong").write_text(content)
            wrong = await pierhead("restore", str(tmp_path / "wrong"))
            assert (wrong.code, "expected what `pierhead backup` writes" in wrong.err) == (2, True), content[:9]
        assert (await pierhead("restore", str(tmp_path / "none"))).code == 2
        (tmp_path / "shop").write_text(json.dumps(json.loads(first) | {"project": "shop"}))
        other = await pierhead("restore", str(tmp_path / "shop"))
        assert (other.code, "the backup is of project 'shop'" in other.err) == (2, True)
        assert not control.has_ended.is_set()
        done = await pierhead("restore", str(file))
        assert (done.code, done.out.startswith("The state of p is restored: ")) == (0, True)
        assert control.has_ended.is_set()
    async with served(control, web=3) as pierhead:
        process = await pierhead.begin("restore", "-", "--force", "-o", "json")
        out, _ = await process.communicate((tmp_path / "shop").read_bytes())
        assert (process.returncode, json.loads(out)["project"]) == (0, "shop")
    left = {each for each in os.listdir(tmp_path) if "state" in each and not each.startswith(FILE_NAME)}
    assert left == {file.name}, "no half of a file"


# ------------------------------------------------------------------------------------------------------------ pure


def test_a_document_is_as_good_as_its_content(tmp_path: Path) -> None:
    store = StateStore(StateFile(tmp_path))
    store.overrides.put("web", Override(3, 2))
    store.token_of("web-1")
    store.failure(("web", "v1"), 3.0, "code 1")
    store.append_event(Event(1.0, "scale", "web", "web", "a line\nand more", "ok"))
    content = store.content()
    store.close()
    backup = backup_of(content, "p", 5.0)
    body = json.dumps({"backup": json.loads(json_text(backup))}).encode()
    assert restore_in(body).backup == backup
    assert content_of(backup) == content
    with pytest.raises(InvalidRequest, match="body: expected"):
        restore_in(b"{")


async def test_no_more_events_are_restored_than_are_kept(tmp_path: Path) -> None:
    stored = tuple(StoredEvent(number, Event(1.0, "scale", "", "", "m", "ok"), 1.0) for number in range(1, 3000))
    content = content_of(backup_of(StateContent((), stored, 3000), "p", 5.0))
    store = StateStore(StateFile(tmp_path))
    await store.replace(content, Event(2.0, "asked", "", "", "the last one"))
    store.close()
    found = StateStore(StateFile(tmp_path)).events()
    assert [each.seq for each in found] == [*range(3001 - EVENTS_KEPT, 3000), 3001]
    assert found[-1].event.message == "the last one"
