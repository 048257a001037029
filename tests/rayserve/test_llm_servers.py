"""The servers of Ray Serve LLM, without an application: decode servers, and protocols."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from pierhead.llm.objects import ChatCompletionRequest, ChatCompletionResponse, CompletionRequest, ErrorResponse
from pierhead.rayserve.llm import LLMConfig
from pierhead.rayserve.llm.deployment import PDDecodeServer
from pydantic import BaseModel

from tests.harness.imports import ROOT

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
        model_loading_config={"model_id": "m"},  # type: ignore[arg-type]
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
