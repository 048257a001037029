"""Services written as classes behind real replicas: calls through handles, and what other clients see."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, assert_type

import grpc
import pytest
from aiohttp import ClientSession
from fastapi import FastAPI, WebSocket
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pierhead import (
    BadRequest,
    DeadlineExceeded,
    NoReplica,
    RequestContext,
    Service,
    Settings,
    UserCodeError,
    batch,
    call,
    current_request,
    options,
    override_handle,
)
from pierhead.__main__ import main
from pierhead.calls.absence import stopped
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.calls.replica import Endpoint, ReplicaListing
from pierhead.classes import handles
from pierhead.classes.handles import each_replica, handle_on, handle_to
from pierhead.classes.parts import made
from pierhead.classes.service import name_of
from pierhead.classes.target import NoService, service_at
from pierhead.classes.threads import in_thread
from pierhead.errors import SettingsError
from pierhead.metrics import RuntimeMetrics
from pierhead.tasks import end_tasks
from pydantic import BaseModel, field_validator

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.fake_transport import Make
from tests.unit.runtime.harness import Cluster, EchoService, address, until

SCORER = "tests.unit.runtime.test_classes.Scorer"


class Net(BaseModel):
    """Its validator refuses what it has made."""

    price: int

    @field_validator("price")
    @classmethod
    def in_cents(cls, price: int) -> int:
        if price >= 100:
            raise ValueError("too much")
        return price * 100


class Scorer(Service, replicas=2):
    def __init__(self, model: str = "small") -> None:
        self.model = model
        self.batches: list[list[int]] = []
        self.seen: list[RequestContext | None] = []
        self.gate = threading.Event()
        self.running = 0
        self.closed = False

    @batch(max_batch_size=32)
    async def score(self, users: list[int]) -> list[float]:
        self.batches.append(users)
        return [user / 2 for user in users]

    async def explain(self, user: int, *, upto: int = 3) -> AsyncIterator[str]:
        self.running += 1
        try:
            for number in range(upto):
                yield f"{self.model} {user} {number}"
        finally:
            self.running -= 1

    def rank(self, by: dict[str, float], limit: int = 2) -> list[str]:
        self.seen.append(current_request())
        return sorted(by, key=lambda name: by[name])[:limit]

    def block(self) -> str:
        self.running += 1
        try:
            self.gate.wait()
        finally:
            self.running -= 1
        return threading.current_thread().name

    async def with_tax(self, price: Net) -> Net:
        return price

    async def fail(self, kind: str) -> None:
        if kind == "bad":
            raise BadRequest("kind: expected anything else")
        if kind == "wait":
            await asyncio.Event().wait()
        if kind == "boom":
            raise ValueError("boom")

    async def aclose(self) -> None:
        self.closed = True


app = FastAPI()


class Shop(Service, route="/shop", asgi=app):
    def __init__(self, scorer: Scorer, currency: str) -> None:
        self.scorer = scorer
        self.currency = currency
        self.closed = False

    @app.get("/recommend/{user}")  # type: ignore[untyped-decorator]
    async def recommend(self, user: int, limit: int = 1) -> dict[str, Any]:
        return {"score": await self.scorer.score(user), "limit": limit, "currency": self.currency}

    @app.websocket("/socket")  # type: ignore[untyped-decorator]
    async def socket(self, socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(self.currency)
        await socket.close()

    def close(self) -> None:
        self.closed = True


@app.get("/plain")  # type: ignore[untyped-decorator]
async def plain_route(user: int) -> int:
    return user


Served = tuple[Scorer, Scorer]
"""A handle, and the service behind it."""


@pytest.fixture(params=["in process", "lane", "grpc", "user's thread"])
async def served(request: pytest.FixtureRequest, cluster: Cluster) -> AsyncIterator[Served]:
    service = Scorer("large")
    channel = HandleChannel("scorer", metrics=RuntimeMetrics())
    handle: Any = handle_on(Scorer, channel)
    if request.param == "in process":
        with override_handle("scorer", service):
            yield handle, service
    else:
        apart = request.param == "user's thread"
        server = await cluster.start(service, service="scorer", run_user_code_in_separate_thread=apart)
        transport = "grpc" if request.param == "grpc" else "lane"
        Clients.use(Settings(static={"SCORER": (address(server),)}, transport=transport))
        yield handle, service
    service.gate.set()


class TestCalls:
    async def test_each_kind_of_method(self, served: Served) -> None:
        scorer, service = served
        assert await asyncio.gather(*(scorer.score(user) for user in range(4))) == [0.0, 0.5, 1.0, 1.5]
        assert service.batches[-1] != [0], "some of them were one batch"
        assert [item async for item in scorer.explain(7)] == ["large 7 0", "large 7 1", "large 7 2"]
        assert [item async for item in scorer.explain(7, upto=0)] == []
        assert await call(scorer.rank, {"b": 2.0, "a": 1.0, "c": 3.0}) == ["a", "b"]
        assert await call(scorer.rank, by={}, limit=1) == []
        await scorer.fail("no")

    async def test_errors_are_those_of_any_service(self, served: Served) -> None:
        scorer, _ = served
        with pytest.raises(BadRequest, match=r"^kind: expected anything else"):
            await scorer.fail("bad")
        with pytest.raises(UserCodeError):
            await scorer.fail("boom")
        with pytest.raises(TypeError, match=f"{SCORER}/fail: kind: expected str, found 5"):
            await scorer.fail(5)  # type: ignore[arg-type]
        with pytest.raises(AttributeError, match=f"{SCORER} has no method 'skore' that can be called; it has score, "):
            await scorer.skore(1)  # type: ignore[attr-defined]

    async def test_options_are_of_one_call(self, served: Served) -> None:
        scorer, service = served
        with pytest.raises(DeadlineExceeded):
            await options(scorer, timeout_s=0.05).fail("wait")
        await call(options(scorer, session_id="s1", model_id="m1").rank, {})
        await call(scorer.rank, {})
        found = [(each.session_id, each.model_id) for each in service.seen if each is not None]
        assert found == [("s1", "m1"), (None, None)]
        for wrong in ({"timeout_s": 0.0}, {"session_id": "\n"}, {"model_id": "ü"}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                options(scorer, **wrong)

    async def test_a_stream_that_is_left_ends_at_the_replica(self, served: Served) -> None:
        scorer, service = served
        items: Any = scorer.explain(1, upto=1_000_000)
        assert await anext(items) == "large 1 0"
        await items.aclose()
        await until(lambda: service.running == 0, "the generator has ended")

    async def test_a_stream_hands_over_what_has_arrived(self, served: Served) -> None:
        """As `sse` reads it."""
        scorer, _ = served
        items: Any = scorer.explain(1, upto=100)
        found = [await anext(items)]

        def take(more: list[Any]) -> bool:
            found.extend(more)
            return True

        items.deliver(take)
        async for item in items:
            found += [item, *items.read_ready()]
        assert found == [f"large 1 {number}" for number in range(100)]

    async def test_a_def_method_blocks_its_thread_and_nothing_else(self, served: Served) -> None:
        scorer, service = served
        blocked = asyncio.create_task(call(scorer.block))
        await until(lambda: service.running == 1, "it has begun")
        assert await scorer.score(2) == 1.0
        service.gate.set()
        assert await blocked != threading.current_thread().name


async def test_a_model_is_validated_again_only_where_anybody_may_have_sent_it(
    served: Served, request: pytest.FixtureRequest
) -> None:
    handle, _ = served
    net = Net(price=2)
    if "grpc" in request.node.name:
        with pytest.raises(BadRequest, match=r"(?s)with_tax: price: .*too much"):
            await handle.with_tax(net)
    else:
        assert await handle.with_tax(net) == net


async def test_a_cancelled_def_method_is_in_flight_until_it_ends(cluster: Cluster) -> None:
    service = Scorer()
    server = await cluster.start(service, service="scorer")
    Clients.use(Settings(static={"SCORER": (address(server),)}))
    scorer: Any = handle_on(Scorer, HandleChannel("scorer"))
    with pytest.raises(DeadlineExceeded):
        await options(scorer, timeout_s=0.1).block()
    for _ in range(10):  # the replica's own deadline, and that its caller has ended the call
        await asyncio.sleep(0.01)
        assert (server.readiness().ongoing, service.running) == (1, 1)
    service.gate.set()
    await until(lambda: server.readiness().ongoing == 0, "it has ended")


async def test_the_cancellation_of_what_runs_in_a_thread_waits_for_its_end() -> None:
    begun, gate = threading.Event(), threading.Event()

    def blocks() -> None:
        begun.set()
        gate.wait(PATIENCE_S)

    call = asyncio.create_task(in_thread(blocks))
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    call.cancel()
    for _ in range(10):  # turns of the loop: without the wait, the first ones would end it
        await asyncio.sleep(0)
    ended_before = call.done()
    gate.set()
    await asyncio.wait([call], timeout=PATIENCE_S)
    assert (ended_before, call.cancelled()) == (False, True)


async def test_a_service_itself_takes_the_same_calls() -> None:
    """A unit test constructs it with other services in the place of handles."""
    scorer = Scorer()
    scorer.gate.set()
    assert await options(scorer, timeout_s=1).score(3) == 1.5
    assert await call(scorer.block) != threading.current_thread().name
    assert await Shop(scorer, "EUR").recommend(4) == {"score": 2.0, "limit": 1, "currency": "EUR"}


async def typed(scorer: Scorer) -> None:
    """For mypy alone: it finds what each comment ignores, and nothing else."""
    assert_type(await scorer.score(3), float)
    assert_type(scorer.explain(4), AsyncIterator[str])
    assert_type(await options(scorer, timeout_s=0.2).score(1), float)
    assert_type(await call(scorer.rank, {}, limit=2), list[str])
    assert_type(Scorer.bind(model="large"), Scorer)
    await scorer.score("3")  # type: ignore[arg-type]
    await call(scorer.rank, {}, limit="2")  # type: ignore[arg-type]
    Scorer.bind(model=3)  # type: ignore[arg-type]
    Shop.bind(Scorer("large"), 5)  # type: ignore[arg-type]

    class Typo(Service, replics=2):  # type: ignore[call-arg]
        pass

    class Wrong(Service, replicas="2"):  # type: ignore[arg-type]
        pass


async def test_a_stop_signal_ends_a_program_that_still_makes_its_service(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nfrom pierhead import Service\n"
        "class Slow(Service):\n    def __init__(self) -> None:\n        print('begins', flush=True)\n"
        "        time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "pierhead", "serve", "slow:Slow"]
    process = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begins\n"
    process.terminate()
    async with asyncio.timeout(PATIENCE_S):
        assert await process.wait() == 0
    process._transport.close()  # type: ignore[attr-defined]


class Fake(Service):
    async def work(self) -> None:
        pass


class TestEachReplica:
    bound: Any = Fake.bind()

    async def test_it_waits_for_the_connection_to_each_that_does_not_drain(self, service: Make) -> None:
        fake = service(0, transport="fake")
        names = ["r0", "r1", "r2", "r3"]
        listed = [Endpoint(name, f"{name}:1", draining=name == "r2") for name in names]
        fake.channel().pool().update(ReplicaListing(listed))
        for name in ("r1", "r3"):
            fake[name].become(False)

        async def at(coming: Any) -> None:
            await (await coming()).work()

        tasks = [asyncio.create_task(at(each)) for each in await each_replica(self.bound)]
        await until(lambda: fake["r0"].now, "the first is called")
        assert not fake["r1"].calls
        fake["r1"].become(True)
        await until(lambda: fake["r1"].now, "the second is called once it is there")
        fake.channel().pool().update(ReplicaListing(listed[:3]))
        with pytest.raises(NoReplica, match=r"^r3 of fake has gone, or drains"):
            await asyncio.wait_for(tasks[2], PATIENCE_S)
        assert [len(fake[name].calls) for name in names] == [1, 1, 0, 0]
        await end_tasks(*tasks)

    async def test_it_waits_for_one_no_longer_than_a_connection_may_take(
        self, service: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handles, "CONNECT_S", 0.01)
        fake = service(2, transport="fake", request_timeout_s=10 * PATIENCE_S)
        await until(lambda: len(fake.channel().pool().replicas()) == 2, "both are listed")
        fake["r1"].become(False)
        async with asyncio.timeout(PATIENCE_S):
            first, second = await each_replica(self.bound)
            await first()
            with pytest.raises(NoReplica, match=r"^r1:1 of fake cannot be called within 0.01 s"):
                await second()

    async def test_it_waits_a_little_less_than_the_request_may_take(self, service: Make) -> None:
        fake = service(2, transport="fake", request_timeout_s=0.1)
        pool = fake.channel().pool()
        await until(lambda: len(pool.replicas()) == 2, "both are listed")
        fake["r1"].become(False)
        async with asyncio.timeout(PATIENCE_S):
            first, second = await each_replica(self.bound)
            await first()
            with pytest.raises(NoReplica, match=r"^r1:1 of fake cannot be called within 0.0\d+ s.*r1:1 is not connect"):
                await second()
            pool.update(ReplicaListing())
            with pytest.raises(NoReplica, match=r"^no replica of fake can be called within 0.0\d+ s: no replica is"):
                await each_replica(self.bound)
            pool.update(ReplicaListing(absence=stopped))
            with pytest.raises(NoReplica, match="it has ended, or did not start"):
                await each_replica(self.bound)


class TestOutside:
    async def test_any_grpc_client_finds_and_calls_it(self, cluster: Cluster) -> None:
        """With reflection alone and nothing of ours, next to a generated servicer in the same process."""
        server = await cluster.start(Scorer(), EchoService())
        async with grpc.aio.insecure_channel(address(server)) as channel:
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=SCORER),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="pierhead.echo.v1.Echo"),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="nobody.Knows"),
            ]
            names, scorer, echo, unknown = [reply async for reply in reflect(iter(requests))]
            assert {SCORER, "pierhead.echo.v1.Echo"} < {each.name for each in names.list_services_response.service}
            assert len(echo.file_descriptor_response.file_descriptor_proto) == 1
            assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
            pool = descriptor_pool.DescriptorPool()
            for file in reversed(scorer.file_descriptor_response.file_descriptor_proto):
                pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
            method = pool.FindServiceByName(SCORER).methods_by_name["rank"]
            request = message_factory.GetMessageClass(method.input_type)
            reply = message_factory.GetMessageClass(method.output_type)
            rank: Any = channel.unary_unary(f"/{SCORER}/rank", request.SerializeToString, reply.FromString)
            assert list((await rank(request(by={"b": 1.0, "a": 2.0}))).value) == ["b", "a"]
            fail: Any = channel.unary_unary(f"/{SCORER}/fail")
            with pytest.raises(grpc.aio.AioRpcError, match=f"{SCORER}/fail: kind: missing; expected str"):
                await fail(b"")
        assert (f"{SCORER}/rank", "OK") in server.metrics.requests.values

    async def test_routes_of_fastapi_are_methods(self, cluster: Cluster, client: ClientSession) -> None:
        shop = Shop(Scorer(), "EUR")
        server = await cluster.start(shop)
        url = f"http://127.0.0.1:{server.http_port}"
        async with client.get(f"{url}/recommend/6?limit=2") as response:
            assert await response.json() == {"score": 3.0, "limit": 2, "currency": "EUR"}
        async with client.get(f"{url}/plain?user=5") as response:
            assert await response.json() == 5
        async with client.ws_connect(f"{url}/socket") as socket:
            assert await socket.receive_str() == "EUR"
        async with client.get(f"{url}/openapi.json") as response:
            parameters = (await response.json())["paths"]["/recommend/{user}"]["get"]["parameters"]
        assert [each["name"] for each in parameters] == ["user", "limit"]
        assert ("GET /recommend/{user}", "200") in server.metrics.requests.values
        assert server.grpc_port is None, "routes are no RPCs"
        await cluster.drained(server)
        assert shop.closed


class TestApplications:
    def test_a_name_is_the_class_s_in_lower_case(self) -> None:
        names = {name_of(type(each, (), {})) for each in ("Shop", "ImageScorer", "HTTPServer", "GPT4All", "A_b")}
        assert names == {"shop", "image-scorer", "http-server", "gpt4-all", "a-b"}

    def test_a_replica_makes_its_own_service_with_handles_to_others(self) -> None:
        shop: Any = Shop.bind(Scorer.bind(model="large"), currency="EUR")
        [root], [scorer], [named] = made([shop], ""), made([shop], "scorer"), made([shop], "shop")
        assert isinstance(scorer, Scorer)
        assert scorer.model == "large"
        assert isinstance(root, Shop)
        assert isinstance(named, Shop)
        assert type(root.scorer).__name__ == "ClassHandle"
        with pytest.raises(SettingsError, match=r'PIERHEAD_SERVICE: expected one of shop, scorer.*found "skorer"'):
            made([shop], "skorer")

    def test_what_cannot_be_bound(self) -> None:
        with pytest.raises(TypeError, match=r"Scorer.bind\(\): got an unexpected keyword argument 'modle'"):
            Scorer.bind(modle="large")  # type: ignore[call-arg]
        two: Any = Shop.bind(Scorer.bind(), currency="")
        two.kwargs = {"other": Scorer.bind()}
        with pytest.raises(ValueError, match="two services are called scorer: bind Scorer once and pass that on"):
            two.graph()
        with pytest.raises(AttributeError, match=r"Scorer.bind\(\) describes a service and has no 'score'"):
            Scorer.bind().score  # noqa: B018

    async def test_a_handle_in_a_constructor_reaches_the_service(self, cluster: Cluster) -> None:
        service = Scorer("large")
        server = await cluster.start(service, service="scorer")
        Clients.use(Settings(static={"SCORER": (address(server),)}))
        bound: Any = Scorer.bind()
        handle: Any = handle_to(bound)
        assert await handle.score(4) == 2.0
        await cluster.drained(server)
        assert service.closed

    async def test_the_program_serves_a_class_and_prints_its_contract(
        self, cluster: Cluster, tmp_path: Path, free_port: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "shop.py").write_text(
            "from pierhead import Service\n"
            "class Scorer(Service):\n"
            "    def __init__(self, half: float) -> None:\n        self.half = half\n"
            "    async def score(self, user: int) -> float:\n        return user * self.half\n"
            "scorer = Scorer.bind(0.5)\n"
        )
        source = "from pierhead.__main__ import main; main(['serve', 'shop:scorer'])"
        await cluster.process(source, free_port, PIERHEAD_SERVICE="scorer", PYTHONPATH=str(tmp_path))
        Clients.use(Settings(static={"SCORER": (f"127.0.0.1:{free_port}",)}))
        command = [sys.executable, "-m", "pierhead", "proto", "shop:Scorer"]
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith('syntax = "proto3";\n\npackage shop;\n')
        channel = HandleChannel("scorer")
        call_score: Any = channel.unary_unary("/shop.Scorer/score")
        assert await call_score(b"\x08\x03") == b"\t\x00\x00\x00\x00\x00\x00\xf8?", "1.5 as field 1"
        program = (
            "import sys; from pierhead.__main__ import main\n"
            "try: main(['serve', 'shop:nothing'])\n"
            "finally: print(*(name for name in sys.modules if name.split('.')[1:2] in (['dev'], ['rayserve'])))"
        )
        apart = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (apart.returncode, apart.stdout) == (2, "\n"), "a replica does without the other commands' memory"
        for target in ("shop", "pierhead:batch", "pierhead:nothing"):
            with pytest.raises(SystemExit):
                main(["proto", target])
            assert "expected module:name of a Service" in capsys.readouterr().err


FRAMEWORKS = """
import asyncio
from aiohttp import web
from fastapi import FastAPI
from pierhead import asgi
from pierhead.echo.v1.echo_pb2_grpc import EchoServicer

async def plain(scope, receive, send): ...

app, marked, aiohttp_app, servicer = FastAPI(), asgi(lambda *_: None), web.Application(), EchoServicer()
text = "a text"
"""
PROGRAM = "; call serve(app) (`from pierhead import serve`) in a program of its own"
AS_CLASS = ', or write it as a service: class Web(Service, route="/", asgi=app)'


@pytest.mark.parametrize(
    ("name", "todo"),
    [
        ("app", PROGRAM + AS_CLASS),
        ("marked", PROGRAM + AS_CLASS),
        ("plain", PROGRAM + AS_CLASS),
        ("aiohttp_app", PROGRAM),
        ("servicer", PROGRAM),
        ("text", "found 'a text'"),
    ],
)
def test_what_a_program_of_its_own_serves_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, todo: str
) -> None:
    (tmp_path / "frameworks_shown.py").write_text(FRAMEWORKS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NoService) as told:
        service_at(f"frameworks_shown:{name}")
    assert str(told.value).startswith(
        f"frameworks_shown:{name}: expected module:name of a Service, or of what its bind()"
    )
    assert str(told.value).endswith(todo)
