"""The LLM server as callers see it: over lanes, from its start to its drained end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import grpc
import pytest
from pierhead import BadRequest, Unavailable, UserCodeError, handle
from pierhead.errors import Draining
from pierhead.llm.mock.engine import MockEngine
from pierhead.llm.objects import OpenAIRequest, RawAnswer
from pierhead.llm.server import llm_server, service
from pierhead.llm.server.engine import LLMEngine
from pierhead.llm.server.errors import EngineDiedError, LLMStartError, SourceNotFoundError
from pierhead.llm.server.llm_server import LLMServer
from pierhead.llm.server.service import LLMService
from pierhead.llm.v1.llm_pb2 import DescribeRequest, LLMReply, LLMRequest, Operation
from pierhead.llm.v1.llm_pb2_grpc import LLMServerStub
from pierhead.llm_config import LLMConfig, Lora, ModelLoading
from pierhead.metrics import RuntimeMetrics
from pierhead.replica.server import ReplicaServer
from pierhead.replica.sleep import SleepState

from tests.harness.six_methods import SixMethods
from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, know, readyz, until


def config(lora: Lora | None = None, stall_timeout_s: float = 60.0, **engine_kwargs: Any) -> LLMConfig:
    return LLMConfig(
        engine="mock",
        model_loading=ModelLoading(model_id="mock"),
        engine_kwargs={"tokens_per_s": 500.0, **engine_kwargs},
        lora=lora,
        stall_timeout_s=stall_timeout_s,
    )


class Served:
    """One replica, its caller, and what only a test can see: the engine."""

    def __init__(self, server: LLMService, replica: ReplicaServer, engines: list[MockEngine]) -> None:
        self.server = server
        self.replica = replica
        self.engine = engines[0]
        know(replica)
        self.stub = handle(LLMServerStub, "echo-child")

    async def chat(self, model: str = "mock", /, **body: Any) -> list[LLMReply]:
        return [reply async for reply in self.stub.Chat(chat(model, **body), timeout=20)]


def chat(model: str = "mock", /, **body: Any) -> LLMRequest:
    members = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 4} | body
    return LLMRequest(body=json.dumps(members).encode(), path="/v1/chat/completions", model=model)


async def start(cluster: Cluster, what: LLMConfig, **settings: Any) -> Served:
    engines: list[MockEngine] = []

    def make(config: LLMConfig) -> LLMEngine:
        engines.append(MockEngine(config))
        return engines[0]

    metrics = RuntimeMetrics()
    server = LLMService(
        what,
        make_server=partial(LLMServer, engine_cls=make, metrics=metrics, report=lambda *_: None),
        metrics=metrics,
        admin_token=settings.get("admin_token", ""),
    )
    replica = await cluster.start(server, metrics=metrics, **settings)
    return Served(server, replica, engines)


@pytest.fixture
async def served(cluster: Cluster) -> Served:
    return await start(cluster, config())


# ----------------------------------------------------------------------------------------------------------- requests


async def test_the_start_reports_its_progress_and_ends_with_a_token(cluster: Cluster) -> None:
    told: list[tuple[str, float | None, float]] = []
    make = partial(LLMServer, report=lambda *report: told.append(report))
    await cluster.start(LLMService(config(), make_server=make, metrics=RuntimeMetrics()))
    stages = list(dict.fromkeys(doing for doing, _, _ in told))
    assert stages == [
        "importing the engine mock",
        "starting the engine mock",
        "loading the mock model's weights",
        "generating a first token",
    ]
    assert ("loading the mock model's weights", 0, 1) in told


@pytest.mark.parametrize("slow", [False, True])
async def test_a_stream_is_whole_however_fast_its_caller_reads(cluster: Cluster, slow: bool) -> None:
    served = await start(cluster, config(tokens_per_s=20_000.0))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 4000}
    (whole,) = await served.chat(**body)
    replies = aiter(served.stub.Chat(chat(stream=True, **body), timeout=30))
    got = [await anext(replies)]
    if slow:  # its window holds a quarter of it
        await until(lambda: served.engine.load().running == 0, "all of it was made")
    got += [reply async for reply in replies]
    events = b"".join(reply.data for reply in got).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    said = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for event in events[:-2]]
    assert "".join(said) == json.loads(whole.data)["choices"][0]["message"]["content"]
    assert sum(reply.tokens for reply in got) == 4000


@pytest.mark.parametrize(
    ("model", "body", "status", "code"),
    [
        ("another", {}, 404, "model_not_found"),
        ("mock:french", {}, 404, "model_not_found"),
        ("", {"model": "other"}, 404, "model_not_found"),
        ("", {"model": 7}, 400, "invalid_type"),
        ("mock", {"messages": 7}, 400, "invalid_type"),
    ],
)
async def test_a_request_that_is_refused_leaves_the_engine_alone(
    served: Served, model: str, body: dict[str, Any], status: int, code: str
) -> None:
    (reply,) = await served.chat(model, **body)
    assert (reply.status, json.loads(reply.data)["error"]["code"]) == (status, code)
    assert served.engine.load().tokens == 1, "the one of its start"


async def test_every_method_reaches_its_part_of_the_engine(served: Served) -> None:
    def ask(**body: Any) -> LLMRequest:
        return LLMRequest(body=json.dumps(body).encode(), model="mock", path="/x")

    async def body_of(call: Any) -> Any:
        (reply,) = [each async for each in call]
        return json.loads(reply.data)

    stub = served.stub
    named = LLMRequest(body=json.dumps({"model": "mock", "prompt": "Hi", "max_tokens": 2}).encode())
    assert (await body_of(stub.Completions(named, timeout=PATIENCE_S)))["object"] == "text_completion"
    assert (await body_of(stub.Embeddings(ask(input="Hi"), timeout=PATIENCE_S)))["data"][0]["object"] == "embedding"
    assert (await body_of(stub.Score(ask(text_1="a", text_2="b"), timeout=PATIENCE_S)))["data"][0]["object"] == "score"
    tokens = (await body_of(stub.Tokenize(ask(prompt="Hi there"), timeout=PATIENCE_S)))["tokens"]
    assert (await body_of(stub.Detokenize(ask(tokens=tokens), timeout=PATIENCE_S)))["prompt"] == "Hi there"
    refused = await body_of(stub.PassThrough(ask(), timeout=PATIENCE_S))
    assert refused["error"]["message"].endswith("does not serve /x")
    card = await stub.Describe(DescribeRequest(), timeout=PATIENCE_S)
    assert served.replica.readiness().used == 6, "all but the description"
    assert (card.model_id, card.engine, card.max_model_len) == ("mock", "mock", 32_768)
    assert abs(card.created - time.time()) < 60


@pytest.mark.parametrize("method", ["Completions", "PassThrough"])
async def test_an_answer_that_is_closed_is_aborted_by_then(served: Served, method: str) -> None:
    """The runtime closes it when the caller has left; the abort must not wait for the garbage collection."""
    aborted: list[str] = []

    async def endless(request: OpenAIRequest) -> AsyncIterator[RawAnswer]:
        try:
            while True:
                yield RawAnswer(b"{}")
        finally:
            aborted.append(request.path)

    served.engine.completions = served.engine.pass_through = endless  # type: ignore
    answer = getattr(served.server, method)(LLMRequest(body=b"{}", path="/v1/x", model="mock"), None)
    await anext(answer)
    await answer.aclose()
    assert aborted == ["/v1/x"]


async def test_an_answer_that_no_message_can_hold_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LARGEST_REPLY", 1000)
    body = json.dumps({"model": "mock", "input": ["Hi"] * 100}).encode()
    (reply,) = [each async for each in served.stub.Embeddings(LLMRequest(body=body, model="mock"), timeout=PATIENCE_S)]
    assert reply.status == 400
    error = json.loads(reply.data)["error"]
    assert error["code"] == "answer_too_large"
    assert "at most 1000 can be sent at once; ask for fewer inputs" in error["message"]
    assert (await served.chat(max_tokens=1))[0].status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../sleep", "/v1/%2e%2e/sleep", "/v1/load_lora_adapter", "/v1/unload%5Flora_adapter/", "@elsewhere/v1/x",
        "", "/v1/./x",
    ],
)  # fmt: skip
async def test_paths_that_are_not_for_clients_do_not_reach_the_engine(served: Served, path: str) -> None:
    asked: list[str] = []
    served.engine.pass_through = lambda request: asked.append(request.path)  # type: ignore
    request = LLMRequest(body=b'{"lora_name": "x", "lora_path": "/etc"}', path=path, model="mock")
    (reply,) = [each async for each in served.stub.PassThrough(request, timeout=PATIENCE_S)]
    assert reply.status == 404
    assert asked == []


# --------------------------------------------------------------------------------------------------------- operations


async def test_an_engine_that_sleeps_is_left_alone_until_it_is_woken_up(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "french").mkdir()
    served = await start(cluster, config(lora(tmp_path)))
    did: list[str] = []
    for name in ("sleep", "wake", "reset_prefix_cache", "load_adapter", "unload_adapter"):
        setattr(served.engine, name, _noted(did, name, getattr(served.engine, name)))

    async def operate(**what: Any) -> None:
        await served.stub.Operate(Operation(**what), timeout=PATIENCE_S)

    await operate(wake=Operation.Wake())
    assert did == [], "it does not sleep"
    await operate(sleep=Operation.Sleep())
    await operate(sleep=Operation.Sleep(level=1))
    assert did == ["sleep"]
    with pytest.raises(Unavailable, match="the engine sleeps"):
        await served.chat()
    await served.server.check_health()
    for what in (
        {"sleep": Operation.Sleep(level=2)},
        {"reset_prefix_cache": Operation.ResetPrefixCache()},
        {"load_adapter": Operation.LoadAdapter(adapter="french")},
        {"unload_adapter": Operation.UnloadAdapter(adapter="french")},
    ):
        with pytest.raises(BadRequest, match=r"the engine sleeps \(level 1\); wake it up first"):
            await operate(**what)
    with pytest.raises(ValueError, match="the engine sleeps; they are loaded once it is woken up"):
        await served.server.reconfigure({"adapters": ["french"]})
    assert did == ["sleep"]
    await operate(wake=Operation.Wake())
    await operate(wake=Operation.Wake())
    assert did == ["sleep", "wake"]
    assert (await served.chat())[0].status == 200
    await operate(reset_prefix_cache=Operation.ResetPrefixCache())
    assert did == ["sleep", "wake", "reset_prefix_cache"]


def _noted(did: list[str], name: str, method: Any) -> Any:
    async def noted(*args: Any) -> Any:
        did.append(name)
        return await method(*args)

    return noted


async def test_sleep_and_wake_take_turns(served: Served) -> None:
    half_asleep, go_on, did = asyncio.Event(), asyncio.Event(), []

    async def slow(level: int) -> None:
        half_asleep.set()
        await go_on.wait()
        did.append("sleep")

    async def wake() -> None:
        did.append("wake")

    served.engine.sleep, served.engine.wake = slow, wake  # type: ignore[method-assign]
    sleeping = asyncio.ensure_future(served.stub.Operate(Operation(sleep=Operation.Sleep()), timeout=PATIENCE_S))
    await half_asleep.wait()
    waking = asyncio.ensure_future(served.stub.Operate(Operation(wake=Operation.Wake()), timeout=PATIENCE_S))
    await asyncio.wait([waking], timeout=0.05)
    assert did == []
    go_on.set()
    await asyncio.gather(sleeping, waking)
    assert did == ["sleep", "wake"]
    assert (await served.chat())[0].status == 200


AWAKE, ASLEEP = SleepState(True, False, False), SleepState(True, True, True)


async def put_to_sleep(served: Served, wanted: bool) -> None:
    url = f"http://127.0.0.1:{served.replica.admin_port}/sleep"
    async with aiohttp.ClientSession() as client, client.put(url, json={"sleep": wanted}) as answer:
        assert answer.status == 200


async def test_the_controller_puts_it_to_sleep_and_wakes_it_up(cluster: Cluster) -> None:
    served = await start(cluster, config(), health_period_s=0.01)
    assert served.replica.readiness().sleep == AWAKE
    await put_to_sleep(served, wanted=True)
    await until(lambda: served.replica.readiness().sleep == ASLEEP, "it sleeps")
    refusal = served.replica.edge.admission.enter()
    assert isinstance(refusal, Draining), "callers choose another replica"
    assert (await readyz(served.replica))[0] == 200
    await put_to_sleep(served, wanted=False)
    await until(lambda: served.replica.readiness().sleep == AWAKE, "it is awake")
    assert (await served.chat())[0].status == 200


@pytest.mark.parametrize(
    ("level", "error"),
    [
        (1, ""),
        (
            2,
            "LLMService.sleep raised BadRequest: sleep: the engine sleeps (level 2); wake it up first (Operation.Wake)",
        ),
    ],
)
async def test_an_operators_sleep_is_not_the_controllers(served: Served, level: int, error: str) -> None:
    await served.stub.Operate(Operation(sleep=Operation.Sleep(level=level)), timeout=PATIENCE_S)
    assert served.replica.readiness().sleep == AWAKE
    await put_to_sleep(served, wanted=True)
    report = SleepState(True, True, not error, error)
    await until(lambda: served.replica.readiness().sleep == report, "it takes it over, or says why not")


async def test_an_engine_that_cannot_sleep_says_so(cluster: Cluster) -> None:
    make = partial(LLMServer, engine_cls=SixMethods, metrics=RuntimeMetrics(), report=lambda *_: None)
    server = LLMService(config(), make_server=make, metrics=RuntimeMetrics())
    assert server.can_sleep is False, "it has not started"
    replica = await cluster.start(server)
    assert replica.readiness().sleep == SleepState(can=False, wanted=False, asleep=False)


async def test_operations_that_cannot_be(served: Served) -> None:
    with pytest.raises(BadRequest, match=r"Operation\.sleep\.level: expected 1 or 2, found 7"):
        await served.stub.Operate(Operation(sleep=Operation.Sleep(level=7)), timeout=PATIENCE_S)
    with pytest.raises(BadRequest, match="expected one of its members, found none"):
        await served.stub.Operate(Operation(), timeout=PATIENCE_S)
    with pytest.raises(BadRequest, match="this service has no adapters"):
        await served.stub.Operate(Operation(load_adapter=Operation.LoadAdapter(adapter="a")), timeout=PATIENCE_S)


@pytest.mark.parametrize("way", ["lane", "grpc"])
async def test_only_who_knows_the_token_may_operate(cluster: Cluster, way: str) -> None:
    served = await start(cluster, config(), admin_token="t0ken")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.replica.grpc_port}") as channel:
        stub = served.stub if way == "lane" else LLMServerStub(channel)
        for shown in ("", "Bearer another", "Bearer", "t0ken", "Basic t0ken", "bearer"):
            for what in ({"sleep": Operation.Sleep()}, {"load_adapter": Operation.LoadAdapter(adapter="a")}):
                metadata = (("authorization", shown),) if shown else ()
                with pytest.raises(grpc.RpcError) as refused:
                    await stub.Operate(Operation(**what), timeout=PATIENCE_S, metadata=metadata)
                assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
                assert "Operate is for the controller alone, by a token" in (refused.value.details() or "")
        assert (await served.chat())[0].status == 200
        shows = (("authorization", "Bearer t0ken"),)
        await stub.Operate(Operation(sleep=Operation.Sleep()), timeout=PATIENCE_S, metadata=shows)
    with pytest.raises(Unavailable, match="the engine sleeps"):
        await served.chat()


# ----------------------------------------------------------------------------------------------------------- adapters


@pytest.fixture
def loras(tmp_path: Path) -> Path:
    for name in ("french", "german", "latin"):
        (tmp_path / name).mkdir()
    return tmp_path


def lora(path: Path, most: int = 2, *adapters: str) -> Lora:
    return Lora(dynamic_lora_loading_path=str(path), max_num_adapters_per_replica=most, adapters=[*adapters])


async def test_an_adapter_is_loaded_when_it_is_asked_for(cluster: Cluster, loras: Path) -> None:
    served = await start(cluster, config(lora(loras)))
    reply = (await served.chat("mock:french"))[0]
    assert json.loads(reply.data)["model"] == "mock:french"
    card = await served.stub.Describe(DescribeRequest(), timeout=PATIENCE_S)
    assert list(card.adapters) == ["french", "german", "latin"]
    (reply,) = await served.chat("mock:klingon")
    assert reply.status == 404
    error = json.loads(reply.data)["error"]
    assert error["code"] == "model_not_found"
    assert error["message"] == f'the adapter "klingon" does not exist: nothing was found at {loras}/klingon'


async def test_user_config_reconciles_the_adapters(cluster: Cluster, loras: Path) -> None:
    served = await start(cluster, config(lora(loras, 2, "latin")), user_config='{"adapters": ["french"]}')
    assert list(served.engine.describe().adapters) == ["french", "latin"]
    await served.server.reconfigure({"adapters": ["german"]})
    assert list(served.engine.describe().adapters) == ["german", "latin"]
    with pytest.raises(ValueError, match="3 adapters are to be kept"):
        await served.server.reconfigure({"adapters": ["german", "french"]})
    with pytest.raises(ValueError, match="expected adapters and nothing else, found adapter"):
        await served.server.reconfigure({"adapter": []})
    assert list(served.engine.describe().adapters) == ["german", "latin"]


async def test_adapters_are_operated(cluster: Cluster, loras: Path) -> None:
    served = await start(cluster, config(lora(loras)))
    await served.stub.Operate(Operation(load_adapter=Operation.LoadAdapter(adapter="german")), timeout=PATIENCE_S)
    assert list(served.engine.describe().adapters) == ["german"]
    call = served.stub.Chat(chat("mock:german", stream=True, max_tokens=30_000), timeout=20)
    async for _ in call:
        break
    unload = Operation(unload_adapter=Operation.UnloadAdapter(adapter="german"))
    with pytest.raises(BadRequest, match='the adapter "german" is in use'):
        await served.stub.Operate(unload, timeout=PATIENCE_S)
    call.cancel()
    await until(lambda: served.engine.load().running == 0, "no request uses it")
    await served.stub.Operate(unload, timeout=PATIENCE_S)
    assert list(served.engine.describe().adapters) == []


# ---------------------------------------------------------------------------------------------------- start and health


async def failing_start(cluster: Cluster, what: LLMConfig, **more: Any) -> BaseException:
    make = partial(LLMServer, report=lambda *_: None, **more)
    server = LLMService(what, make_server=make, metrics=RuntimeMetrics())
    with pytest.raises(Exception) as caught:  # noqa: PT011 - what it is, is for the test to say
        await cluster.start(server)
    return caught.value


async def test_a_failed_start_says_why(cluster: Cluster, tmp_path: Path) -> None:
    error = await failing_start(cluster, config(fail_start="out of memory on GPU 0; lower gpu_memory_utilization"))
    assert isinstance(error, LLMStartError)
    assert str(error) == "out of memory on GPU 0; lower gpu_memory_utilization"
    error = await failing_start(cluster, config(tokens_per_second=3))
    assert "tokens_per_second: Extra inputs are not permitted" in str(error)
    error = await failing_start(cluster, config(lora(tmp_path, 1, "none")))
    assert "an adapter that every replica is to have is not there" in str(error)
    odd = LLMConfig(engine="json:loads", model_loading=ModelLoading(model_id="m"))
    assert "json:loads is not a subclass of" in str(await failing_start(cluster, odd))


class Reader(MockEngine):
    """An engine that needs its model's files, and cannot read them."""

    needs_files = True
    shut = 0

    async def start(self) -> None:
        raise KeyError(self.model_path)

    async def shutdown(self) -> None:
        type(self).shut += 1
        await super().shutdown()


async def test_an_engine_that_fails_in_its_own_words_is_named(cluster: Cluster) -> None:
    Reader.shut = 0
    error = await failing_start(cluster, config(), engine_cls=Reader, fetch=lambda source, *_: Path("/cache") / source)
    assert isinstance(error, LLMStartError)
    assert "the engine mock could not be started with the model mock: KeyError: '/cache/mock'" in str(error)
    assert Reader.shut == 1, "what was begun is ended"

    def nothing(*_: object) -> Path:
        raise SourceNotFoundError("nothing is stored there")

    error = await failing_start(cluster, config(), engine_cls=Reader, fetch=nothing)
    assert str(error) == "model_source: nothing is stored there"


async def test_a_stall_makes_the_replica_broken_before_its_next_check(cluster: Cluster) -> None:
    served = await start(cluster, config(stall_timeout_s=0.2, stall_after_tokens=50), health_period_s=3600.0)
    call = asyncio.ensure_future(served.chat(stream=True, max_tokens=1000))
    await until(lambda: served.replica.readiness().broken, "it is not ready, and says that it will not be")
    assert "the engine has made no token for" in served.replica.readiness().detail
    call.cancel()
    await asyncio.wait([call])


async def test_an_engine_that_dies_under_a_request_is_checked_at_once(cluster: Cluster) -> None:
    served = await start(cluster, config(fail_after_tokens=3), health_period_s=3600.0)

    async def dead() -> None:
        raise EngineDiedError("its process has ended")

    served.engine.check_health = dead  # type: ignore[method-assign]
    with pytest.raises(UserCodeError, match="fail_after_tokens = 3"):
        await served.chat(stream=True, max_tokens=100)
    await until(lambda: served.replica.readiness().broken, "it is not ready, and says that it will not be")
    assert served.replica.readiness().detail == "its process has ended"


async def test_an_engine_that_is_ill_is_noticed_awake_and_asleep(cluster: Cluster) -> None:
    served = await start(cluster, config(ill="a GPU fell off the bus"))
    with pytest.raises(RuntimeError, match="a GPU fell off the bus"):
        await served.server.check_health()
    await served.stub.Operate(Operation(sleep=Operation.Sleep()), timeout=PATIENCE_S)
    with pytest.raises(RuntimeError, match="a GPU fell off the bus"):
        await served.server.check_health()


async def test_without_requests_it_proves_now_and_then_that_it_can_generate(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.server.check_health()
    assert served.engine.load().tokens == 1, "the first one, not one for each check"
    monkeypatch.setattr(llm_server, "IDLE_TOKEN_S", 0.0)
    await served.server.check_health()
    assert served.engine.load().tokens == 2


async def test_a_sleep_is_no_stall(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await start(cluster, config(stall_timeout_s=60.0))
    call = asyncio.ensure_future(served.chat(stream=True, max_tokens=30_000))
    await until(lambda: served.engine.load().running == 1, "it runs")
    await served.server.check_health()
    await served.stub.Operate(Operation(sleep=Operation.Sleep()), timeout=PATIENCE_S)
    await served.server.check_health()
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600.0)
    monkeypatch.setattr(llm_server, "time", later)  # it sleeps for longer than the stall timeout
    await served.server.check_health()
    await served.stub.Operate(Operation(wake=Operation.Wake()), timeout=PATIENCE_S)
    await served.server.check_health()
    call.cancel()
    await asyncio.wait([call])


# ------------------------------------------------------------------------------------------------------------ metrics


async def test_the_replica_shows_the_engines_numbers(served: Served, client: aiohttp.ClientSession) -> None:
    call = served.stub.Chat(chat(stream=True, max_tokens=30_000), timeout=20)
    async for _ in call:
        break
    async with client.get(f"http://127.0.0.1:{served.replica.admin_port}/metrics") as response:
        text = await response.text()
    assert 'pierhead_llm_engine_running{replica="",service="echo-child"} 1.0' in text
    assert 'pierhead_llm_engine_waiting{replica="",service="echo-child"} 0.0' in text
    assert "pierhead_llm_engine_kv_use{" in text
    assert 'mock:num_requests_running{model_name="mock"} 1.0' in text
    call.cancel()
    await until(lambda: served.engine.load().running == 0, "it is aborted")
