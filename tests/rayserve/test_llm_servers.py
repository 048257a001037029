"""The classes of Ray Serve LLM, without an application: protocols, builders' parts, and decode servers."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest
from pierhead.llm.objects import ChatCompletionRequest, ChatCompletionResponse, CompletionRequest, ErrorResponse
from pierhead.rayserve.llm import DeploymentProtocol, LLMConfig, LLMEngine, OpenAiIngress, build_llm_deployment
from pierhead.rayserve.llm.deployment import DPServer, LLMServer, PDDecodeServer, PDPrefillServer
from pydantic import BaseModel

from tests.harness.imports import ROOT

MODEL: dict[str, Any] = {"model_loading_config": {"model_id": "m"}}
EVENT = 'data: {"object": "chat.completion.chunk", "choices": []}\n\n'


class WholeAnswer(BaseModel):
    """As vLLM's."""

    kv_transfer_params: dict[str, Any]


class Prefill:
    """A handle to a prefill server that answers so."""

    deployment_name = "Prefill:m"

    def __init__(self, *answers: Any) -> None:
        self._answers = answers

    def options(self, **_: Any) -> Prefill:
        """Itself."""
        return self

    @property
    def chat(self) -> Prefill:
        """Itself."""
        return self

    completions = chat

    async def remote(self, *_: Any) -> AsyncIterator[Any]:
        """The answers."""
        for each in self._answers:
            yield each


async def decoded(request: Any, *prefilled: Any) -> Any:
    """What the decode server answers."""
    config = LLMConfig(
        **MODEL,
        llm_engine="custom_engine:Transferring",
        engine_kwargs={"kv_transfer_config": {}},
    )
    server: Any = PDDecodeServer.sync_init(config, report=lambda *_: None)
    server._prefill = Prefill(*prefilled)
    await server.start()
    method = server.chat if isinstance(request, ChatCompletionRequest) else server.completions
    [answer] = [each async for each in method(request)]
    await server.shutdown()
    return answer


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "rayserve" / "llm_apps"))


class WithoutChat(LLMEngine):
    async def completions(self, request: Any) -> AsyncIterator[Any]:
        yield

    embeddings = completions

    async def start(self) -> None:
        pass

    check_health = shutdown = start


def test_an_engine_without_one_of_the_six_methods_is_none() -> None:
    made: Any = WithoutChat
    with pytest.raises(TypeError, match=r"abstract.*chat"):
        made({})
    assert LLMEngine.__abstractmethods__ == {
        "chat", "completions", "embeddings", "start", "check_health", "shutdown",
    }  # fmt: skip


@pytest.mark.parametrize("cls", [LLMServer, DPServer, PDPrefillServer, PDDecodeServer, OpenAiIngress])
def test_servers_and_the_ingress_know_their_options(cls: Any) -> None:
    assert isinstance(cls, DeploymentProtocol)
    assert all(inspect.isfunction(getattr(cls, method)) for method in ("chat", "completions", "embeddings"))
    scaling = {"min_replicas": 2, "max_replicas": 3}
    config = LLMConfig(**MODEL, deployment_config={"autoscaling_config": scaling})
    if cls is OpenAiIngress:
        assert cls.get_deployment_options([config]) == {"max_ongoing_requests": 4096}
        return
    options = cls.get_deployment_options(config)
    assert options["ray_actor_options"] == {"num_gpus": 1}
    assert options["autoscaling_config"] == {"target_ongoing_requests": 64, **scaling}
    assert options["max_ongoing_requests"] == 256, "vLLM's own bound"


def test_one_class_makes_deployments_with_different_options() -> None:
    assert inspect.isclass(LLMServer)
    one, other = (build_llm_deployment(LLMConfig(**MODEL, deployment_config={"num_replicas": n})) for n in (1, 2))
    deployments = [each._bound_deployment for each in (one, other)]
    assert [each.func_or_class for each in deployments] == [LLMServer, LLMServer]
    assert [each.num_replicas for each in deployments] == [1, 2]


def chat() -> ChatCompletionRequest:
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hello"}])


READ = {"kv_transfer_params": {"block": 7}}


@pytest.mark.parametrize("answer", [ChatCompletionResponse(choices=[], **READ), READ, WholeAnswer(**READ)])
async def test_a_prefill_server_may_answer_with_an_object_of_any_kind(answer: Any) -> None:
    found = await decoded(chat(), answer)
    assert found.choices[0].message.content == "decoded with {'block': 7}"


@pytest.mark.parametrize("request_", [chat(), CompletionRequest(model="m", prompt="hello")])
@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ((), "answered with nothing: expected one whole answer"),
        ((EVENT, "data: [DONE]\n\n"), "answered with a stream: expected one whole answer"),
        (([EVENT],), "answered with a stream: expected one whole answer"),
        ((READ, READ), "answered with 2 answers: expected one whole answer"),
        (({"kv_transfer_params": "text"},), "answered with kv_transfer_params: expected an object, found a string"),
    ],
)
async def test_a_prefill_server_that_answers_otherwise_is_one_clear_error(
    request_: Any, answers: tuple[Any, ...], words: str
) -> None:
    found = await decoded(request_, *answers)
    assert isinstance(found, ErrorResponse)
    assert (found.status, found.error["type"], found.error["code"]) == (502, "server_error", "internal")
    assert found.error["message"].startswith(f"{request_.path}: the prefill server Prefill:m {words}")
    assert "its engine must do what the request's `stream`, which is false, says" in found.error["message"]


@pytest.mark.parametrize(
    "refusal",
    [
        ErrorResponse.of(400, "too long", kind="invalid_request_error"),
        {"error": {"message": "too long", "type": "invalid_request_error", "code": 400}},
    ],
)
async def test_a_prefill_server_s_refusal_is_the_answer(refusal: Any) -> None:
    found = await decoded(chat(), refusal)
    assert (found.status, found.error["message"]) == (400, "too long")


@pytest.mark.parametrize(
    "members", [{"prompt": ["a", "b"]}, {"prompt": [[1, 2], [3]]}, {"prompt": "a", "n": 2}, {"prompt": ["a"], "n": 2}]
)
async def test_what_is_read_of_one_prompt_is_not_for_several(members: dict[str, Any]) -> None:
    """A prefill server that is asked answers with nothing here, which is an error."""
    found = await decoded(CompletionRequest(model="m", **members))
    assert not isinstance(found, ErrorResponse)


def test_the_ingress_names_an_adapter_as_replicas_report_it() -> None:
    handle = Mock()
    ingress = OpenAiIngress({"m": handle}, {"m": {}}, lora_paths={"m": "/adapters"})
    ingress.handle_of("m:french", "alice")
    handle.options.assert_called_once_with(stream=True, multiplexed_model_id="french", session_id="alice")
