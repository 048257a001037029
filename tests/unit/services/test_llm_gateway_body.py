"""What the gateway reads of bodies: prompts in every form, forms, and nonsense."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.llm.v1.llm_pb2 import LLMRequest

from services.llm.gateway.errors import ApiError
from services.llm.gateway.multipart import form_fields
from services.llm.gateway.prefill import decode_overrides
from services.llm.gateway.prompt_text import MAX_CHARACTERS, prompt_text
from services.llm.gateway.request_body import read_body

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
PARTS = st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=3000)})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user"]), "content": st.text(max_size=5000) | st.lists(PARTS, max_size=3)}
    ),
    max_size=6,
)


def chat(*contents: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content} for content in contents]}


@pytest.mark.parametrize(
    ("body", "beginning", "characters"),
    [
        ({}, "", 0),
        (chat("hi", "there"), "user\nhi\nuser\nthere\n", 19),
        (chat([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:..."}}]),
         "user\nsee\n<image_url>\n", 21),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}, 7]}, "assistant\n", 10),
        ({"prompt": "Once"}, "Once\n", 5),
        ({"prompt": ["a", "b"]}, "a\nb\n", 4),
        ({"prompt": [1, 22, 333]}, "1 22 333\n", 13),
        ({"prompt": [[1, 2], [3]]}, "1 2\n3\n", 14),
        ({"input": "embed me"}, "embed me\n", 9),
        ({"instructions": "be kind", "input": [{"role": "user", "content": "hi"}]}, "be kind\nuser\nhi\n", 16),
        ({"prompt": {"not": "known"}}, "", 0),
    ],
)  # fmt: skip
def test_prompts(body: dict[str, object], beginning: str, characters: int) -> None:
    assert prompt_text(body) == (beginning, characters)


@given(MESSAGES)
def test_the_beginning_is_bounded_and_the_whole_is_counted(messages: list[Any]) -> None:
    found = prompt_text({"messages": messages})
    assert len(found.beginning) == min(MAX_CHARACTERS, found.characters)
    LLMRequest(routing_text=found.beginning)


@given(MESSAGES, MESSAGES)
def test_a_conversation_that_goes_on_begins_as_before(before: list[Any], more: list[Any]) -> None:
    one, two = prompt_text({"messages": before}), prompt_text({"messages": before + more})
    assert two.beginning.startswith(one.beginning)
    assert two.characters >= one.characters


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=20_000))
def test_tokens_are_counted_as_tokens(tokens: list[int]) -> None:
    found = prompt_text({"prompt": tokens})
    assert len(found.beginning) <= MAX_CHARACTERS
    assert found.tokens == len(tokens) + 1


@given(st.sampled_from(["messages", "prompt", "input"]), JSON)
def test_any_json_is_read_or_refused(name: str, value: object) -> None:
    try:
        asked = read_body(json.dumps({"model": "m", name: value}).encode(), "", messages=name == "messages")
    except ApiError as error:
        refused = error.status
    else:
        refused = 400
        LLMRequest(model=asked.model, routing_text=asked.prompt.beginning)
    assert refused == 400


@given(st.binary(max_size=200), st.sampled_from(["", "application/json", "multipart/form-data; boundary=x"]))
def test_any_bytes_are_read_or_refused(body: bytes, content_type: str) -> None:
    with pytest.raises(ApiError):
        read_body(b"\x00" + body, content_type)


def test_lone_surrogates_can_be_sent() -> None:
    asked = read_body(b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', "", messages=True)
    assert LLMRequest(routing_text=asked.prompt.beginning).routing_text == "user\n?\n"


def test_the_estimate_counts_every_choice() -> None:
    body = {"model": "m", "prompt": "x" * 39, "max_tokens": 7, "n": 3}
    assert read_body(json.dumps(body).encode(), "").tokens == 10 + 21


# ---- forms

FORM = (
    b'--b-1\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\n'
    b'name="model"\r\n\r\n\x00\xff--b-\r\n--b-1\r\n'
    b'content-disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b-1\r\n'
    b'Content-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n--b-1--\r\n'
)


@pytest.mark.parametrize("content_type", ["multipart/form-data; boundary=b-1", 'Multipart/Form-Data; boundary="b-1"'])
def test_a_forms_fields(content_type: str) -> None:
    asked = read_body(FORM, content_type)
    assert (asked.model, asked.stream, asked.members) == ("whisper", True, frozenset())


@pytest.mark.parametrize("body", [b"", b"--b-1", FORM[:-80], FORM.replace(b'"model"\r\n\r\nw', b'"other"\r\n\r\nw')])
def test_forms_that_are_cut_or_have_no_model(body: bytes) -> None:
    if body == FORM[:-80]:
        assert form_fields(body, "multipart/form-data; boundary=b-1", ("stream",)) == {}
        return
    with pytest.raises(ApiError, match="model"):
        read_body(body, "multipart/form-data; boundary=b-1")


def test_a_form_without_a_boundary() -> None:
    with pytest.raises(ApiError, match="boundary"):
        read_body(FORM, "multipart/form-data")


# ---- prefill


@given(st.dictionaries(st.text(max_size=8).filter(str.isprintable), JSON, min_size=1, max_size=5))
def test_transfer_parameters_pass_unchanged(params: dict[str, object]) -> None:
    answer = json.dumps({"choices": [], "kv_transfer_params": params}).encode()
    assert json.loads(decode_overrides(answer)) == {"kv_transfer_params": params}


@pytest.mark.parametrize("answer", [b"", b"[]", b"\xff", b"<html>"])
def test_no_answer_of_prefill(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expecting|object|decode"):
        decode_overrides(answer)
