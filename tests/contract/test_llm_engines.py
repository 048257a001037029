"""What every LLM engine must do, whatever is behind it. One entry of ENGINES for each; those whose environment is not
here are skipped, and say what is missing."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pierhead.llm.objects import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    OpenAIRequest,
    TokenizeRequest,
)
from pierhead.llm.openai_error import LLMRequestError
from pierhead.llm.server.engine import EngineStats, LLMEngine
from pierhead.llm.server.registry import ENGINES as REGISTRY
from pierhead.llm.server.registry import engine_class
from pierhead.llm.server.service import replies_of
from pierhead.llm.v1.llm_pb2 import LLMReply
from pierhead.llm_config import LLMConfig, Lora, ModelLoading

from tests.environments.llama_cpp import LLAMA_CPP
from tests.harness.llama_cpp_server import CONTEXT, llama_cpp
from tests.harness.openai_server import handler_of, serving
from tests.harness.waiting import until

MODEL = "served"
MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
PATIENCE_S = 60.0

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass(frozen=True)
class Candidate:
    """An engine under test, and what it needs to be there."""

    name: str
    model_source: str | None = None
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    missing: Callable[[], str] = lambda: ""
    """What is missing to run it here; "" = nothing."""
    kept: bool = False
    """Whether all tests share one, as its start takes long."""
    behind: str = ""
    """The server that it asks, whose address is its base_url; "" = none."""
    lora: Lora | None = None
    takes: tuple[str, ...] = ()
    """Wrong members that are no error to it."""
    has: frozenset[str] = frozenset()
    """Beyond chat and completions: load (it says how busy it is, what it serves, and counts the prompt's tokens of
    streams), kv_use, embeddings, tokenize, adapters, weights (adapters are files that are read), reset_prefix_cache,
    sleep."""


def module_missing(name: str) -> str:
    return "" if importlib.util.find_spec(name) is not None else f"the package {name} is not installed here"


def variable_missing(name: str) -> str:
    return "" if os.environ.get(name) else f"{name} names nothing"


ENGINES = [
    Candidate(
        "mock",
        engine_kwargs={"tokens_per_s": 2000.0, "max_model_len": 2048},
        has=frozenset(("adapters", "embeddings", "kv_use", "load", "reset_prefix_cache", "sleep", "tokenize")),
    ),
    Candidate(
        "tests.harness.six_methods:SixMethods",
        engine_kwargs={"tokens_per_s": 2000.0, "max_model_len": 2048},
        has=frozenset(("embeddings",)),
    ),
    Candidate("openai", behind="mock", has=frozenset(("adapters", "embeddings", "load", "tokenize"))),
    Candidate(
        "openai",
        behind="llama.cpp",
        engine_kwargs={"max_model_len": CONTEXT},
        takes=("messages=[]", "max_tokens=-1", "stop={'at': 'the end'}", "top_logprobs=-5", "max_tokens=100000"),
        missing=lambda: "" if LLAMA_CPP.is_made() else "python -m tests.environments.llama_cpp makes its server",
        has=frozenset(("load",)),
    ),
    Candidate(
        "vllm",
        model_source=os.environ.get("PIERHEAD_TEST_LLM_MODEL"),
        engine_kwargs={
            "max_model_len": 2048,
            "enforce_eager": True,
            "gpu_memory_utilization": 0.3,
            "dtype": "float32",  # in bfloat16 the small model says nonsense on CPUs without AVX-512
        },
        kept=True,
        missing=lambda: module_missing("vllm") or variable_missing("PIERHEAD_TEST_LLM_MODEL"),
        lora=Lora(dynamic_lora_loading_path="/adapters", max_num_adapters_per_replica=2),
        has=frozenset(("kv_use", "load", "tokenize", "adapters", "weights", "reset_prefix_cache")),
    ),
]


@pytest.fixture(params=ENGINES, ids=lambda candidate: "-".join(filter(None, (candidate.name, candidate.behind))))
def candidate(request: pytest.FixtureRequest) -> Candidate:
    found: Candidate = request.param
    if why := found.missing():
        pytest.skip(f"engine {found.name}: {why}")
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def kept() -> AsyncIterator[dict[str, LLMEngine]]:
    """Engines whose start takes a minute or more: one of each for all tests."""
    engines: dict[str, LLMEngine] = {}
    yield engines
    for engine in engines.values():
        await engine.shutdown()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def base_urls() -> AsyncIterator[dict[str, str]]:
    """Servers with OpenAI's API, for engines that ask one: the mock engine behind it, and llama.cpp's where it is."""
    mock = next(candidate for candidate in ENGINES if candidate.name == "mock")
    behind = await started(mock, {})
    async with contextlib.AsyncExitStack() as stack:
        urls = {"mock": await stack.enter_async_context(serving(handler_of(behind)))}
        if LLAMA_CPP.is_made():
            urls["llama.cpp"] = stack.enter_context(llama_cpp(MODEL))
        yield urls
    await behind.shutdown()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(
    candidate: Candidate, kept: dict[str, LLMEngine], base_urls: dict[str, str]
) -> AsyncIterator[LLMEngine]:
    if not candidate.kept:
        made = await started(candidate, base_urls)
        yield made
        await made.shutdown()
        return
    if candidate.name not in kept:
        kept[candidate.name] = await started(candidate, base_urls)
    yield kept[candidate.name]


async def started(candidate: Candidate, base_urls: dict[str, str]) -> LLMEngine:
    loading = ModelLoading(model_id=MODEL, model_source=candidate.model_source)
    arguments = candidate.engine_kwargs | ({"base_url": base_urls[candidate.behind]} if candidate.behind else {})
    config = LLMConfig(engine=candidate.name, model_loading=loading, engine_kwargs=arguments, lora=candidate.lora)
    engine = engine_class(candidate.name)(config)
    engine.model_path, engine.report = candidate.model_source or MODEL, lambda *_: None
    await engine.start()
    return engine


def need(candidate: Candidate, what: str) -> None:
    if what not in candidate.has:
        pytest.skip(f"engine {candidate.name} has no {what}")


def takes(candidate: Candidate, **wrong: Any) -> bool:
    return any(f"{name}={value}" in candidate.takes for name, value in wrong.items())


KINDS: dict[str, type[OpenAIRequest]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def ask(path: str = "/v1/chat/completions", model: str = MODEL, **body: Any) -> Any:
    """A request of the wire; its body names another model, which `model` takes the place of."""
    raw = json.dumps({"model": "what-the-client-called-it", **body}).encode()
    return KINDS.get(path, OpenAIRequest).from_bytes(raw, model=model).sent_to(path)


def load_of(engine: LLMEngine) -> EngineStats:
    """How busy it is. One that does not say is not looked at."""
    return engine.load() or EngineStats()


def chat(**body: Any) -> Any:
    members: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 8} | body
    return ask(**members)


async def all_of(answers: AsyncIterator[Any]) -> list[LLMReply]:
    """An engine's answers, as the server sends them."""
    async with asyncio.timeout(PATIENCE_S):
        return [reply async for reply in replies_of(answers)]


async def one(answers: AsyncIterator[Any], status: int = 200) -> dict[str, Any]:
    """The body of a request's only reply."""
    found = await all_of(answers)
    assert len(found) == 1, found
    assert found[0].status == status, found[0].data
    body: dict[str, Any] = json.loads(found[0].data)
    return body


async def error_of(answers: AsyncIterator[Any], status: int) -> dict[str, Any]:
    error: dict[str, Any] = (await one(answers, status))["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] is None or isinstance(error["code"], str), "words, as OpenAI has them"
    return error


def events_of(replies: list[LLMReply]) -> list[dict[str, Any]]:
    """The events of a stream, without the [DONE] that must end it. Each reply holds whole ones."""
    events: list[str] = []
    for reply in replies:
        assert reply.data.endswith(b"\n\n"), reply.data
        for event in reply.data.decode().split("\n\n")[:-1]:
            assert event.startswith("data: "), event
            events.append(event.removeprefix("data: "))
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


# ------------------------------------------------------------------------------------------------------ whole answers


async def test_a_chat_is_answered(engine: LLMEngine) -> None:
    replies = await all_of(engine.chat(chat()))
    assert [reply.status for reply in replies] == [200]
    body = json.loads(replies[0].data)
    assert body["object"] == "chat.completion"
    assert body["id"]
    assert body["created"] > 0
    assert body["model"] == MODEL, "it takes the place of the body's"
    choice = body["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] in ("stop", "length")
    usage, ours = body["usage"], replies[0].usage
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert (ours.prompt_tokens, ours.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert 0 < usage["completion_tokens"] <= 8
    assert replies[0].tokens == usage["completion_tokens"]
    assert ours.finish_reason == choice["finish_reason"]


async def test_a_stop_string_ends_an_answer_before_it(engine: LLMEngine) -> None:
    whole = (await one(engine.chat(chat(temperature=0))))["choices"][0]["message"]["content"]
    stop = whole[2]
    body = await one(engine.chat(chat(temperature=0, stop=[stop])))
    assert body["choices"][0]["message"]["content"] == whole[: whole.index(stop)]
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_overrides_take_the_place_of_members(engine: LLMEngine) -> None:
    request = chat(max_tokens=64, stream=True)
    request.max_tokens, request.stream = 1, False
    body = await one(engine.chat(request))
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (1, "length")


# ------------------------------------------------------------------------------------------------------------ streams


async def test_a_chat_is_streamed(engine: LLMEngine, candidate: Candidate) -> None:
    whole = (await one(engine.chat(chat(temperature=0))))["choices"][0]["message"]["content"]
    replies = await all_of(engine.chat(chat(temperature=0, stream=True)))
    assert [reply.status for reply in replies] == [200, *[0] * (len(replies) - 1)]
    events = events_of(replies)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert {event["model"] for event in events} == {MODEL}
    assert len({event["id"] for event in events}) == 1
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in deltas) == whole
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons[-1] in ("stop", "length")
    assert set(reasons[:-1]) <= {None}
    assert sum(reply.tokens for reply in replies) == replies[-1].usage.completion_tokens > 0
    assert (replies[-1].usage.prompt_tokens > 0) == ("load" in candidate.has)
    assert replies[-1].usage.finish_reason == reasons[-1]


async def test_a_completion_is_answered_and_streamed(engine: LLMEngine) -> None:
    body: dict[str, Any] = {"prompt": "Paris is", "max_tokens": 6, "temperature": 0}
    answer = await one(engine.completions(ask("/v1/completions", **body)))
    assert answer["object"] == "text_completion"
    assert 0 < answer["usage"]["completion_tokens"] <= 6
    whole = answer["choices"][0]["text"]
    events = events_of(await all_of(engine.completions(ask("/v1/completions", **body, stream=True))))
    assert {event["object"] for event in events} == {"text_completion"}
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    assert events[-1]["choices"][0]["finish_reason"] in ("stop", "length")


async def test_usage_comes_last_when_it_is_asked_for(engine: LLMEngine) -> None:
    replies = await all_of(engine.chat(chat(stream=True, stream_options={"include_usage": True})))
    *_, last = events_of(replies)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == replies[-1].usage.completion_tokens
    without = events_of(await all_of(engine.chat(chat(stream=True))))
    assert all(event["choices"] for event in without)


async def test_several_choices(engine: LLMEngine) -> None:
    body = await one(engine.chat(chat(n=3, temperature=1.0)))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    events = events_of(await all_of(engine.chat(chat(stream=True, n=2))))
    ends = [event["choices"][0]["index"] for event in events if event["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1]


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"\xff\xfe", b'{"messages": NaN}'], ids=["empty", "cut", "array", "bytes", "nan"]
)
async def test_what_is_no_json_object_is_refused(engine: LLMEngine, raw: bytes) -> None:
    await error_of(engine.chat(ChatCompletionRequest.from_bytes(raw, model=MODEL)), 400)
    assert load_of(engine).running == load_of(engine).waiting == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": "hello"},
        {"messages": []},
        {"max_tokens": -1},
        {"temperature": "hot"},
        {"stream": "perhaps so"},
        {"stop": {"at": "the end"}},
        {"top_logprobs": -5, "logprobs": True},
    ],
    ids=str,
)
async def test_wrong_members_are_refused(engine: LLMEngine, candidate: Candidate, wrong: dict[str, Any]) -> None:
    if takes(candidate, **wrong):
        pytest.skip(f"{candidate.behind} takes {wrong}")
    before = load_of(engine).tokens
    await error_of(engine.chat(chat(**wrong)), 400)
    assert load_of(engine).tokens == before, "the engine is untouched"


async def test_a_context_that_is_too_long_is_refused(engine: LLMEngine, candidate: Candidate) -> None:
    long = [{"role": "user", "content": "Paris and Rome. " * 4000}]
    error = await error_of(engine.chat(chat(messages=long)), 400)
    assert "2048" in error["message"]
    assert error["code"] == "context_length_exceeded"
    if not takes(candidate, max_tokens=100_000):
        await error_of(engine.chat(chat(max_tokens=100_000)), 400)
    error = await error_of(engine.chat(chat(messages=long, stream=True)), 400)
    assert error["code"] == "context_length_exceeded"


async def test_an_unknown_model_is_not_found(engine: LLMEngine) -> None:
    for model in ("another", f"{MODEL}:no-such-adapter"):
        request = chat()
        request.model = model
        assert (await error_of(engine.chat(request), 404))["code"] == "model_not_found"


async def test_a_path_that_it_does_not_have_is_not_found(engine: LLMEngine) -> None:
    await error_of(engine.pass_through(ask("/v1/no/such/path")), 404)


# -------------------------------------------------------------------------------------------------- load, abort, life


async def test_a_closed_answer_aborts_its_request(engine: LLMEngine, candidate: Candidate) -> None:
    need(candidate, "load")
    before = load_of(engine)
    assert (before.running, before.waiting) == (0, 0)
    replies = engine.chat(chat(stream=True, max_tokens=1000, ignore_eos=True))
    await anext(replies)
    # Of a slow server it may be making sure that it still generates.
    await until(lambda: load_of(engine).running == 1, "this request alone runs", PATIENCE_S)
    assert (load_of(engine).kv_use > 0) == ("kv_use" in candidate.has)
    await replies.aclose()  # type: ignore[attr-defined]
    await until(lambda: load_of(engine).running == 0, "the request is aborted", PATIENCE_S)
    assert 0 <= load_of(engine).kv_use <= 1
    tokens = load_of(engine).tokens
    assert tokens > before.tokens
    await engine.generate_one_token()
    assert load_of(engine).tokens - tokens < 100, "the aborted request makes no more tokens"


async def test_many_at_a_time(engine: LLMEngine) -> None:
    bodies = await asyncio.gather(*[one(engine.chat(chat(max_tokens=4))) for _ in range(16)])
    assert {body["usage"]["completion_tokens"] for body in bodies} <= {1, 2, 3, 4}
    assert len({body["id"] for body in bodies}) == 16
    assert load_of(engine).running == load_of(engine).waiting == 0


async def test_it_is_well_and_generates(engine: LLMEngine, candidate: Candidate) -> None:
    assert await engine.check_health() is not False
    before = load_of(engine).tokens
    await engine.generate_one_token()
    assert (load_of(engine).tokens > before) == ("load" in candidate.has)


async def test_it_says_what_it_serves(engine: LLMEngine, candidate: Candidate) -> None:
    assert engine.describe().max_model_len == (2048 if "load" in candidate.has else 0)


async def test_its_own_metrics_are_text(engine: LLMEngine) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    await one(engine.chat(chat()))
    text = engine.expose()
    assert not text or text.endswith(b"\n")
    assert all(family.samples for family in text_string_to_metric_families(text.decode()))


# ------------------------------------------------------------------------------------------- what only some have


async def test_embeddings(engine: LLMEngine, candidate: Candidate) -> None:
    need(candidate, "embeddings")
    body = await one(engine.embeddings(ask("/v1/embeddings", input=["Paris", "Rome"])))
    assert body["object"] == "list"
    assert [entry["index"] for entry in body["data"]] == [0, 1]
    for entry in body["data"]:
        assert sum(value * value for value in entry["embedding"]) == pytest.approx(1, abs=1e-3)
    again = await one(engine.embeddings(ask("/v1/embeddings", input="Paris")))
    assert again["data"][0]["embedding"] == pytest.approx(body["data"][0]["embedding"], abs=1e-3)
    await error_of(engine.embeddings(ask("/v1/embeddings", input=7)), 400)


async def test_tokenize_and_back(engine: LLMEngine, candidate: Candidate) -> None:
    need(candidate, "tokenize")
    text = "Paris, où est-ce?"
    body = await one(engine.tokenize(ask("/tokenize", prompt=text, add_special_tokens=False)))
    assert body["count"] == len(body["tokens"]) > 0
    assert body["max_model_len"] == 2048
    back = await one(engine.detokenize(ask("/detokenize", tokens=body["tokens"])))
    assert back["prompt"] == text
    conversation = await one(engine.tokenize(ask("/tokenize", messages=MESSAGES)))
    assert conversation["count"] == (await one(engine.chat(chat())))["usage"]["prompt_tokens"]


async def test_adapters(engine: LLMEngine, candidate: Candidate, tmp_path: Path) -> None:
    need(candidate, "adapters")
    path = tmp_path / "french"
    if "weights" in candidate.has:
        from tests.harness.lora_adapter import write_adapter

        write_adapter(path, Path(candidate.model_source or ""))
    request = chat(temperature=0)
    base = (await one(engine.chat(request)))["choices"][0]["message"]["content"]
    request.model = f"{MODEL}:french"
    await error_of(engine.chat(request), 404)
    await engine.load_adapter("french", str(path))
    adapted = await one(engine.chat(request))
    assert adapted["model"] == f"{MODEL}:french"
    assert "french" in engine.describe().adapters
    if "weights" in candidate.has:
        assert adapted["choices"][0]["message"]["content"] != base
        events = events_of(await all_of(engine.chat(chat(temperature=0, model=request.model, stream=True))))
        said = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        assert said == adapted["choices"][0]["message"]["content"]
        assert (await one(engine.chat(chat(temperature=0))))["choices"][0]["message"]["content"] == base
    await engine.unload_adapter("french")
    assert "french" not in engine.describe().adapters
    await error_of(engine.chat(request), 404)


async def test_a_refused_adapter_says_why(engine: LLMEngine, candidate: Candidate, tmp_path: Path) -> None:
    need(candidate, "weights")
    from tests.harness.lora_adapter import write_adapter

    model = Path(candidate.model_source or "")
    no_json, no_weights, too_large = (write_adapter(tmp_path / name, model) for name in ("json", "weights", "large"))
    (no_json / "adapter_config.json").write_text("{")
    (no_weights / "adapter_model.safetensors").write_bytes(b"nonsense" * 20)
    settings = json.loads((too_large / "adapter_config.json").read_text())
    (too_large / "adapter_config.json").write_text(json.dumps(settings | {"r": 512}))
    (tmp_path / "empty").mkdir()
    reasons = {"json": "double quotes", "weights": "header", "large": "max_lora_rank", "empty": "No adapter"}
    for name, why in reasons.items():
        with pytest.raises(LLMRequestError, match=why) as refused:
            await engine.load_adapter(name, str(tmp_path / name))
        assert str(tmp_path / name) in str(refused.value), "where it is"
        assert name not in engine.describe().adapters
    await one(engine.chat(chat()))


async def test_the_prefix_cache_can_be_reset(engine: LLMEngine, candidate: Candidate) -> None:
    need(candidate, "reset_prefix_cache")
    long = chat(messages=[{"role": "user", "content": "Paris and Rome. " * 40}], max_tokens=1)
    await one(engine.chat(long))
    assert (await all_of(engine.chat(long)))[-1].usage.cached_tokens > 0
    await engine.reset_prefix_cache()
    assert (await all_of(engine.chat(long)))[-1].usage.cached_tokens == 0


async def test_it_says_whether_it_can_sleep(engine: LLMEngine, candidate: Candidate) -> None:
    assert engine.can_sleep is ("sleep" in candidate.has)


@pytest.mark.parametrize("level", [1, 2])
async def test_while_it_sleeps_it_answers_nothing(engine: LLMEngine, candidate: Candidate, level: int) -> None:
    need(candidate, "sleep")
    long = chat(messages=[{"role": "user", "content": "Paris and Rome. " * 40}], max_tokens=1)
    await one(engine.chat(long))
    await engine.sleep(level)
    assert await engine.check_health() is not False
    answer = asyncio.ensure_future(all_of(engine.chat(long)))
    await asyncio.wait([answer], timeout=0.1)
    assert not answer.done()
    await engine.wake()
    assert (await answer)[-1].usage.cached_tokens == 0, "the cache is lost"


async def test_every_engine_of_the_registry_is_here() -> None:
    assert {candidate.name for candidate in ENGINES if ":" not in candidate.name} == set(REGISTRY)


async def test_shutdown_ends_what_runs(
    candidate: Candidate, kept: dict[str, LLMEngine], base_urls: dict[str, str]
) -> None:
    engine = kept.pop(candidate.name, None) or await started(candidate, base_urls)
    replies = engine.chat(chat(stream=True, max_tokens=1500, ignore_eos=True))
    await anext(replies)
    await engine.shutdown()

    async def rest() -> None:
        async for _ in replies:
            pass

    with pytest.raises(Exception):  # noqa: B017, PT011 - of whatever kind: its stream must not end as if it were whole
        await asyncio.wait_for(rest(), PATIENCE_S)
