"""Keys of clients: made, listed and revoked by the command and the API, and brought to HAProxy by the loop."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.api_tokens import read_tokens
from controller.daemon import assembly
from controller.daemon import keys as key_commands
from controller.daemon.callers import Gatekeeper
from controller.desired.keys import KeysInForce
from controller.errors import RoutingError, RoutingUnreachable
from controller.model.actions import WriteKeys, WriteRouting
from controller.model.keys import DAY_S, NO_KEYS, KeySet, ServiceKey, digest_of
from controller.observe.key_uses import MOST_WRITES, KeyUses
from controller.routing import haproxy_keys
from controller.routing.haproxy import HAProxyRouter
from controller.routing.haproxy_process import HAProxyProcess
from controller.storage.file import StateFile
from controller.storage.store import StateStore
from tests.fakes.fake_router import FakeRouter
from tests.unit.controller.control import Control, until
from tests.unit.controller.test_api import error_of, serving
from tests.unit.controller.test_cli import served
from tests.unit.controller.worlds import service

PATH = "/api/v1/keys"
WEB = service("web", auth="key")


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, WEB, service("api", replicas=1))


def key(name: str, **changes: Any) -> ServiceKey:
    return ServiceKey(name, digest_of(f"sk-{name}"), 1_000.0, **changes)


def known(control: Control) -> set[str]:
    """The names that HAProxy knows."""
    return {each.name for each in control.router.keys.keys}


async def test_a_key_comes_to_haproxy_and_goes_again(control: Control) -> None:
    async with serving(control) as client:
        await until(lambda: control.router.keys.digest)
        wanted = {"name": "team", "services": ["web"], "per_minute": 600, "days": 2}
        made = await (await client.post(PATH, json=wanted)).json()
        await until(lambda: known(control) == {"team"})
        [there] = control.router.keys.keys
        assert (there.digest, there.services, there.per_minute) == (digest_of(made["key"]), ("web",), 600)
        assert made["key"].startswith("sk-")
        assert there.ends_at == there.made_at + 2 * DAY_S
        listed = (await (await client.get(PATH)).json())["keys"]
        assert made["in_force"]
        assert listed == [made["about"]]
        control.router.used["team"] = 0.0
        [used] = (await (await client.get(PATH)).json())["keys"]
        assert used["made_at"] <= used["used_at"] <= time.time()
        for secret in (made["key"], there.digest):
            assert secret not in json.dumps([listed, await (await client.get("/api/v1/events")).json()])
        assert (await client.delete(f"{PATH}/team")).status == 202
        await until(lambda: known(control) == set())
        assert await error_of(await client.delete(f"{PATH}/teem")) == (
            404, "unknown_key", "there is no key 'teem'; `pierhead keys list` lists them",
        )  # fmt: skip


async def test_keys_survive_the_controller(control: Control) -> None:
    async with serving(control) as client:
        await client.post(PATH, json={"name": "team", "models": ["qwen*"]})
        await until(lambda: known(control) == {"team"})
        [before] = (await (await client.get(PATH)).json())["keys"]
    control.router.keys = NO_KEYS
    async with serving(control) as client:
        await until(lambda: known(control) == {"team"})
        assert control.router.keys.keys[0].models == ("qwen*",)
        assert (await (await client.get(PATH)).json())["keys"] == [before]
        control.router.used["team"] = 30.0
        await client.delete(f"{PATH}/team")
        await client.post(PATH, json={"name": "team"})
        [new] = (await (await client.get(PATH)).json())["keys"]
        assert new["used_at"] is None, "that was another key of its name"


async def test_without_a_service_that_asks_for_one_nothing_is_written(control: Control) -> None:
    control.source.edit(service("web"), service("api", replicas=1))
    async with serving(control) as client:
        await client.post(PATH, json={"name": "team"})
        await control.settled("web", 2)
        assert not any(isinstance(action, WriteKeys) for action in control.router.done)
        control.source.edit(WEB, service("api", replicas=1))
        await until(
            lambda: control.view.desired and control.router.hash == control.view.desired.routing_hash and known(control)
        )
        kinds = [type(action) for action in control.router.done if isinstance(action, WriteKeys | WriteRouting)]
        assert kinds[-2:] == [WriteKeys, WriteRouting], "no route asks for a key that HAProxy does not have yet"


async def test_what_haproxy_does_not_take_is_told_and_tried_again(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_commands, "TOLD_WITHIN_S", 0.1)
    async with served(control) as pierhead:
        await pierhead("keys", "create", "team")
        await until(lambda: known(control) == {"team"})
        control.router.failing[WriteKeys] = RoutingError("no")
        made = await pierhead("keys", "create", "other")
        assert (made.code, "HAProxy has not taken the change yet" in made.err) == (0, True)
        revoked = await pierhead("keys", "revoke", "team")
        assert (revoked.code, revoked.out) == (1, "")
        assert "team is revoked, and may still open what it did" in revoked.err
        del control.router.failing[WriteKeys]
        await until(lambda: known(control) == {"other"})


async def test_a_key_is_revoked_while_nothing_can_be_stored(control: Control) -> None:
    async with serving(control) as client:
        await client.post(PATH, json={"name": "team"})
        await until(lambda: known(control) == {"team"})
        control.set_disk_full(True)
        assert (await client.post(PATH, json={"name": "other"})).status == 500
        answer = await client.delete(f"{PATH}/team")
        assert (await answer.json())["in_force"]
        assert known(control) == set()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "body: expected"),
        ({"name": ""}, "name: expected 1 to 63"),
        ({"name": "a b"}, "name: expected 1 to 63"),
        ({"name": "a|b"}, "name: expected 1 to 63"),
        ({"name": 1}, "name: expected 1 to 63"),
        ({"name": "a", "service": "web"}, "and nothing else"),
        ({"name": "a", "services": "web"}, "services: expected a list"),
        ({"name": "a", "services": ["nobody"]}, "there is no service 'nobody'"),
        ({"name": "a", "models": ["a b"]}, "models: expected names or patterns"),
        ({"name": "a", "models": ["a;b"]}, "models: expected names or patterns"),
        ({"name": "a", "models": ["m" * 167] * 3}, "models: expected at most 500 characters in all, found 503"),
        ({"name": "a", "services": ["web"] * 501}, "services: expected at most 2000 characters in all, found 2003"),
        ({"name": "a", "per_minute": -1}, "per_minute: expected a whole number"),
        ({"name": "a", "per_minute": 1.5}, "per_minute: expected a whole number"),
        ({"name": "a", "concurrent": True}, "concurrent: expected a whole number"),
        ({"name": "a", "tokens_per_minute": 10**12}, "tokens_per_minute: expected a whole number"),
        ({"name": "a", "days": 36_501}, "days: expected a whole number up to 36500"),
        ({"name": "taken"}, "there is a key taken already"),
    ],
)
async def test_what_cannot_be_made(control: Control, body: dict[str, Any], message: str) -> None:
    async with serving(control) as client:
        await client.post(PATH, json={"name": "taken"})
        status, _, said = await error_of(await client.post(PATH, json=body))
        assert status in (400, 404)
        assert message in said
        assert len((await (await client.get(PATH)).json())["keys"]) == 1


async def test_there_is_an_end_to_keys(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "MOST_KEYS", 2)
    async with serving(control) as client:
        answers = [await client.post(PATH, json={"name": name}) for name in ("a", "b", "c")]
        assert [answer.status for answer in answers] == [200, 200, 400]
        assert "there are 2 keys, as many as there may be" in await answers[-1].text()


async def test_only_an_admin_makes_keys(control: Control) -> None:
    tokens = read_tokens("secret", "")
    reader = replace(tokens[0], name="reader", role="read", digest=digest_of("reads"))
    async with serving(control, Gatekeeper((*tokens, reader), frozenset)) as client:
        for method, path in (("post", PATH), ("delete", f"{PATH}/team")):
            answer = await getattr(client, method)(
                path, headers={"Authorization": "Bearer reads"}, json={"name": "team"}
            )
            assert answer.status == 403
        assert (await client.get(PATH, headers={"Authorization": "Bearer reads"})).status == 200
        made = await client.post(PATH, headers={"Authorization": "Bearer secret"}, json={"name": "team"})
        assert made.status == 200


async def test_the_command(control: Control) -> None:
    async with served(control) as pierhead:
        empty = await pierhead("keys", "list")
        assert (empty.code, empty.out) == (0, "there are no keys; `pierhead keys create NAME` makes one\n")
        made = await pierhead("keys", "create", "team", "--service", "web", "--per-minute", "600", "--days", "3")
        assert (made.code, made.out.startswith("sk-"), made.out.count("\n")) == (0, True, 1)
        assert "It opens web" in made.err
        await until(lambda: known(control) == {"team"})
        shown = await pierhead("keys", "list")
        assert shown.out.split("\n")[1].split()[:4] == ["team", "web", "all", "600"]
        assert "in 2 d" in shown.out or "in 3 d" in shown.out
        assert (await pierhead.offers("pierhead keys revoke t")) == ["team"]
        document = json.loads((await pierhead("keys", "list", "-o", "json")).out)
        assert document["keys"][0]["name"] == "team"
        twice = await pierhead("keys", "create", "team")
        assert (twice.code, "there is a key team already" in twice.err) == (2, True)
        gone = await pierhead("keys", "revoke", "team")
        assert (gone.code, gone.out) == (0, "team opens nothing any more.\n")
        await until(lambda: known(control) == set())
        assert "POST keys" in (await pierhead("audit")).out


# ------------------------------------------------------------------------------------------------------------ pure


def test_a_key_ends_by_itself() -> None:
    now = [1_000.0]
    keys = KeysInForce({"a": key("a"), "b": key("b", ends_at=2_000.0)}, lambda: now[0])
    first = keys.now([WEB])
    assert [each.name for each in first.keys] == ["a", "b"]
    now[0] = 1_999.0
    assert keys.now([WEB]) is first, "nothing is computed while nothing changes"
    now[0] = 2_000.0
    assert [each.name for each in keys.now([WEB]).keys] == ["a"]
    assert keys.now([service("web")]) is NO_KEYS
    assert KeysInForce({}, lambda: 0.0).now([WEB]).digest, "no key is a set of keys, too"


async def test_the_day_of_the_last_use_is_stored_a_few_keys_at_a_time(tmp_path: Path) -> None:
    router, now, store = FakeRouter(), [10 * DAY_S], StateStore(StateFile(tmp_path))
    keys = {name: key(name) for name in map(str, range(MOST_WRITES + 1))}

    def uses() -> KeyUses:
        return KeyUses(router, keys, store.key_uses, lambda: now[0])

    first = uses()
    router.used = dict.fromkeys([*keys, "revoked"], 60.0)
    await first.look()
    first.keep()
    assert len(store.key_uses) == MOST_WRITES
    first.keep()
    assert {*store.key_uses.values()} == {10 * DAY_S - 60.0}
    assert "revoked" not in store.key_uses
    router.up = False
    next_one = uses()
    await next_one.look()
    assert next_one.at(keys["0"]) == 10 * DAY_S - 60.0, "HAProxy does not answer; the store knows"
    assert next_one.at(key("other")) is None
    router.up, now[0] = True, 11 * DAY_S - 120.0
    await next_one.look()
    next_one.keep()
    assert store.key_uses["0"] == 10 * DAY_S - 60.0, "less than a day has passed"
    now[0] = 8 * DAY_S
    await next_one.look()
    next_one.keep()
    assert store.key_uses["0"] == 8 * DAY_S - 60.0, "the clock was wrong before"
    store.close()


NAMES = st.from_regex(r"[A-Za-z0-9._@-]{1,63}", fullmatch=True)
KEYS = st.lists(
    st.builds(
        key,
        NAMES,
        services=st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True), max_size=3).map(tuple),
        models=st.lists(st.from_regex(r"[A-Za-z0-9._:/@*?-]{1,20}", fullmatch=True), max_size=3).map(tuple),
        per_minute=st.integers(0, 10**9),
        concurrent=st.integers(0, 10**9),
    ),
    unique_by=lambda each: each.name,
    max_size=5,
)


@given(KEYS, KEYS)
def test_the_commands_lead_from_any_map_to_any_other(before: list[ServiceKey], after: list[ServiceKey]) -> None:
    found, wanted = (dict(haproxy_keys.entries(KeySet.of(tuple(keys)))) for keys in (before, after))
    for line in list(haproxy_keys.commands(found, wanted)):
        assert found != wanted, "nothing says that all is done before it is"
        verb, _, map_name, place, *entry = line.split(" ")
        assert map_name == haproxy_keys.MAP
        if verb == "del":
            del found[place]
        else:
            assert (verb == "set") == (place in found)
            [found[place]] = entry
    assert found == wanted
    assert list(haproxy_keys.commands(found, wanted)) == []
    assert (KeySet.of(tuple(before)).digest == KeySet.of(tuple(after)).digest) == (
        sorted(before, key=repr) == sorted(after, key=repr)
    )


class Worker:
    """The map of one of HAProxy's processes, by its commands."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self.map = dict(known)

    async def ask(self, line: str) -> str:
        verb, _, _, *entry = line.split(" ")
        if verb == "show":
            return "\n".join(f"0x1 {place} {value}" for place, value in self.map.items())
        if verb == "del":
            del self.map[entry[0]]
        elif verb != "clear":
            self.map[entry[0]] = entry[1]
        return ""

    async def ask_all(self, lines: Sequence[str]) -> list[str]:
        return [await self.ask(line) for line in lines]


class Master:
    """It has one replaced worker, and does not answer at first."""

    def __init__(self, replaced: Worker) -> None:
        self.replaced, self.is_silent = replaced, True

    async def leaving_workers(self) -> tuple[int, ...]:
        if self.is_silent:
            raise RoutingUnreachable("the master does not answer")
        return (7,)

    async def ask_worker(self, pid: int, line: str) -> str:
        return await self.replaced.ask(line)


async def test_a_revocation_is_tried_again_until_replaced_workers_have_it() -> None:
    both, one = (dict(haproxy_keys.entries(KeySet.of(keys))) for keys in ((key("a"), key("b")), (key("a"),)))
    worker, replaced = Worker(both), Worker(both)
    master = Master(replaced)
    with pytest.raises(RoutingUnreachable):
        await haproxy_keys.write(cast("Any", worker), cast("Any", master), one)
    assert worker.map.keys() == one.keys(), "the worker of new connections has it already"
    assert worker.map[haproxy_keys.DIGEST] != one[haproxy_keys.DIGEST], "so that it is tried again"
    master.is_silent = False
    await haproxy_keys.write(cast("Any", worker), cast("Any", master), one)
    assert worker.map == one
    assert replaced.map.keys() == one.keys()


async def test_a_full_disk_does_not_keep_a_revoked_key_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    async def perform(process: HAProxyProcess, action: WriteKeys) -> None:
        told.append(action)

    monkeypatch.setattr(HAProxyProcess, "perform", perform)
    router = HAProxyRouter(tmp_path)
    (tmp_path / haproxy_keys.FILE).mkdir()  # it cannot be written
    action = WriteKeys(target="keys", keys=KeySet.of((key("a"),)), cause="revoked")
    with pytest.raises(RoutingError, match=r"HAProxy has the keys of clients, but .* cannot be written"):
        await router.perform(action)
    assert told == [action]


@pytest.mark.parametrize(
    "wrong", [{"name": "a|b"}, {"name": "a\nb"}, {"digest": "x"}, {"models": ("a b",)}, {"services": ("a;b",)}]
)
def test_what_may_not_be_put_into_the_map(wrong: dict[str, Any]) -> None:
    with pytest.raises(RoutingError, match="may not be put into HAProxy's configuration"):
        haproxy_keys.entries(KeySet.of((replace(key("a"), **wrong),)))
