"""The examples of Ray Serve LLM's guide, and what its users build, by `serve.run`.

There is no Ray Serve LLM to compare with here (it needs vLLM): they are those of its guide, with another import.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from openai import APIStatusError, BadRequestError, InternalServerError, NotFoundError, OpenAI
from pierhead import rayserve as serve
from pierhead.environment import Environment
from pierhead.errors import NotFound, PierheadError, RemoteError, SettingsError, UserCodeError
from pierhead.rayserve.config import RequestRouterConfig
from pierhead.rayserve.context import DeploymentID, _RequestContext
from pierhead.rayserve.llm import build_openai_app, build_pd_openai_app
from pierhead.rayserve.llm.ingress import api_error_of
from pierhead.rayserve.llm.openai_api_models import ChatCompletionRequest
from pierhead.rayserve.llm.request_router import PrefixCacheAffinityRouter
from pierhead.rayserve.options import router_of
from pierhead.rayserve.request_router import tell_routers

from tests.harness.imports import ROOT
from tests.harness.ports import free_ports
from tests.harness.rayserve_apps import answers, own_python

FOLDER = ROOT / "tests" / "rayserve" / "llm_apps"


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def port() -> Iterator[int]:
    [found] = free_ports(1)
    serve.start(http_options={"port": found})
    yield found
    serve.shutdown()


def run(name: str) -> Any:
    return serve.run(importlib.import_module(name).app)


def client(port: int) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def say(text: str) -> Any:
    return [{"role": "user", "content": text}]


def asked(port: int, path: str, body: Any) -> urllib.request.Request:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})


def post(port: int, path: str, body: Any) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(asked(port, path, body), timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_an_engine_of_one_s_own_behind_openai_s_api(port: int) -> None:
    run("custom_engine")
    api = client(port)
    assert [each.id for each in api.models.list()] == ["small", "large"]
    assert api.models.retrieve("large").id == "large"
    answer = api.chat.completions.create(model="large", messages=say("hello there"))
    assert answer.choices[0].message.content == "large: hello there"
    events = api.chat.completions.create(model="small", messages=say("one two three"), stream=True)
    assert [each.choices[0].delta.content for each in events] == ["one", "two", "three"]
    assert api.completions.create(model="small", prompt="up").choices[0].text == "UP"
    assert api.embeddings.create(model="small", input="x", encoding_format="float").data[0].embedding == [0.5, 1.0]


@pytest.mark.parametrize(
    ("model", "text", "kind", "code", "words"),
    [
        ("none", "hello", NotFoundError, "model_not_found", "The model `none` does not exist"),
        ("small:lora", "hello", NotFoundError, "model_not_found", "The model `small:lora` does not exist"),
        ("small", "refuse it", BadRequestError, 400, "no such words"),
        ("small", "fail now", InternalServerError, "internal", "Internal Server Error"),
    ],
)
def test_errors_have_openai_s_form(
    model: str, text: str, kind: type[APIStatusError], code: object, words: str, port: int
) -> None:
    run("custom_engine")
    with pytest.raises(kind) as caught:
        client(port).chat.completions.create(model=model, messages=say(text))
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["code"] == code
    assert words in caught.value.body["message"]


def test_a_stream_that_fails_ends_with_an_error(port: int) -> None:
    run("custom_engine")
    body = {"model": "small", "messages": say("one break"), "stream": True}
    with urllib.request.urlopen(asked(port, "/v1/chat/completions", body), timeout=60) as answer:
        events = [json.loads(line.removeprefix("data: ")) for line in answer.read().decode().split("\n\n") if line]
    assert [list(each)[-1] for each in events] == ["choices", "error"]
    assert events[1]["error"]["code"] == "internal"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserCodeError("KeyError: secret [error id abc]", error_id="abc"), r"internal error \[error id abc\]"),
        (UserCodeError("secret [error id x]"), r"internal error \[error id \w+\]"),
        (SettingsError("TOKEN: cannot use secret"), r"internal error \[error id \w+\]"),
        (RemoteError("secret", grpc.StatusCode.INTERNAL), r"internal error \[error id \w+\]"),
        (NotFound("there is no such adapter"), "there is no such adapter"),
    ],
)
def test_clients_get_the_id_of_an_internal_error_and_not_its_text(error: PierheadError, message: str) -> None:
    found = api_error_of(error)
    described = json.loads(found.body)["error"]
    assert (found.status, described["type"], described["code"]) == (error.http_status, "server_error", "internal")
    assert re.fullmatch(message, described["message"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("form", "streams"), [("whole", False), ("events", True), ("chunk", True), ("either", None)])
def test_an_answer_in_the_wrong_form_is_an_error(form: str, streams: bool | None, stream: bool, port: int) -> None:
    config = importlib.import_module("custom_engine").config_of("careless", "Careless")
    serve.run(build_openai_app({"llm_configs": [config]}))
    api: Any = client(port)
    for path, create in (
        ("/v1/chat/completions", partial(api.chat.completions.create, messages=say(form))),
        ("/v1/completions", partial(api.completions.create, prompt=form)),
    ):
        if streams in (None, stream):
            answer = create(model="careless", stream=stream)
            assert (list(answer) if stream else [answer])[0].choices[0].index == 0
            continue
        with pytest.raises(InternalServerError) as caught:
            create(model="careless", stream=stream)
        expected = "text/event-stream" if stream else "application/json"
        assert (caught.value.status_code, caught.value.code) == (502, "internal")
        assert f"{path}: the deployment LLMServer:careless answered with " in caught.value.message
        assert f": expected {expected}, because the request's `stream` is {json.dumps(stream)}" in caught.value.message


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "could not parse the JSON body"),
        ({"model": 5, "messages": []}, 400, "model: expected a string"),
        ({"model": "small", "messages": "hello"}, 400, "messages: expected a list of messages"),
        ({"messages": []}, 400, "you must provide a model parameter: small, large"),
    ],
)
def test_what_is_no_request_of_openai_s_is_refused_as_the_gateway_does(
    body: Any, status: int, words: str, port: int
) -> None:
    run("custom_engine")
    found, answer = post(port, "/v1/chat/completions", body)
    assert (found, answer["error"]["type"]) == (status, "invalid_request_error")
    assert words in answer["error"]["message"]


def test_where_engines_may_fetch_from_is_read_once_for_all_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("pierhead.rayserve.llm.ingress")
    reads: list[Environment] = []

    def read(environment: Environment) -> frozenset[str]:
        reads.append(environment)
        return frozenset()

    monkeypatch.setattr(module, "media_hosts", read)
    module.make_fastapi_ingress(module.OpenAiIngress)
    assert len(reads) == 1


def test_pierhead_s_own_engines(port: int) -> None:
    script = [{"when": "weather", "text": "Sunny."}]
    mock = {"llm_engine": "mock", "engine_kwargs": {"script": script}}
    serve.run(build_openai_app({"llm_configs": [{"model_loading_config": {"model_id": "mock"}, **mock}]}))
    asked = {"model": "mock", "messages": say("the weather?")}
    chat = client(port).chat.completions
    assert chat.create(**asked).choices[0].message.content == "Sunny."
    events = list(chat.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(each.choices[0].delta.content or "" for each in events if each.choices) == "Sunny."
    assert events[-1].usage.completion_tokens > 0
    assert post(port, "/v1/chat/completions", {"messages": say("the weather?")})[0] == 200  # there is one model


def test_adapters_are_models_of_their_own(port: int, tmp_path: Path) -> None:
    for name in ("french", "german"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    lora = {"dynamic_lora_loading_path": str(tmp_path), "max_num_adapters_per_replica": 2}
    config = {"model_loading_config": {"model_id": "mock"}, "llm_engine": "mock", "lora_config": lora}
    serve.run(build_openai_app({"llm_configs": [config]}))
    api = client(port)
    assert [each.id for each in api.models.list()] == ["mock", "mock:french", "mock:german"]
    assert api.models.retrieve("mock:french").id == "mock:french"
    assert api.chat.completions.create(model="mock:german", messages=say("hello")).model == "mock:german"
    with pytest.raises(NotFoundError):
        api.chat.completions.create(model="mock:none", messages=say("hello"))


def test_prefill_reads_the_prompt_of_the_decode_server(port: int) -> None:
    transfer = {"kv_transfer_config": {"kv_connector": "NixlConnector"}}
    config = {
        "model_loading_config": {"model_id": "m"},
        "llm_engine": "custom_engine:Transferring",
        "engine_kwargs": transfer,
    }
    serve.run(build_pd_openai_app({"prefill_config": config, "decode_config": config}))
    answer = client(port).chat.completions.create(model="m", messages=say("hello"))
    assert answer.choices[0].message.content == "decoded with {'block': 7}"


def test_a_server_of_one_s_own(port: int) -> None:
    run("custom_server")
    answer = client(port).chat.completions.create(model="small", messages=say("hello"))
    assert answer.choices[0].message.content == "small: added words"


def test_an_ingress_of_one_s_own(port: int) -> None:
    run("custom_ingress")
    assert post(port, "/custom/endpoint", {"text": "hello"}) == (200, {"answer": "small: hello"})


@pytest.mark.parametrize(
    ("name", "deployment", "model"),
    [("builder", "LLMServer", "qwen-0.5b"), ("multimodal", "Multimodal:small", "small")],
)
def test_a_builder_of_one_s_own(name: str, deployment: str, model: str, port: int) -> None:
    handle = run(name)
    assert handle.deployment_name == deployment
    request = ChatCompletionRequest(model=model, messages=say("hello"))
    [answer] = handle.options(stream=True).chat.remote(request)
    assert answer.choices[0].message.content == f"{model}: hello"
    assert handle.llm_config.remote().result().model_id == model


def test_in_processes_of_their_own_the_deployments_answer_alike(tmp_path: Path) -> None:
    source = (FOLDER / "custom_engine.py").read_text(encoding="utf-8")
    chat = {"model": "small", "messages": say("hello there"), "stream": True}
    requests = [{"path": "/v1/chat/completions", "method": "POST", "json": chat}, {"path": "/v1/models/none"}]
    (tmp_path / "llm_in_processes.py").write_text(f"{source}\nREQUESTS = {requests!r}\n", encoding="utf-8")
    found = {
        system: answers(system, own_python(), [str(tmp_path / "llm_in_processes.py")], tmp_path / f"{system}.json")
        for system in ("pierhead", "services")
    }
    stream, unknown = found["services"]["llm_in_processes"]["requests"]
    assert found["services"] == found["pierhead"]
    assert [json.loads(each[6:])["choices"][0]["delta"] for each in stream["body"].split("\n\n")[:2]] == [
        {"content": "hello"},
        {"content": "there"},
    ]
    assert (unknown["status"], json.loads(unknown["body"])["error"]["code"]) == (404, "model_not_found")


def test_prompts_with_one_beginning_go_to_one_replica() -> None:
    router = PrefixCacheAffinityRouter(
        Random(1), imbalanced_threshold=10, do_eviction=True, eviction_threshold_chars=9000
    )
    replicas = [Replica(f"r{number}") for number in range(4)]
    beginning = "You are a helpful assistant of the harbour. " * 10

    def send(text: str) -> str:
        tell_routers(DeploymentID("LLMServer:small"), 9, _RequestContext(), [chat_of(text)], {})
        call = Call()
        [[first], rest] = asyncio.run(router.choose(replicas, call))
        assert rest == replicas
        router.on_routed(first, call)
        first.load += 1
        return str(first.name)

    assert len({send(f"{beginning} question {number}") for number in range(2)}) == 1
    assert len({send(str(number) * 300) for number in range(9)}) > 1


def chat_of(text: str) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="small", messages=say(text))


class Call:
    """What a router gets of a call."""

    model_id = session_id = None


@dataclass(eq=False)
class Replica:
    name: str
    load: int = 0
    models: frozenset[str] = frozenset()
    node: str = ""
    stats: dict[str, float] = field(default_factory=dict)


def test_a_config_may_name_ray_s_router_or_pierhead_s() -> None:
    for named in ("ray.serve.llm.request_router:PrefixCacheAffinityRouter", PrefixCacheAffinityRouter):
        found = router_of(RequestRouterConfig(request_router_class=named))
        assert found == {"policy": "pierhead.rayserve.llm.request_router:PrefixCacheAffinityRouter"}
