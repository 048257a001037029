"""Clients of language models as people use them, each asked in its own words, against one server: that which
PIERHEAD_TEST_LLM_SERVED describes. tests/harness/llm_clients.py runs it, in an environment of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import pytest
from pydantic import BaseModel

SERVED: dict[str, str] = json.loads(os.environ.get("PIERHEAD_TEST_LLM_SERVED", "{}"))
"""`url`, `chat` (a model), and where there is one `embeddings` (a model). `no_tools`: why it calls none."""
ANSWER_S = 300.0
QUESTION = "What is the capital of France?"
LOOK_UP, AS_JSON = "Look up Paris.", "Describe Paris as JSON."
"""What the mock engine has answers for."""
TOO_LONG = "far " * 5000
MOST = 200
"""Tokens of an answer. A small model makes blanks within JSON."""

pytestmark = pytest.mark.skipif(not SERVED, reason="PIERHEAD_TEST_LLM_SERVED names no server")


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]
    sure: bool


SCHEMA = City.model_json_schema() | {"additionalProperties": False}
TOOL: Any = {
    "type": "function",
    "function": {"name": "look_up", "description": "A city.", "parameters": SCHEMA, "strict": True},
}


def of_openai() -> Any:
    import openai

    return openai.OpenAI(base_url=f"{SERVED['url']}/v1", api_key="none", max_retries=0, timeout=ANSWER_S)


def message(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


class OpenAIs:
    """OpenAI's own."""

    def __init__(self, opened: ExitStack) -> None:
        self.client = opened.enter_context(of_openai())
        self.model = SERVED["chat"]

    def _chat(self, text: str, **members: Any) -> Any:
        members = {"max_tokens": MOST, "temperature": 0} | members
        return self.client.chat.completions.create(model=self.model, messages=message(text), **members)

    def chat(self, text: str) -> str:
        return str(self._chat(text, max_tokens=8).choices[0].message.content)

    def stream(self, text: str) -> Iterator[str]:
        for chunk in self._chat(text, max_tokens=8, stream=True):
            yield chunk.choices[0].delta.content or ""

    def call(self, text: str) -> tuple[str, Any]:
        [call] = self._chat(text, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls
        return call.function.name, json.loads(call.function.arguments)

    def city(self, text: str) -> Any:
        parse = self.client.chat.completions.parse
        return parse(
            model=self.model, messages=message(text), response_format=City, max_tokens=MOST, temperature=0
        ).choices[0].message.parsed  # fmt: skip

    def embed(self, texts: list[str]) -> list[list[float]]:
        return [each.embedding for each in self.client.embeddings.create(model=SERVED["embeddings"], input=texts).data]


class Responses(OpenAIs):
    """OpenAI's own, by its later API."""

    embed = call = city = None  # type: ignore[assignment]

    def _respond(self, text: str, **members: Any) -> Any:
        return self.client.responses.create(
            model=self.model, input=text, max_output_tokens=16, temperature=0, **members
        )

    def chat(self, text: str) -> str:
        return str(self._respond(text).output_text)

    def stream(self, text: str) -> Iterator[str]:
        events = list(self._respond(text, stream=True))
        assert events[0].type == "response.created"
        assert events[-1].type == "response.completed"
        yield from (event.delta for event in events if event.type == "response.output_text.delta")


COLD: Any = {"extra_body": {"temperature": 0}}
"""Its client has no `temperature` any more; servers have it."""


class Anthropics:
    """Anthropic's own."""

    def __init__(self, opened: ExitStack) -> None:
        import anthropic

        self.client = opened.enter_context(
            anthropic.Anthropic(base_url=SERVED["url"], api_key="none", max_retries=0, timeout=ANSWER_S)
        )
        self.model = SERVED["chat"]

    def _ask(self, text: str, **members: Any) -> Any:
        members = {"max_tokens": MOST, **COLD} | members
        return self.client.messages.create(model=self.model, messages=message(text), **members)

    def chat(self, text: str) -> str:
        answer = self._ask(text, max_tokens=8)
        assert answer.usage.output_tokens > 0
        return str(answer.content[0].text)

    def stream(self, text: str) -> Iterator[str]:
        asked: Any = {"model": self.model, "messages": message(text), "max_tokens": 8}
        with self.client.messages.stream(**asked, **COLD) as stream:
            yield from stream.text_stream

    def call(self, text: str) -> tuple[str, Any]:
        tool = {"name": "look_up", "description": "A city.", "input_schema": SCHEMA, "strict": True}
        [block] = self._ask(text, tools=[tool], tool_choice={"type": "any"}).content
        return block.name, block.input

    def count(self, text: str) -> int:
        return int(self.client.messages.count_tokens(model=self.model, messages=message(text)).input_tokens)


class LangChain:
    def __init__(self, opened: ExitStack) -> None:
        import httpx
        from langchain_openai import ChatOpenAI, OpenAIEmbeddings

        http = opened.enter_context(httpx.Client())
        where: Any = {"base_url": f"{SERVED['url']}/v1", "api_key": "none", "max_retries": 0, "http_client": http}
        self.client = ChatOpenAI(model=SERVED["chat"], max_tokens=MOST, temperature=0, timeout=ANSWER_S, **where)
        # Otherwise it sends tokens of OpenAI's own models, for which it fetches their tokenizer.
        self.embeddings = OpenAIEmbeddings(
            model=SERVED.get("embeddings", ""), check_embedding_ctx_length=False, **where
        )

    def chat(self, text: str) -> str:
        return str(self.client.invoke(text, max_tokens=8).content)

    def stream(self, text: str) -> Iterator[str]:
        for chunk in self.client.stream(text, max_tokens=8):
            yield str(chunk.content)

    def call(self, text: str) -> tuple[str, Any]:
        [call] = self.client.bind_tools([TOOL], tool_choice="any").invoke(text).tool_calls
        return call["name"], call["args"]

    def city(self, text: str) -> Any:
        return self.client.with_structured_output(City, method="json_schema", strict=True).invoke(text)

    def embed(self, texts: list[str]) -> Any:
        return self.embeddings.embed_documents(texts)


class LlamaIndex:
    def __init__(self, opened: ExitStack) -> None:
        import httpx
        from llama_index.core.llms import ChatMessage
        from llama_index.llms.openai_like import OpenAILike

        self.message = ChatMessage
        self.client = OpenAILike(
            model=SERVED["chat"], api_base=f"{SERVED['url']}/v1", api_key="none", max_retries=0, timeout=ANSWER_S,
            max_tokens=MOST, temperature=0, is_chat_model=True, is_function_calling_model=True,
            should_use_structured_outputs=True, strict=True, http_client=opened.enter_context(httpx.Client()),
        )  # fmt: skip

    def _messages(self, text: str) -> list[Any]:
        return [self.message(role="user", content=text)]

    def chat(self, text: str) -> str:
        return str(self.client.chat(self._messages(text), max_tokens=8).message.content)

    def stream(self, text: str) -> Iterator[str]:
        for part in self.client.stream_chat(self._messages(text), max_tokens=8):
            yield part.delta or ""

    def call(self, text: str) -> tuple[str, Any]:
        from llama_index.core.tools import FunctionTool

        tool = FunctionTool.from_defaults(lambda **_: None, name="look_up", description="A city.", fn_schema=City)
        answer = self.client.chat_with_tools([tool], user_msg=text, tool_required=True)
        [call] = self.client.get_tool_calls_from_response(answer)
        return call.tool_name, call.tool_kwargs

    def city(self, text: str) -> Any:
        return self.client.as_structured_llm(City).chat(self._messages(text)).raw


class LiteLLM:
    def __init__(self, opened: ExitStack) -> None:
        self.where: Any = {"client": opened.enter_context(of_openai()), "max_retries": 0, "timeout": ANSWER_S}

    def _ask(self, text: str, **members: Any) -> Any:
        import litellm

        members = {"max_tokens": MOST, "temperature": 0} | self.where | members
        return litellm.completion(f"openai/{SERVED['chat']}", message(text), **members)

    def chat(self, text: str) -> str:
        return str(self._ask(text, max_tokens=8).choices[0].message.content)

    def stream(self, text: str) -> Iterator[str]:
        for chunk in self._ask(text, max_tokens=8, stream=True):
            yield chunk.choices[0].delta.content or ""

    def call(self, text: str) -> tuple[str, Any]:
        [call] = self._ask(text, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls
        return call.function.name, json.loads(call.function.arguments)

    def city(self, text: str) -> City:
        return City.model_validate_json(self._ask(text, response_format=City).choices[0].message.content)

    def embed(self, texts: list[str]) -> list[list[float]]:
        import litellm

        answer = litellm.embedding(f"openai/{SERVED['embeddings']}", texts, **self.where)
        return [each["embedding"] for each in answer.data]


CLIENTS = (OpenAIs, Responses, Anthropics, LangChain, LlamaIndex, LiteLLM)


def each_that_can(way: str) -> Callable[[Any], Any]:
    kinds = [kind for kind in CLIENTS if getattr(kind, way, None) is not None]
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.__name__)


@pytest.fixture
def make(kind: Any) -> Iterator[Callable[..., Any]]:
    """Makes clients of a kind. Their connections are closed at the end of the test."""
    with ExitStack() as opened:
        yield partial(kind, opened)


@each_that_can("stream")
def test_a_stream_says_what_the_whole_answer_says(make: Callable[..., Any]) -> None:
    whole = make().chat(QUESTION)
    parts = list(make().stream(QUESTION))
    assert whole == "".join(parts) != ""


@each_that_can("call")
def test_a_tool_that_must_be_called_is(make: Callable[..., Any]) -> None:
    if "no_tools" in SERVED:
        pytest.skip(SERVED["no_tools"])
    name, arguments = make().call(LOOK_UP)
    assert name == "look_up"
    assert City.model_validate(arguments)


@each_that_can("city")
def test_an_answer_has_the_schema_that_was_asked_for(make: Callable[..., Any]) -> None:
    assert isinstance(make().city(AS_JSON), City)


@each_that_can("embed")
def test_embeddings(make: Callable[..., Any]) -> None:
    if "embeddings" not in SERVED:
        pytest.skip("no model for embeddings is served")
    one, two = make().embed([QUESTION, AS_JSON])
    assert len(one) == len(two) > 1
    assert one != two
    [alone] = make().embed([QUESTION])
    assert alone == pytest.approx(one, abs=1e-3)


@each_that_can("count")
def test_tokens_are_counted(make: Callable[..., Any]) -> None:
    client = make()
    assert 0 < client.count(QUESTION) < client.count(QUESTION * 2)


@each_that_can("chat")
def test_an_unknown_model_is_not_found(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERVED, "chat", "gpt-4")
    check_refused(make(), QUESTION, "NotFoundError", 404)


@each_that_can("chat")
def test_too_long_a_prompt_is_a_bad_request(kind: Any, make: Callable[..., Any]) -> None:
    told_by_its_code = {"LangChain": "OpenAIContextOverflowError", "LiteLLM": "ContextWindowExceededError"}
    check_refused(make(), TOO_LONG, told_by_its_code.get(kind.__name__, "BadRequestError"), 400)


def check_refused(client: Any, text: str, error: str, status: int) -> None:
    """With the client's own class of errors, or one below it; a stream as well."""
    for ask in (client.chat, lambda asked: list(client.stream(asked))):
        with pytest.raises(Exception) as refused:  # noqa: PT011 - the clients' classes are not here
            ask(text)
        assert error in [each.__name__ for each in type(refused.value).__mro__]
        assert getattr(refused.value, "status_code", None) == status
