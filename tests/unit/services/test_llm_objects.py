"""OpenAI's requests and answers as objects: parsed when a member is read, else the client's own bytes."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.llm.objects import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    CompletionRequest,
    EmbeddingCompletionRequest,
    EmbeddingRequest,
    EmbeddingResponse,
    ErrorInfo,
    ErrorResponse,
    MissingMember,
    OpenAIObject,
    OpenAIRequest,
    RawAnswer,
    StreamEvents,
    TokenizeResponse,
    Usage,
)
from pierhead.llm.openai_error import LLMRequestError

T = TypeVar("T")
NAMES = st.text(max_size=8) | st.sampled_from(
    ["model", "messages", "stream", "choices", "usage", "error", "items", "_x"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(NAMES, JSON, max_size=5)
KINDS = st.sampled_from([ChatCompletionRequest, OpenAIRequest, ChatCompletionResponse, ErrorResponse])

BODY = b'{ "model":"qwen",  "messages": [{"role": "user", "content": "caf\\u00e9"}], "stream": true }'
ANSWER = {
    "id": "chatcmpl-1",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Paris"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
}


def travelled(value: T) -> T:
    """What arrives where a handle sends the value."""
    arrived: T = pickle.loads(pickle.dumps(value))  # noqa: S301 - its own
    return arrived


# -------------------------------------------------------------------------------------------------- bytes in, bytes out


@given(KINDS, st.binary())
def test_bytes_that_nobody_looked_at_are_passed_on_whatever_they_are(kind: type[OpenAIObject], data: bytes) -> None:
    found = kind.from_bytes(data)
    for each in (found, copy.copy(found), copy.deepcopy(found), found.model_copy(), travelled(found)):
        assert each.to_bytes() == data
    assert repr(found) == f"{kind.__name__}(<{len(data)} bytes, not parsed>)"


@given(KINDS, OBJECTS, st.sampled_from([(",", ":"), (" , ", " : ")]))
def test_bytes_are_the_same_after_a_look_at_what_cannot_be_changed(
    kind: type[OpenAIObject], members: dict[str, Any], separators: tuple[str, str]
) -> None:
    data = json.dumps(members, separators=separators).encode()
    found = kind.from_bytes(data)
    assert found.model_fields_set == set(members)
    for name, value in members.items():
        if not (name.startswith("_") or isinstance(value, list | dict) or hasattr(kind, name)):
            assert getattr(found, name) == value
    assert found.to_bytes() == data


@given(KINDS, OBJECTS, OBJECTS)
def test_what_is_set_takes_the_place_of_what_was_there(
    kind: type[OpenAIObject], members: dict[str, Any], instead: dict[str, Any]
) -> None:
    instead = {f"x{name}": value for name, value in instead.items()}
    data = json.dumps(members).encode()
    by_bytes = kind.from_bytes(data, **instead)
    by_setting, by_copy = kind.from_bytes(data), kind.from_bytes(data).model_copy(update=instead)
    for name, value in instead.items():
        setattr(by_setting, name, value)
    for found in (by_bytes, by_setting, by_copy, travelled(by_bytes)):
        assert json.loads(found.to_bytes()) == members | instead
        assert found.model_dump() == members | instead
        assert json.loads(found.model_dump_json()) == members | instead
        assert found == by_bytes


def test_members_in_the_place_of_others_are_read_without_a_parse() -> None:
    request = ChatCompletionRequest.from_bytes(b"no JSON", model="qwen", stream=False)
    assert (request.model, request.stream) == ("qwen", False)


def test_the_same_value_set_again_keeps_the_bytes() -> None:
    assert ChatCompletionRequest.from_bytes(BODY, model="qwen").to_bytes() == BODY


def test_a_change_within_a_list_is_seen_in_the_bytes() -> None:
    for request in (ChatCompletionRequest.from_bytes(BODY), ChatCompletionRequest.from_bytes(BODY, messages=[{}])):
        request.messages[0]["content"] = "changed"
        assert json.loads(request.to_bytes())["messages"][0]["content"] == "changed"


def test_a_copy_is_changed_alone() -> None:
    request = ChatCompletionRequest.from_bytes(BODY)
    for other in (copy.copy(request), request.model_copy(), request.model_copy(update={"model": "other"})):
        other.model = "other"
        other.seed = 5
        assert request.to_bytes() == BODY
    assert request.messages
    deep = request.model_copy(deep=True)
    deep.messages[0]["content"] = "changed"
    assert request.messages[0]["content"] == "café"


# ------------------------------------------------------------------------------------------------------------- requests


def test_a_request_is_made_by_keyword_by_a_mapping_and_by_bytes() -> None:
    members = json.loads(BODY)
    for request in (
        ChatCompletionRequest(**members),
        ChatCompletionRequest.model_validate(members),
        ChatCompletionRequest.model_validate(ChatCompletionRequest(**members)),
        ChatCompletionRequest.model_validate_json(BODY),
        ChatCompletionRequest.from_bytes(BODY),
    ):
        assert request.messages[0]["content"] == "café"
        assert request.stream is True
        assert request == ChatCompletionRequest(**members)
        assert request != CompletionRequest(**members)


def test_an_absent_member_is_its_default_and_another_is_an_attribute_error() -> None:
    request = ChatCompletionRequest(messages=[])
    assert (request.stream, request.n, request.temperature, request.model) == (False, 1, None, None)
    assert not hasattr(request, "no_such_member")
    with pytest.raises(AttributeError, match="ChatCompletionRequest has no member no_such_member"):
        _ = request.no_such_member
    request.no_such_member = 5
    assert request.no_such_member == 5


def test_a_required_member_that_is_absent_is_the_clients_error() -> None:
    with pytest.raises(MissingMember) as caught:
        _ = ChatCompletionRequest.from_bytes(b"{}").messages
    answer = ErrorResponse.to(caught.value)
    assert (answer.status, answer.error.param, answer.error.code) == (400, "messages", "missing_required_parameter")
    assert getattr(ChatCompletionRequest(), "messages", None) is None
    assert not hasattr(EmbeddingRequest(), "input"), "it may have messages in its place"
    with pytest.raises(MissingMember):
        _ = EmbeddingCompletionRequest().input


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the request's body is not JSON"),
        (b"{", "the request's body is not JSON"),
        (b"\xff\xfe", "the request's body is not JSON"),
        (b'{"messages": NaN}', "NaN is not a JSON number"),
        (b"[]", "expected a JSON object, found an array"),
        (b"[" * 100_000, "the request's body is not JSON"),
    ],
    ids=["empty", "cut", "bytes", "nan", "array", "deep"],
)
def test_a_body_that_is_no_json_object_is_the_clients_error_each_time(data: bytes, message: str) -> None:
    request = ChatCompletionRequest.from_bytes(data, model="qwen")
    for _ in range(2):
        with pytest.raises(LLMRequestError, match=message):
            _ = request.messages
    with pytest.raises(LLMRequestError, match=message):
        request.to_bytes()


def test_a_users_class_adds_members() -> None:
    class Mine(ChatCompletionRequest):
        customer: str = "nobody"

    assert Mine(messages=[]).customer == "nobody"
    assert Mine.from_bytes(b'{"customer": "me"}').customer == "me"
    assert Mine(messages=[]).path == "/v1/chat/completions"


# -------------------------------------------------------------------------------------------------------------- answers


def test_members_within_an_answer_have_attributes() -> None:
    for answer in (ChatCompletionResponse(**ANSWER), ChatCompletionResponse.from_bytes(json.dumps(ANSWER).encode())):
        for each in (answer, travelled(answer), copy.deepcopy(answer)):
            choice = each.choices[0]
            assert choice.message.content == choice["message"]["content"] == "Paris"
            assert choice.message.tool_calls is None
            assert each.usage.prompt_tokens_details.cached_tokens == 4
            with pytest.raises(AttributeError, match="no member nothing among"):
                _ = choice.nothing
        answer.choices[0].message.content = "Rome"
        answer.choices[0].extra = {"a": {"b": 1}}
        assert answer.choices[0].extra.a.b == 1
        assert json.loads(answer.to_bytes())["choices"][0]["message"]["content"] == "Rome"
        assert answer.accounting() == Usage(9, 2, 4, "stop")


def test_an_answer_made_by_keyword_identifies_itself() -> None:
    one, other = (ChatCompletionResponse(model="qwen", choices=[]) for _ in range(2))
    body = json.loads(one.to_bytes())
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["created"] > 0
    assert one.id != other.id
    assert ChatCompletionStreamResponse(choices=[]).object == "chat.completion.chunk"
    assert ChatCompletionResponse(id="mine", choices=[]).id == "mine"
    assert json.loads(TokenizeResponse(count=1, tokens=[5], max_model_len=9).to_bytes()) == {
        "count": 1, "tokens": [5], "max_model_len": 9
    }  # fmt: skip
    assert EmbeddingResponse(data=[], model="m").object == "list"


def test_what_an_answer_used_is_not_looked_up_where_the_engine_said_it() -> None:
    assert ChatCompletionResponse.from_bytes(b"no JSON").counted(Usage(1, 2)).accounting() == Usage(1, 2)


def test_parts_of_pydantics_kind_are_members_as_any_other() -> None:
    from pydantic import BaseModel

    class Message(BaseModel):
        content: str

    answer = ChatCompletionResponse(choices=[{"message": Message(content="Hi")}])
    assert answer.choices[0].message.content == "Hi"
    assert json.loads(answer.to_bytes())["choices"] == [{"message": {"content": "Hi"}}]
    request = ChatCompletionRequest(messages=[Message(content="Hi")])
    assert json.loads(request.to_bytes()) == request.model_dump() == {"messages": [{"content": "Hi"}]}


def test_none_can_be_left_out() -> None:
    request = ChatCompletionRequest(messages=[{"content": None, "role": "user"}], seed=None)
    assert request.model_dump(exclude_none=True) == {"messages": [{"role": "user"}]}
    assert json.loads(request.model_dump_json(exclude_none=True)) == {"messages": [{"role": "user"}]}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ErrorResponse(error=ErrorInfo(message="no", type="NotFoundError", code=404)), 404),
        (ErrorResponse(error={"message": "no", "type": "invalid_request_error", "code": "wrong"}), 400),
        (ErrorResponse(error={"message": "no", "type": "server_error"}), 500),
        (ErrorResponse(error=ErrorInfo(message="no")), 400),
        (ErrorResponse.of(429, "no", kind="rate_limit_error"), 429),
        (ErrorResponse.from_bytes(b'{"error": {"code": 403}}'), 403),
        (ErrorResponse.from_bytes(b"{}").with_status(418), 418),
    ],
)
def test_an_error_has_a_status(error: ErrorResponse, status: int) -> None:
    assert error.status == travelled(error).status == status


# ------------------------------------------------------------------------------------------------- streams, raw answers


@given(st.binary(), st.integers(), st.none() | st.builds(Usage, st.integers()))
def test_events_are_text_with_an_account(data: bytes, tokens: int, usage: Usage | None) -> None:
    events = StreamEvents.from_bytes(data, tokens, usage)
    for each in (events, travelled(events), copy.copy(events)):
        assert each.encode("utf-8", "surrogateescape") == data
        assert (each.tokens, each.usage) == (tokens, usage)
    assert StreamEvents("data: x\n\n") == "data: x\n\n"


def test_a_raw_answer_travels() -> None:
    raw = RawAnswer(b"\x00", "audio/wav")
    assert travelled(raw) == raw


# ----------------------------------------------------------------------------------------------------------- frameworks


def test_pydantic_takes_a_request_as_a_type() -> None:
    from pydantic import TypeAdapter

    adapter: TypeAdapter[ChatCompletionRequest] = TypeAdapter(ChatCompletionRequest)
    assert adapter.validate_python({"messages": []}) == ChatCompletionRequest(messages=[])
    assert adapter.validate_python(ChatCompletionRequest(messages=[])) == ChatCompletionRequest(messages=[])
    assert adapter.dump_python(ChatCompletionRequest(messages=[])) == {"messages": []}
    assert adapter.json_schema()["type"] == "object"
    with pytest.raises(ValueError, match="valid dictionary"):
        adapter.validate_python([])


def test_pydantic_is_not_needed() -> None:
    script = "import sys; sys.modules['pydantic'] = sys.modules['pydantic_core'] = None; import pierhead.llm.objects"
    subprocess.run([sys.executable, "-c", script], check=True)
