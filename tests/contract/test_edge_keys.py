"""Who may call a service with `x-serve.auth: key`, and how much, at the real HAProxy."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, WSServerHandshakeError

from controller.errors import RoutingUnreachable
from controller.model.actions import WriteKeys
from controller.model.keys import KeySet, ServiceKey, digest_of
from controller.model.spec import AccessLog
from controller.routing import haproxy_keys
from controller.routing.haproxy import HAProxyRouter
from controller.routing.haproxy_socket import MasterSocket, RuntimeSocket
from tests.harness.edge import Edge, GrpcReplica, error_of, metadata_of, refusal, service
from tests.harness.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

NOW = 1_000.0
OTHER = "sk-of-nobody"


def key(name: str, **limits: Any) -> ServiceKey:
    """The key `sk-<name>`."""
    return ServiceKey(name, digest_of(f"sk-{name}"), NOW, **limits)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}"}


async def know(edge: Edge, *keys: ServiceKey) -> None:
    await edge.router.perform(WriteKeys(target="keys", keys=KeySet.of(keys)))


async def status(edge: Edge, path: str = "/echo", **headers: str) -> int:
    async with edge.http.get(path, headers=headers) as answer:
        await answer.read()
        return answer.status


@pytest.fixture
async def closed(edge: Edge) -> Edge:
    """An edge whose service `echo` asks for a key; `open` does not. No sample of answered requests is in its log."""
    await edge.route(service("echo", auth="key", access_log=AccessLog(sample=0)), service("open"))
    for name in ("echo", "open"):
        await edge.serve(name, f"{name}-1")
    return edge


@pytest.mark.parametrize(
    ("headers", "key_name"),
    [
        ({}, None),
        ({"authorization": f"Bearer {OTHER}"}, None),
        ({"x-api-key": OTHER}, None),
        ({"authorization": "Bearer"}, None),
        ({"authorization": "Basic c2stdGVhbTo="}, None),
        ({"authorization": "sk-team"}, None),
        ({"x-pierhead-key": "team"}, None),
        ({"authorization": f"Bearer {digest_of('sk-team')}"}, None),
        ({"authorization": f"Bearer {'x' * 4000}"}, None),
        (bearer("team"), "team"),
        ({"authorization": "bearer sk-team"}, "team"),
        ({"x-api-key": "sk-team"}, "team"),
        ({**bearer("team"), "x-api-key": "of-the-app"}, "team"),
        ({"authorization": "Bearer of-the-app", "x-api-key": "sk-team"}, "team"),
        ({**bearer("team"), "x-pierhead-key": "admin", "x-pierhead-models": "*"}, "team"),
        ({**bearer("team"), "X_Pierhead_Key": "admin", "x_pierhead-models": "*"}, "team"),
        ({**bearer("team"), "x-api-key": "sk-team"}, "team"),
    ],
)
async def test_who_gets_in(closed: Edge, headers: dict[str, str], key_name: str | None) -> None:
    await know(closed, key("team", models=("qwen*", "llama:*")))
    if key_name is None:
        code, error, answered = await error_of(closed, "/echo", headers=headers)
        assert (code, error["code"], answered["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
        return
    async with closed.http.get("/echo", headers=headers) as answer:
        received = (await answer.json())["headers"]
    assert (answer.status, received["x-pierhead-key"], received["x-pierhead-models"]) == (200, "team", "qwen*,llama:*")
    sent = {name: received.get(name) for name in ("authorization", "x-api-key")}
    assert not [name for name in received if "_" in name]
    assert sent == {name: text if "of-the-app" in (text := headers.get(name, "")) else None for name in sent}


async def test_a_service_that_asks_for_no_key_gets_no_name_of_one(closed: Edge) -> None:
    headers = {**bearer("team"), "x-pierhead-key": "team", "x-pierhead-models": "*", "x_pierhead_key": "team"}
    await know(closed, key("team"))
    async with closed.http.get("/open", headers=headers) as answer:
        received = (await answer.json())["headers"]
    assert received["authorization"] == "Bearer sk-team"
    assert not [name for name in received if "pierhead" in name]


async def test_a_key_opens_its_services_alone(edge: Edge) -> None:
    await edge.route(*(service(name, auth="key") for name in ("echo", "echo-2")))
    for name in ("echo", "echo-2"):
        await edge.serve(name, f"{name}-1")
    await know(edge, key("both", services=("echo", "echo-2")), key("all"), key("second", services=("echo-2",)))
    found = {
        (name, path): await status(edge, path, **bearer(name))
        for name in ("both", "all", "second")
        for path in ("/echo", "/echo-2")
    }
    assert found.pop(("second", "/echo")) == 403
    assert set(found.values()) == {200}
    _, error, _ = await error_of(edge, "/echo", headers=bearer("second"))
    assert (error["code"], error["message"]) == (
        "key_not_allowed", "The key second is for other services than echo. Nothing was done.",
    )  # fmt: skip


async def test_keys_are_changed_without_a_reload_and_survive_one(closed: Edge) -> None:
    async def known() -> Mapping[str, int]:
        return {name: await status(closed, **bearer(name)) for name in ("a", "b", "c")}

    before = (await closed.state()).pid
    await know(closed, key("a"), key("b", services=("open",)))
    first = (await closed.state()).keys
    assert first == KeySet.of((key("a"), key("b", services=("open",)))).digest
    assert await known() == {"a": 200, "b": 403, "c": 401}
    await know(closed, key("b"), key("c"))
    assert await known() == {"a": 401, "b": 200, "c": 200}
    assert (await closed.state()).pid == before
    await closed.route(service("echo", auth="key"), service("open"), service("more"))
    assert await known() == {"a": 401, "b": 200, "c": 200}, "after a reload"
    in_force = KeySet.of((key("b"), key("c"))).digest
    assert (await closed.state()).keys == in_force
    await asyncio.to_thread(closed.container.kill_and_wait)
    closed.router = HAProxyRouter(closed.run_dir)
    assert await known() == {"a": 401, "b": 200, "c": 200}, "after a crash"
    assert (await closed.state()).keys == in_force
    await know(closed)
    assert set((await known()).values()) == {401}


async def test_keys_are_there_when_the_first_service_asks_for_one(edge: Edge) -> None:
    await edge.route(service("echo"))
    await know(edge, key("team"))
    assert (await edge.state()).keys
    await edge.route(service("echo", auth="key"))
    await edge.serve("echo", "echo-1")
    assert (await status(edge, **bearer("team")), await status(edge)) == (200, 401)


async def test_ten_thousand_keys(closed: Edge) -> None:
    keys = tuple(key(f"team-{number}", services=("echo",), per_minute=600) for number in range(10_000))
    await know(closed, *keys)
    assert await status(closed, **bearer("team-9999")) == 200
    await know(closed, *keys[:-1])
    assert await status(closed, **bearer("team-9999")) == 401
    assert await status(closed, **bearer("team-0")) == 200


async def test_the_largest_key_that_the_api_makes(closed: Edge) -> None:
    scope = {"models": ("m" * 166, "n" * 166, "o" * 166), "services": (*("s" * 39 for _ in range(49)), "echo")}
    await know(closed, key("x" * 63, per_minute=10**9, tokens_per_minute=10**9, concurrent=10**9, **scope))
    async with closed.http.post("/echo/body", data=b"x" * 64_000, headers=bearer("x" * 63)) as answer:
        assert answer.status == 200
        assert len((await answer.json())["headers"]["x-pierhead-models"]) == 500


async def test_a_key_ends_by_itself(closed: Edge) -> None:
    """Also while no controller takes it out of the map."""
    await know(closed, key("past", ends_at=time.time() - 1), key("ends", ends_at=time.time() + 3))
    assert await status(closed, **bearer("past")) == 401
    assert await status(closed, **bearer("ends")) == 200

    async def has_ended() -> bool:
        return await status(closed, **bearer("ends")) == 401

    await until(has_ended, "its time is over")


async def test_a_replaced_worker_refuses_what_was_revoked_too(closed: Edge) -> None:
    """It serves the connections that it has."""
    await know(closed, key("team"), key("other"))
    replica = closed.replicas[0]
    async with ClientSession(closed.url) as kept:
        held = asyncio.ensure_future(kept.get("/echo/hold", headers=bearer("team")))
        await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
        before = (await closed.state()).pid
        await closed.route(service("echo", auth="key"), service("open"), service("more"))
        assert (await closed.state()).pid != before
        await know(closed, key("other"))
        [leaving] = await MasterSocket(closed.run_dir / "master.sock").leaving_workers()
        shown = await MasterSocket(closed.run_dir / "master.sock").ask_worker(leaving, f"show map {haproxy_keys.MAP}")
        assert digest_of("sk-other").upper() in shown
        assert digest_of("sk-team").upper() not in shown
        replica.let_go.set()
        assert (await held).status == 200, "what has begun ends as it would"


async def test_a_change_that_is_interrupted_is_made_again(closed: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    await know(closed, key("a"))
    first, ask_all = (await closed.state()).keys, RuntimeSocket.ask_all

    async def break_off(self: RuntimeSocket, lines: Sequence[str], *more: Any, **options: Any) -> list[str]:
        if any(line.startswith("add map") for line in lines):
            await ask_all(self, lines[:2])
            raise RoutingUnreachable(f"it did not answer {lines}")
        return await ask_all(self, lines, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(RuntimeSocket, "ask_all", break_off)
        with pytest.raises(RoutingUnreachable) as told:
            await know(closed, key("a"), key("b"))
    assert digest_of("sk-b").upper() not in str(told.value), "no message has a key's hash"
    assert (await closed.state()).keys not in (first, KeySet.of((key("a"), key("b"))).digest)
    await know(closed, key("a"))
    assert await status(closed, **bearer("b")) == 401
    assert (await closed.state()).keys == first


async def test_another_key_of_that_name_begins_from_nothing(closed: Edge) -> None:
    await know(closed, key("team", per_minute=1))
    assert [await status(closed, **bearer("team")) for _ in range(2)] == [200, 429]
    await know(closed)
    await know(closed, key("team", per_minute=1))
    assert await status(closed, **bearer("team")) == 200


async def test_until_there_are_keys_clients_are_asked_to_come_again(edge: Edge) -> None:
    await edge.route(service("echo", auth="key"))
    await edge.serve("echo", "echo-1")
    code, error, headers = await error_of(edge, "/echo", headers=bearer("team"))
    assert (code, error["code"], headers["retry-after"]) == (503, "keys_unknown", "1")
    await know(edge)
    assert await status(edge, **bearer("team")) == 401


async def test_a_websocket_needs_a_key_too(closed: Edge) -> None:
    await know(closed, key("team"))
    for path, asked, expected in (("/echo/socket", {}, 401), ("/echo/socket", bearer("team"), 101)):
        try:
            async with closed.http.ws_connect(path, headers=asked):
                found = 101
        except WSServerHandshakeError as error:
            found = error.status
        assert found == expected


async def test_requests_a_minute(closed: Edge) -> None:
    await know(closed, key("team", per_minute=3), key("other", per_minute=3))
    left = []
    for _ in range(3):
        async with closed.http.get("/echo", headers=bearer("team")) as answer:
            left.append(
                (
                    answer.status,
                    answer.headers["x-ratelimit-limit-requests"],
                    answer.headers["x-ratelimit-remaining-requests"],
                )
            )
    assert left == [(200, "3", "2"), (200, "3", "1"), (200, "3", "0")]
    for _ in range(5):
        code, error, headers = await error_of(closed, "/echo", headers=bearer("team"))
        assert (code, error["code"], headers["retry-after"]) == (429, "rate_limit_exceeded", "10")
        assert "The key team has no more requests a minute" in error["message"]
    assert await status(closed, **bearer("other")) == 200


async def test_when_a_key_was_last_used(closed: Edge) -> None:
    await know(closed, key("team"), key("other"))
    assert await closed.router.key_ages() == {}
    assert await status(closed, **bearer("team")) == 200
    assert await status(closed, **bearer("unknown")) == 401
    ages = await closed.router.key_ages()
    assert ages.keys() == {"team"}
    assert 0 <= ages["team"] < 60


async def test_requests_at_a_time(closed: Edge) -> None:
    await know(closed, key("team", concurrent=1))
    replica = closed.replicas[0]
    held = asyncio.ensure_future(status(closed, "/echo/hold", **bearer("team")))
    await asyncio.wait_for(replica.begun.wait(), PATIENCE_S)
    for _ in range(3):
        _, error, _ = await error_of(closed, "/echo", headers=bearer("team"))
        assert "no more requests at a time" in error["message"]
    replica.let_go.set()
    assert await held == 200

    async def again() -> bool:
        return await status(closed, **bearer("team")) == 200

    await until(again, "it has room again")


async def test_tokens_a_minute(closed: Edge) -> None:
    await know(closed, key("team", tokens_per_minute=100))
    seen = []
    for used in (60, 60, 1):
        async with closed.http.get(f"/echo/tokens?used={used}", headers=bearer("team")) as answer:
            assert "x-pierhead-tokens" not in answer.headers
            seen.append((answer.status, answer.headers.get("x-ratelimit-remaining-tokens")))
    assert seen == [(200, "100"), (200, "40"), (429, "0")]


async def test_a_held_request_is_judged_and_counted_once(edge: Edge) -> None:
    await edge.route(service("echo", auth="key"))
    await know(edge, key("team", per_minute=2, concurrent=1))
    code, _, _ = await error_of(edge, "/echo")
    assert code == 401, "nobody without a key waits"
    waiting = asyncio.ensure_future(edge.http.get("/echo/tokens?used=5", headers=bearer("team")))

    async def is_held() -> bool:
        held = (await edge.state()).held.get("svc_echo")
        return bool(held and held.now)

    await until(is_held, "the request is held")
    assert await status(edge, **bearer("team")) == 429, "the held one counts"
    await edge.serve("echo", "echo-1")
    async with await waiting as answer:
        assert (answer.status, "x-pierhead-tokens" in answer.headers) == (200, False)
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    async with edge.http.get("/echo", headers=bearer("team")) as answer:
        assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (200, "0")


async def test_grpc(edge: Edge) -> None:
    replica = GrpcReplica(edge.container.gateway)
    await replica.server.start()
    try:
        spec = service("echo", protocol="grpc", route=None, grpc_services=("test.Echo",), auth="key")
        await edge.route(spec)
        await edge.add("echo", "echo-1", replica.address)
        await know(edge, key("team", per_minute=2), key("other", services=("web",)))
        async with grpc.aio.insecure_channel(f"{edge.container.ip}:9000") as channel:
            echo: Any = channel.unary_unary("/test.Echo/Unary")
            refused: tuple[Any, ...] = ((), (("authorization", "Bearer nobody's"),))
            for sent in refused:
                error = await refusal(echo(b"x", metadata=sent))
                assert (error.code(), "echo needs a key" in (error.details() or "")) == (
                    grpc.StatusCode.UNAUTHENTICATED,
                    True,
                )
            error = await refusal(echo(b"x", metadata=(("authorization", "Bearer sk-other"),)))
            assert (error.code(), error.details()) == (
                grpc.StatusCode.PERMISSION_DENIED, "The key other is for other services than echo. Nothing was done.",
            )  # fmt: skip
            for sent in ((("authorization", "Bearer sk-team"),), (("x-api-key", "sk-team"), ("x-pierhead-key", "me"))):
                call = echo(b"x", metadata=sent)
                assert await call == b"x"
                received = dict(await call.trailing_metadata())["received"]
                assert "x-pierhead-key=team" in received
                assert "authorization" not in received
            error = await refusal(echo(b"x", metadata=(("x-api-key", "sk-team"),)))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert metadata_of(error)["pierhead-refused"] == "overloaded"
    finally:
        await replica.server.stop(None)


async def test_only_root_reads_the_file_and_the_log_has_the_name(closed: Edge) -> None:
    await know(closed, key("team", per_minute=1))
    assert [await status(closed, **bearer("team")) for _ in range(2)] == [200, 429]
    assert stat.filemode((closed.run_dir / "keys.map").stat().st_mode) == "-rw-------"
    [line] = await closed.logged(1)
    assert (line["status"], line["key"]) == (429, "team")
    log = await asyncio.to_thread(closed.container.log_lines)
    assert "sk-team" not in json.dumps(log)
