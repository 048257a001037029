"""The LLM server's smaller parts: bodies, watchdog, adapters, settings, and its process from outside."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import grpc
import pytest
from pierhead.errors import Backpressure, SettingsError
from pierhead.llm.mock.engine import MockEngine
from pierhead.llm.objects import ChatCompletionRequest
from pierhead.llm.server.background import to_its_end
from pierhead.llm.server.engine import EngineStats
from pierhead.llm.server.errors import EngineStalledError, LLMRequestError, LLMStartError, SourceNotFoundError
from pierhead.llm.server.models.adapters import Adapters
from pierhead.llm.server.registry import ENGINES, engine_class
from pierhead.llm.server.service import request_of
from pierhead.llm.server.settings import ServerSettings
from pierhead.llm.server.watchdog import TokenWatchdog
from pierhead.llm.v1.llm_pb2 import LLMRequest, Operation
from pierhead.llm.v1.llm_pb2_grpc import LLMServerStub
from pierhead.llm_config import ENGINE_EXPECTED, ENGINE_NAMES, LLMConfig, Lora, ModelLoading
from pierhead.metrics import RuntimeMetrics
from pydantic import ValidationError

from tests.harness.waiting import PATIENCE_S, until

# ------------------------------------------------------------------------------------------------------------ engines


def test_the_engines_that_files_may_name_are_those_of_the_registry() -> None:
    assert set(ENGINES) == set(ENGINE_NAMES)


@pytest.mark.parametrize("name", ["vlllm", "my_package.engine"])
def test_an_engine_that_there_is_not_is_refused_in_the_words_of_the_files(name: str) -> None:
    with pytest.raises(LLMStartError) as told:
        engine_class(name)
    assert f'there is no engine "{name}"; expected {ENGINE_EXPECTED}' in str(told.value)
    with pytest.raises(ValidationError) as refused:
        LLMConfig(engine=name, model_loading=ModelLoading(model_id="m"))
    assert refused.value.errors()[0]["msg"] == f"expected {ENGINE_EXPECTED}"


# ------------------------------------------------------------------------------------------------------------- bodies


def test_overrides_and_model_take_the_place_of_members() -> None:
    request = LLMRequest(body=b'{"model": "a", "n": 1, "stream": true}', model="b", overrides='{"stream": false}')
    made = request_of(ChatCompletionRequest, request)
    assert made.to_dict() == {"model": "b", "n": 1, "stream": False}
    assert json.loads(made.to_bytes()) == made.to_dict()


def test_a_body_that_stays_as_it_is_keeps_its_bytes() -> None:
    raw = b'{ "model":"a",   "n": 1}'
    assert request_of(ChatCompletionRequest, LLMRequest(body=raw, model="a")).to_bytes() == raw
    assert request_of(ChatCompletionRequest, LLMRequest(body=raw)).to_bytes() == raw
    other = request_of(ChatCompletionRequest, LLMRequest(body=raw, model="b"))
    assert json.loads(other.to_bytes()) == {"model": "b", "n": 1}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "the request's body is not JSON"),
        (b"[1]", "the request's body: expected a JSON object, found an array"),
        (b"null", "found null"),
        (b'{"a": Infinity}', "Infinity is not a JSON number"),
        (b"[" * 100_000, "is not JSON"),
    ],
    ids=["empty", "array", "null", "infinity", "deep"],
)
def test_what_is_no_object_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(LLMRequestError, match=words) as caught:
        request_of(ChatCompletionRequest, LLMRequest(body=raw)).to_dict()
    assert caught.value.http_status == 400


# ----------------------------------------------------------------------------------------------------------- watchdog


def busy(tokens: int) -> EngineStats:
    return EngineStats(running=1, waiting=2, tokens=tokens)


def test_no_token_for_the_stall_timeout_is_a_stall() -> None:
    dog = TokenWatchdog(60.0, 0.0)
    dog.check(busy(5), 10.0)
    dog.check(busy(5), 69.9)
    with pytest.raises(EngineStalledError, match=r"no token for 60 s .* 1 requests running and 2 waiting"):
        dog.check(busy(5), 70.0)
    dog.check(busy(6), 80.0)
    dog.check(busy(6), 139.0)


def test_an_engine_without_requests_never_stalls() -> None:
    dog = TokenWatchdog(60.0, 0.0)
    for now in (0.0, 100.0, 200.0):
        dog.check(EngineStats(tokens=5), now)
    dog.began(1000.0)  # between two looks: the quiet before it does not count
    dog.check(busy(5), 1059.0)
    with pytest.raises(EngineStalledError):
        dog.check(busy(5), 1060.0)


# ----------------------------------------------------------------------------------------------------------- adapters


MOCK = LLMConfig(engine="mock", model_loading=ModelLoading(model_id="m"))


async def some_adapters(
    path: Path | str, most: int, *always: str, fetch: Any = None, engine: MockEngine | None = None, **kwargs: Any
) -> Adapters:
    engine = engine or MockEngine(MOCK.model_copy(update={"engine_kwargs": kwargs}))
    engine.report = lambda *_: None
    await engine.start()
    lora = Lora(dynamic_lora_loading_path=str(path), max_num_adapters_per_replica=most, adapters=[*always])
    return Adapters(engine, lora, fetch=fetch, cache=Path("/cache"), report=lambda *_: None, metrics=RuntimeMetrics())


@pytest.fixture
def loras(tmp_path: Path) -> Path:
    for name in "abcd":
        (tmp_path / name).mkdir()
    return tmp_path


async def test_pinned_ones_stay_and_leave_no_place_to_others(loras: Path) -> None:
    adapters = await some_adapters(loras, 2, "a")
    await adapters.pin_only(["b"])
    with pytest.raises(Backpressure, match=r"has no room: all 2 of max_num_adapters_per_replica are taken by .* a, b"):
        adapters.use("c")
    async with adapters.use("a"):
        pass
    await adapters.pin_only([])
    await adapters.load("c")
    assert set(adapters.held) == {"a", "c"}


@pytest.mark.parametrize("name", ["..", "../a", "a/b", "/etc", ".hidden", "", "a" * 101, "a\n", "a\x00b", "~"])
async def test_names_that_lead_elsewhere_are_no_adapters(loras: Path, name: str) -> None:
    adapters = await some_adapters(loras / "a", 1)
    with pytest.raises(LLMRequestError, match="there is no adapter of the name") as caught:
        adapters.use(name)
    assert (caught.value.http_status, caught.value.error_code) == (404, "model_not_found")


async def test_remote_ones_are_fetched(tmp_path: Path) -> None:
    asked: list[str] = []

    def fetch(source: str, cache: Path, report: Any) -> Path:
        asked.append(source)
        if source.endswith("/none"):
            raise SourceNotFoundError("nothing is stored there")
        if source.endswith("/secret"):
            raise LLMStartError("it cannot be listed: no key")
        return tmp_path

    adapters = await some_adapters("s3://bucket/loras/", 1, fetch=fetch)
    await adapters.load("a")
    assert asked == ["s3://bucket/loras/a"]
    with pytest.raises(LLMRequestError, match="nothing was found at s3://bucket/loras/none"):
        await adapters.load("none")
    with pytest.raises(LLMStartError, match='the adapter "secret" cannot be fetched: it cannot be listed: no key'):
        await adapters.load("secret")
    assert await adapters.known() == ["a"]


async def test_one_that_does_not_exist_evicts_none(loras: Path) -> None:
    adapters = await some_adapters(loras, 2)
    for name in ("a", "b"):
        await adapters.load(name)
    for ask in (adapters.load("none"), adapters.pin_only(["none"])):
        with pytest.raises(LLMRequestError, match='the adapter "none" does not exist'):
            await ask
    assert adapters.held == ("a", "b")
    await adapters.load("c")
    assert adapters.held == ("b", "c")


async def test_several_requests_for_a_remote_one_fetch_it_once(tmp_path: Path) -> None:
    asked: list[str] = []
    may_end = threading.Event()

    def fetch(source: str, cache: Path, report: Any) -> Path:
        asked.append(source)
        may_end.wait(PATIENCE_S)
        return tmp_path

    adapters = await some_adapters("s3://bucket/loras", 2, fetch=fetch)
    first, *others = [asyncio.ensure_future(adapters.load("a")) for _ in range(3)]
    await until(lambda: bool(asked), "it is fetched")
    first.cancel()
    may_end.set()
    await asyncio.gather(*others)
    assert (asked, adapters.held) == (["s3://bucket/loras/a"], ("a",))


async def test_at_most_as_many_are_looked_for_at_a_time_as_may_be_loaded(tmp_path: Path) -> None:
    looked_for: list[str] = []
    may_end = threading.Event()

    def fetch(source: str, cache: Path, report: Any) -> Path:
        looked_for.append(source)
        may_end.wait(PATIENCE_S)
        raise SourceNotFoundError("nothing is stored there")

    adapters = await some_adapters("s3://bucket/loras", 2, fetch=fetch)
    asks = [asyncio.ensure_future(adapters.load(f"none{number}")) for number in range(8)]
    await until(lambda: len(looked_for) >= 2, "two are looked for")
    await asyncio.wait(asks, timeout=0.1)
    at_a_time = len(looked_for)
    may_end.set()
    outcomes = await asyncio.gather(*asks, return_exceptions=True)
    assert {type(each) for each in outcomes} == {LLMRequestError}
    assert (at_a_time, len(looked_for)) == (2, 8)


async def test_one_that_loads_is_not_fetched_again(tmp_path: Path) -> None:
    asked: list[str] = []
    begun, may_end = asyncio.Event(), asyncio.Event()

    def fetch(source: str, cache: Path, report: Any) -> Path:
        asked.append(source)
        return tmp_path

    class Slow(MockEngine):
        async def load_adapter(self, adapter: str, path: str) -> None:
            begun.set()
            await may_end.wait()
            await super().load_adapter(adapter, path)

    adapters = await some_adapters("s3://bucket/loras", 2, fetch=fetch, engine=Slow(MOCK))
    first = asyncio.ensure_future(adapters.load("a"))
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    second = asyncio.ensure_future(adapters.load("a"))
    await asyncio.wait([second], timeout=0.1)
    may_end.set()
    await asyncio.gather(first, second)
    assert (asked, adapters.held) == (["s3://bucket/loras/a"], ("a",))


async def test_a_pinned_one_in_use_stays_pinned_when_it_cannot_be_taken_out(loras: Path) -> None:
    adapters = await some_adapters(loras, 1, "a")
    await adapters.pin_only([])
    async with adapters.use("a"):
        with pytest.raises(LLMRequestError, match='"a" is in use'):
            await adapters.unload("a")
    with pytest.raises(Backpressure, match="those that the replica always has, a"):
        await adapters.load("b")
    await adapters.unload("a")
    await adapters.load("b")


# --------------------------------------------------------------------------------------------------------- background


async def test_work_whose_caller_has_left_is_kept_until_its_end() -> None:
    waiting: list[weakref.ref[asyncio.Future[None]]] = []
    ended = asyncio.Event()

    async def work() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(weakref.ref(future))
        await future
        ended.set()

    caller = asyncio.create_task(to_its_end(work()))
    await until(lambda: bool(waiting), "the work has begun")
    caller.cancel()
    await asyncio.wait([caller])
    del caller
    gc.collect()
    future = waiting[0]()
    assert future is not None
    future.set_result(None)
    await asyncio.wait_for(ended.wait(), PATIENCE_S)


# ----------------------------------------------------------------------------------------------------------- settings

CONFIG = {"engine": "mock", "model_loading": {"model_id": "mock"}, "engine_kwargs": {"tokens_per_s": 200.0}}


def test_settings() -> None:
    variables = {"PIERHEAD_LLM_CONFIG": json.dumps(CONFIG), "PIERHEAD_LLM_CACHE": "/models"}
    settings = ServerSettings.from_env(variables)
    assert settings.config.engine == "mock"
    assert settings.cache == Path("/models")
    assert settings.admin_token == ""
    secret = ServerSettings.from_env({**variables, "PIERHEAD_ADMIN_TOKEN": "t0ken"})
    assert (secret.admin_token, "t0ken" in repr(secret)) == ("t0ken", False)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("", "PIERHEAD_LLM_CONFIG: expected what to serve, as JSON, found nothing"),
        ("{", "PIERHEAD_LLM_CONFIG: invalid JSON"),
        ('{"engine": "mock"}', "PIERHEAD_LLM_CONFIG.model_loading: field required"),
        ('{"model_loading": {"model_id": "a:b"}}', r"CONFIG\.model_loading\.model_id: expected a name of letters"),
    ],
    ids=["nothing", "cut", "missing", "colon"],
)
def test_settings_that_cannot_be(raw: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        ServerSettings.from_env({"PIERHEAD_LLM_CONFIG": raw})


# ---------------------------------------------------------------------------------------------------------- a process


async def process(config: Any, *command: str, **variables: str) -> asyncio.subprocess.Process:
    """A replica as a process, on free ports."""
    environ = os.environ | {
        "PIERHEAD_LLM_CONFIG": json.dumps(config), "PIERHEAD_HOST": "127.0.0.1", "PIERHEAD_PORT": "0",
        "PIERHEAD_ADMIN_PORT": "0", "PIERHEAD_SERVICE": "llm", **variables,
    }  # fmt: skip
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, *command, env=environ, stdout=pipe, stderr=pipe)


async def test_a_start_that_fails_ends_with_its_reason() -> None:
    failing = CONFIG | {"engine_kwargs": {"fail_start": "no such path: /models/nothing; mount it"}}
    made = await process(failing, "-m", "pierhead.llm.server")
    async with asyncio.timeout(30):
        _, log = await made.communicate()
    assert made.returncode == 1
    assert "could not be served: no such path: /models/nothing; mount it" in log.decode()
    assert "Traceback" not in log.decode()


async def test_its_token_is_that_of_the_admin_port(tmp_path: Path) -> None:
    variables = {"PIERHEAD_SOCKET": str(tmp_path / "llm"), "PIERHEAD_ADMIN_TOKEN": "t0ken"}
    made = await process(CONFIG, "-m", "pierhead.llm.server", **variables)
    assert made.stderr is not None
    try:
        async with asyncio.timeout(30), grpc.aio.insecure_channel(f"unix:{tmp_path / 'llm'}") as channel:
            while b'"ready"' not in (line := await made.stderr.readline()):
                assert line, "it has ended"
            stub, wake = LLMServerStub(channel), Operation(wake=Operation.Wake())
            with pytest.raises(grpc.RpcError) as refused:
                await stub.Operate(wake)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            await stub.Operate(wake, metadata=(("authorization", "Bearer t0ken"),))
    finally:
        made.kill()
        await made.communicate()


HANGS = """
import sys, time
from pathlib import Path
from pierhead import serve
from pierhead.llm.mock.engine import MockEngine
from functools import partial
from pierhead.llm.server.llm_server import LLMServer
from pierhead.llm.server.service import LLMService
from pierhead.llm.server.settings import ServerSettings

class Reader(MockEngine):
    needs_files = True

def fetch(source, cache, report):
    print("downloads", flush=True)
    time.sleep(600)

server = partial(LLMServer, engine_cls=Reader, fetch=fetch, cache=Path("/tmp"))
serve(LLMService(ServerSettings.from_env().config, make_server=server))
"""


async def test_sigterm_ends_a_download() -> None:
    made = await process(CONFIG, "-c", HANGS)
    try:
        async with asyncio.timeout(30):
            assert made.stdout is not None
            assert await made.stdout.readline() == b"downloads\n"
            made.send_signal(signal.SIGTERM)
            _, log = await made.communicate()
    finally:
        if made.returncode is None:
            made.kill()
    assert made.returncode == 0, log.decode()
