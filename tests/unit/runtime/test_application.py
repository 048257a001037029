"""All services of an application in one loop: `pierhead.testing.local`, which `dev` serves from as well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from aiohttp import web
from fastapi import FastAPI
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pierhead import Backpressure, BadRequest, NoReplica, Service, batch, endpoint, handle, override_handle
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.classes.handles import handle_on
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.runner.in_loop import LoopRunner
from pierhead.runner.options import NoOptions
from pierhead.runner.runner import NoApplication
from pierhead.testing import LocalApplication, local

from tests.unit.runtime.harness import echo, until

closed: list[str] = []


class Scorer(Service, max_ongoing_requests=4, user_config={"by": 2}):
    def __init__(self) -> None:
        self.by = 0
        self.gate = asyncio.Event()
        self.waiting = 0
        self.batches: list[int] = []
        self.healthy = False

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        self.by = user_config["by"]

    async def check_health(self) -> None:
        self.healthy = True

    @batch(max_batch_size=8, batch_wait_timeout_s=0.02)
    async def score(self, users: list[int]) -> list[float]:
        self.batches.append(len(users))
        return [user / self.by for user in users]

    async def sizes(self) -> list[int]:
        return self.batches

    async def wait(self) -> None:
        await self.gate.wait()

    async def release(self) -> bool:
        self.gate.set()
        return self.healthy

    async def fail(self, how: str) -> None:
        if how == "bad":
            raise BadRequest("how: expected anything else")
        raise ValueError("boom")

    async def aclose(self) -> None:
        closed.append("scorer")


app = FastAPI()


class Shop(Service, route="/shop", strip_prefix=True, asgi=app):
    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer

    @app.get("/recommend")  # type: ignore[untyped-decorator]
    async def recommend(self, user: int) -> dict[str, float]:
        return {"score": await self.scorer.score(user)}

    @app.get("/fail/{how}")  # type: ignore[untyped-decorator]
    async def fail(self, how: str) -> None:
        await self.scorer.fail(how)

    def close(self) -> None:
        closed.append("shop")


class Door(Service, route="/"):
    def __init__(self, scorer: Scorer, shop: Shop) -> None:
        self.scorer = scorer

    @endpoint("GET", "/door")
    async def door(self, request: web.Request) -> web.Response:
        return web.json_response(await self.scorer.score(int(request.query["user"])))


scorer = Scorer.bind()
door = Door.bind(scorer, Shop.bind(scorer))


@pytest.fixture
async def running() -> AsyncIterator[LocalApplication]:
    closed.clear()
    async with local(door) as made:
        yield made


class TestLocal:
    async def test_services_of_both_kinds_of_http_and_handles(self, running: LocalApplication) -> None:
        async with running.http.get("/shop/recommend?user=3") as response:
            assert await response.json() == {"score": 1.5}
        async with running.http.get("/door?user=5") as response:
            assert await response.json() == 2.5
        assert await running.handle(Scorer).score(4) == 2.0
        with pytest.raises(KeyError, match="LocalApplication is no service of this application; it has door, shop, sc"):
            running.handle(LocalApplication)  # type: ignore[type-var]

    async def test_errors_are_those_of_containers(self, running: LocalApplication) -> None:
        for how, status, code in (("bad", 400, "bad_request"), ("boom", 500, "internal")):
            async with running.http.get(f"/shop/fail/{how}", headers={"x-request-id": "mine"}) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"], error["request_id"]) == (status, code, "mine")
        assert "boom" not in error["message"], "an id of the log in its place"
        with pytest.raises(BadRequest, match="how: expected anything else"):
            await running.handle(Scorer).fail("bad")

    async def test_calls_of_several_requests_are_one_batch(self, running: LocalApplication) -> None:
        asked = [running.http.get(f"/shop/recommend?user={user}") for user in range(4)]
        for response in await asyncio.gather(*asked):
            response.release()
        assert max(await running.handle(Scorer).sizes()) > 1

    async def test_settings_and_health_come_before_the_first_request(self, running: LocalApplication) -> None:
        assert await running.handle(Scorer).release() is True

    async def test_a_mounted_application_knows_where_it_is(self, running: LocalApplication) -> None:
        async with running.http.get("/shop/docs") as response:
            assert "url: '/shop/openapi.json'" in await response.text()
        async with running.http.get("/shop/openapi.json") as response:
            assert (await response.json())["servers"] == [{"url": "/shop"}]

    async def test_it_ends_with_the_block(self) -> None:
        closed.clear()
        async with local(door):
            pass
        assert closed == ["shop", "scorer"], "callers first"
        with pytest.raises(NoReplica):
            await handle_on(Scorer, HandleChannel("scorer", timeout_s=0.05)).score(1)
        await Clients.current().close()

    async def test_a_fake_in_the_place_of_a_service(self, running: LocalApplication) -> None:
        class Fake(Scorer):
            @batch()
            async def score(self, users: list[int]) -> list[float]:
                return [42.0 for _ in users]

        with override_handle("scorer", Fake()):
            async with running.http.get("/shop/recommend?user=3") as response:
                assert await response.json() == {"score": 42.0}
        async with running.http.get("/shop/recommend?user=3") as response:
            assert await response.json() == {"score": 1.5}


async def test_admission_and_queues_are_the_service_s() -> None:
    words = {"scorer": {"max_ongoing_requests": 1, "max_queued_requests": 0}}
    async with local(door, x_serve=words) as running:
        scorer = running.handle(Scorer)
        waiting = asyncio.create_task(scorer.wait())
        await asyncio.sleep(0)
        with pytest.raises(Backpressure, match=r"every replica of scorer is full.*max_queued_requests = 0"):
            await scorer.score(1)
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_a_name_that_is_none_says_which_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pierhead.calls.directory.UNKNOWN_GRACE_S", 0.01)
    async with local(door):
        with pytest.raises(NoReplica, match=r'there are door, scorer, shop; did you mean "scorer"\?.*STATIC_SKORER'):
            await handle(EchoStub, "skorer").Echo(echo())
    await Clients.current().close()


async def test_plain_grpc_reaches_every_service_by_one_port() -> None:
    application = LoopRunner(door)  # type: ignore[arg-type]
    offer = await application.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{offer.grpc_port}") as channel:
            name = Scorer.__contract__.service
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
            [names] = [reply async for reply in reflect(iter(requests))]
            assert name in {each.name for each in names.list_services_response.service}
            score: Any = channel.unary_unary(f"/{name}/score")
            assert await score(b"\x08\x03") == b"\t\x00\x00\x00\x00\x00\x00\xf8?", "1.5 as field 1"
    finally:
        await application.stop(at_once=True)


class TestBadGraphs:
    def test_a_circle(self) -> None:
        one: Any = Scorer.bind()
        two: Any = Shop.bind(one)
        one.kwargs = {"shop": two}
        with pytest.raises(NoApplication, match="services use each other in a circle: shop -> scorer -> shop"):
            LoopRunner(two)

    def test_two_services_of_one_name(self) -> None:
        two: Any = Door.bind(Scorer.bind(), Shop.bind(Scorer.bind()))
        with pytest.raises(NoApplication, match="two services are called scorer: bind Scorer once"):
            LoopRunner(two)

    @pytest.mark.parametrize(
        ("x_serve", "words"),
        [
            ({"door": {"route": "/shop"}}, "door and shop have the same route, /shop"),
            ({"door": {"route": "shop"}}, r'door: x-serve\.route: expected a path that starts with "/", found "shop"'),
            ({"scorer": {"route": "/scorer"}}, "scorer has the route /scorer and answers no HTTP"),
            (
                {"scorer": {"max_ongoing_requests": "many"}},
                r'scorer: x-serve.max_ongoing_requests: expected an integer.*found "many"',
            ),
            ({"scorr": {"debug": True}}, "x_serve: scorr is no service of this application; it has door, shop, scorer"),
            ({"scorer": {"debugg": True}}, "x_serve: scorer.debugg: unknown key"),
        ],
    )
    async def test_words_that_no_service_can_have(self, x_serve: dict[str, dict[str, Any]], words: str) -> None:
        with pytest.raises((NoApplication, NoOptions), match=words):
            async with local(door, x_serve=x_serve):
                pass

    async def test_settings_that_are_refused(self) -> None:
        with pytest.raises(
            RuntimeError, match=r"x-serve\.user_config is refused: Scorer\.reconfigure raised KeyError: 'by'"
        ):
            async with local(scorer, x_serve={"scorer": {"user_config": {"of": 1}}}):
                pass

    async def test_a_constructor_that_raises_leaves_nothing_behind(self) -> None:
        class Broken(Service):
            def __init__(self, scorer: Scorer) -> None:
                raise RuntimeError("no weights")

        closed.clear()
        with pytest.raises(RuntimeError, match="no weights"):
            async with local(Broken.bind(scorer)):
                pass
        assert closed == ["scorer"]


async def test_in_flight_requests_end_before_their_callees() -> None:
    application = LoopRunner(door)  # type: ignore[arg-type]
    await application.start()
    found: Any = handle_on(Scorer, HandleChannel("scorer"))
    waiting = asyncio.create_task(found.wait())
    [replica] = application.services["scorer"].replicas.values()
    await until(lambda: replica.server.readiness().ongoing == 1, "it is in flight")
    stopping = asyncio.create_task(application.stop())
    await until(lambda: replica.server.state == "draining", "its callers have ended")
    replica.service.gate.set()  # type: ignore[attr-defined]
    await waiting
    await stopping
    await Clients.current().close()
