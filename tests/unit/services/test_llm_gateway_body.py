"""What the gateway reads of bodies: prompts in every form, forms, and nonsense."""

from __future__ import annotations

import email
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.llm.gateway.body.body import MAX_VALUES, read_body
from pierhead.llm.gateway.body.prompt_text import MAX_CHARACTERS, MAX_PIECES, prompt_text
from pierhead.llm.gateway.errors import ApiError
from pierhead.llm.gateway.models.prefill import decode_overrides
from pierhead.llm.v1.llm_pb2 import LLMRequest

KIND = "application/json"
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
        ({"query": "who", "documents": ["a", {"text": "bc"}, {"content": [{"type": "text", "text": "d"}]}]},
         "who\na\nbc\nd\n", 11),
        ({"text_1": "a", "text_2": ["b", "c"]}, "a\nb\nc\n", 6),
        ({"queries": ["a"], "documents": {"content": [{"type": "image_url"}]}}, "a\n<image_url>\n", 14),
        (chat("\ud800"), "user\n?\n", 7),
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
def test_a_conversation_that_continues_begins_as_before(before: list[Any], more: list[Any]) -> None:
    one, two = prompt_text({"messages": before}), prompt_text({"messages": before + more})
    assert two.beginning.startswith(one.beginning)
    assert two.characters >= one.characters


@given(st.sampled_from(["messages", "prompt", "input"]), JSON)
def test_any_json_is_read_or_refused(name: str, value: object) -> None:
    try:
        asked = read_body(json.dumps({"model": "m", name: value}).encode(), KIND, messages=name == "messages")
    except ApiError as error:
        refused = error.status
    else:
        refused = 400
        LLMRequest(model=asked.model, routing_text=asked.prompt.beginning)
    assert refused == 400


# ---- addresses of images, sound and video

INSIDE = "http://169.254.169.254/latest"
ALLOWED = "https://images.example.com/cat.png"


def image(address: object, **more: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": address}, **more}


def read(body: dict[str, object], *hosts: str) -> str:
    """The member that is refused; "" = none."""
    try:
        read_body(json.dumps({"model": "m", **body}).encode(), KIND, media_hosts=frozenset(hosts))
    except ApiError as error:
        refused = json.loads(error.body)["error"]
        return str(refused["param"]) if (error.status, refused["code"]) == (400, "media_not_allowed") else str(error)
    return ""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat("see", [{"type": "text", "text": "x"}, image(INSIDE)]), "messages[1].content[1].image_url"),
        (chat([{"image_url": INSIDE}]), "messages[0].content[0].image_url"),
        (chat([{"type": "video_url", "video_url": {"url": INSIDE}}]), "messages[0].content[0].video_url"),
        (chat([{"type": "audio_url", "Audio_Url": {"URL": INSIDE}}]), "messages[0].content[0].Audio_Url"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": INSIDE}]}]},
         "input[0].content[0].image_url"),
        ({"input": [{"type": "function_call_output", "output": [{"type": "input_file", "file_url": INSIDE}]}]},
         "input[0].output[0].file_url"),
        (chat([{"type": "image", "source": {"type": "url", "url": INSIDE}}]), "messages[0].content[0].source"),
        (chat([{"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": INSIDE}}]}]),
         "messages[0].content[0].content[0].source"),
        ({"text_1": "a", "text_2": {"content": [image(INSIDE)]}}, "text_2.content[0].image_url"),
        ({"query": "a", "documents": ["b", {"content": [image(INSIDE)]}]}, "documents[1].content[0].image_url"),
        ({"prompt": "a", "images": ["iVBORw0KGgo=", INSIDE]}, "images"),
        ({"prompt": "a", "Images": [{"url": INSIDE}]}, "Images"),
        ({"prompt": "a", "image": INSIDE}, "image"),
        ({"input": "a", "audio": INSIDE}, "audio"),
        ({"input": "a", "ref_audio": INSIDE}, "ref_audio"),
        ({"prompt": "a", "videos": INSIDE}, "videos"),
        ({"input": [{"text": "a", "image": INSIDE}]}, "input[0].image"),
        (chat("see") | {"documents": [{"video": [INSIDE]}]}, "documents[0].video"),
        (chat([{"type": "image", "image": INSIDE}]), "messages[0].content[0].image"),
        ({"messages": [{"role": "user", "Content": [image(INSIDE)]}]}, "messages[0].Content[0].image_url"),
        ({"input": [{"type": "function_call_output", "OUTPUT": [image(INSIDE)]}]}, "input[0].OUTPUT[0].image_url"),
        ({"prompt": "a", "image_url": INSIDE}, "image_url"),
        ({"prompt": "a", "Video_URL": {"url": INSIDE}}, "Video_URL"),
        ({"prompt": "a", "file_url": [INSIDE]}, "file_url"),
        ({"prompt": "a", "images": [["iVBORw0KGgo=", [INSIDE]]]}, "images"),
        ({"prompt": "a", "images": [[{"url": INSIDE}]]}, "images"),
        ({"input": [{"image": {"image_url": INSIDE}}]}, "input[0].image.image_url"),
        ({"input": [{"image": [{"image_url": {"url": INSIDE}}]}]}, "input[0].image.image_url"),
        (chat([{"type": "document", "source": {"type": "content", "content": [{"source": {"url": INSIDE}}]}}]),
         "messages[0].content[0].source.content[0].source"),
    ],
)  # fmt: skip
def test_an_address_of_a_client_is_refused_wherever_it_stands(body: dict[str, object], param: str) -> None:
    assert read(body) == param
    assert read(json.loads(json.dumps(body).replace(INSIDE, "data:image/png;base64,AA=="))) == ""
    assert read(body, "images.example.com") == param
    assert read(json.loads(json.dumps(body).replace(INSIDE, ALLOWED)), "images.example.com") == ""
    assert read(body, "*") == ""


@pytest.mark.parametrize(
    "address",
    [
        "http://images.example.com.evil.net/", "https://evil.net/#images.example.com", "file:///etc/passwd",
        "http://images.example.com@evil.net/", "http://evil.net\\@images.example.com/", "//images.example.com/",
        " https://images.example.com/", "https://images.example.com/\n", "ftp://images.example.com/", "cat.png", "",
    ],
)  # fmt: skip
def test_an_address_that_two_readers_may_read_differently_is_refused(address: str) -> None:
    assert read(chat([image(address)]), "images.example.com") == "messages[0].content[0].image_url"


@pytest.mark.parametrize("address", [ALLOWED, "HTTP://Images.Example.com:8080", "https://images.example.com?size=4#a"])
def test_hosts_that_the_operator_names_are_allowed(address: str) -> None:
    assert read(chat([image(address)]), "images.example.com") == ""


@pytest.mark.parametrize(
    "body",
    [
        chat([{"type": "tool_use", "name": "open", "input": {"image_url": INSIDE, "url": INSIDE}}]),
        chat([{"type": "image_url", "image_url": None, "uuid": "seen before"}, {"type": "text", "text": INSIDE}]),
        chat("hi") | {"tools": [{"type": "function", "function": {"parameters": {"properties": {"image_url": {}}}}}]},
        chat("hi") | {"tools": [{"type": "mcp", "server_url": INSIDE}], "metadata": {"url": INSIDE}},
        chat("hi") | {"metadata": {"image": "registry/app:1.2", "images": [INSIDE], "content": [image(INSIDE)]}},
        chat([{"type": "search_result", "source": INSIDE}]) | {"documents": [{"url": INSIDE, "text": "a"}]},
        chat("hi") | {"audio": {"voice": "alloy", "format": "wav"}, "images": None},
        {"prompt": "a", "images": ["/9j/4AAQSkZJRgABAQ==", "iVBORw0KGgo="], "audio": "UklGR-_iQ"},
    ],
)
def test_what_no_engine_fetches_is_no_address(body: dict[str, object]) -> None:
    assert read(body) == ""


def test_the_refusal_says_what_is_allowed() -> None:
    with pytest.raises(ApiError) as raised:
        read_body(json.dumps(chat([image(INSIDE)])).encode(), KIND, media_hosts=frozenset({"b.net", "a.net"}))
    assert json.loads(raised.value.body)["error"]["message"] == (
        "messages[0].content[0].image_url: expected the content itself as a data: URL, or an address at a.net, b.net, "
        f'found "{INSIDE}"'
    )


# ---- forms

FORM = (
    b'--b-1\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\n'
    b'name="model"\r\n\r\n\x00\xff--b-\r\n--b-1\r\n'
    b'content-disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b-1\r\n'
    b'Content-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n--b-1--\r\n'
)


FORM_TYPE = "multipart/form-data; boundary=b-1"


@pytest.mark.parametrize("content_type", [FORM_TYPE, 'Multipart/Form-Data; boundary="b-1"'])
@pytest.mark.parametrize("stream", [b"true", b"True", b"1", b"on"])
def test_a_forms_fields(content_type: str, stream: bytes) -> None:
    asked = read_body(FORM.replace(b"\r\ntrue\r\n", b"\r\n" + stream + b"\r\n"), content_type)
    assert (asked.model, asked.stream, asked.members) == ("whisper", True, frozenset())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"--b-1", None),
        (FORM[:-80], None),
        (FORM.replace(b'name="stream"', b'name="vllm_xargs"'), "vllm_xargs"),
    ],
    ids=["empty", "cut", "without an end", "with arguments for the engine"],
)
def test_forms_that_are_refused(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as raised:
        read_body(body, FORM_TYPE)
    assert (raised.value.status, json.loads(raised.value.body)["error"]["param"]) == (400, param)


def form(*heads_and_texts: tuple[str, bytes], boundary: bytes = b"b-1") -> bytes:
    parts = [head.encode() + b"\r\n\r\n" + text for head, text in heads_and_texts]
    return b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + boundary + b"--\r\n"


def part(name: str, text: bytes = b"whisper") -> tuple[str, bytes]:
    return f'Content-Disposition: form-data; name="{name}"', text


HEAD = "Content-Disposition: form-data"


@pytest.mark.parametrize(
    "body",
    [
        form(part("model"), part("stream", b"false"), part("model", b"other")),
        form(part("model"), (f"{HEAD}; name=model", b"other")),
        form(part("model"), (f"{HEAD}; name*=utf-8''model", b"other")),
        form(part("model"), (f'{HEAD}; name="a"; name="model"', b"other")),
        form(part("model"), (f'{HEAD}; name="a\\"; name="model"', b"other")),
        form(part("model"), (f'{HEAD}; name="a"\r\n{HEAD}; name="model"', b"other")),
        form(part("model"), (f'{HEAD};\r\n name="model"', b"other")),
        form(part("model"), (f'no header\r\n{HEAD}; name="model"', b"other")),
        form(part("model"), (f'X: y\n{HEAD}; name="model"', b"other")),
        form(part("model"), (f'{HEAD}; name="model"; filename="a"', b"other")),
        form(part("model"), ("X: " + "x" * 2000 + f'\r\n{HEAD}; name="model"', b"other")),
        form(part("model"), *[part(f"p{number}") for number in range(100)], part("model", b"other")),
        form(part("model"), part("file", b'\n--b-1\nContent-Disposition: form-data; name="model"\n\nother')),
        form(part("model"), part("file", b'--b-1\r\nContent-Disposition: form-data; name="model"\r\n\r\nother')),
        form(part("model")) + form(part("model", b"other")),
        b"\r\n" + form(part("model", b"other")),
        form(part("model", b"x" * 5000)),
        form(("", b""), part("model")),
    ],
)
def test_forms_that_two_readers_may_understand_differently(body: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        read_body(body, FORM_TYPE)
    assert (raised.value.status, b'"invalid_form"' in raised.value.body) == (400, True)


PIECES = st.lists(
    st.sampled_from(
        [b"\r\n", b"\n", b"--b-1", b"\r\n--b-1\r\n", b"\r\n\r\n", f'{HEAD}; name="model"'.encode(), b"; name=model",
         b'"', b"\\", b"other", b" ", b"\t", b":", b";", b"--", b"\x00", b"X: y"]
    ),
    min_size=1, max_size=4,
)  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 12), PIECES), min_size=1, max_size=3))
def test_what_is_read_of_a_form_another_reader_reads_as_well(changes: list[tuple[int, int, list[bytes]]]) -> None:
    body = form(part("file", b"\x00\xff"), part("model"), part("language", b"en"))
    for at, gone, pieces in changes:
        body = body[:at] + b"".join(pieces) + body[at + gone :]
    try:
        asked = read_body(body, FORM_TYPE)
    except ApiError:
        return
    message = email.message_from_bytes(f"Content-Type: {FORM_TYPE}\r\n\r\n".encode() + body)
    parts = [each for each in message.walk() if each.get_param("name", header="content-disposition") == "model"]
    found: list[Any] = [each.get_payload(decode=True) for each in parts]
    assert [each.strip() for each in found] == [asked.model.encode()]


@pytest.mark.parametrize(
    ("content_types", "words"),
    [
        ([""], "has no boundary"),
        (["boundary=b-1; x=\udcff", "boundary=é", "boundary=b-1\x00"], "has characters that are not ASCII"),
        (
            ["boundary=b-1; boundary=b", "boundary=b-1; Boundary=b", "boundary=b-1; boundary*=b"],
            "more than one boundary",
        ),
        (["boundary*=utf-8''b-1", "boundary*0=b; boundary*1=-1"], "more than one boundary, or one in parts"),
    ],
)
def test_a_boundary_that_two_readers_may_read_differently(content_types: list[str], words: str) -> None:
    for content_type in content_types:
        with pytest.raises(ApiError, match=words) as raised:
            read_body(FORM, f"multipart/form-data; {content_type}")
        assert raised.value.status == 400


# ---- large bodies


@pytest.mark.parametrize("value", [b"[]", b"{}", b"1", b'""', b'{"role":"user"}'])
def test_a_body_of_a_million_values_is_not_read(value: bytes) -> None:
    """It would take seconds and gigabytes, and every other stream of the gateway would wait as long."""
    for name in (b"messages", b"prompt", b"padding"):
        body = b'{"model": "m", "' + name + b'": [' + b",".join([value] * (MAX_VALUES + 1)) + b"]}"
        started = time.process_time()
        with pytest.raises(ApiError, match="more than the 1048576 values") as raised:
            read_body(body, KIND)
        assert raised.value.status == 413
        assert time.process_time() - started < 0.5, "20 ms where it was measured"


def test_a_prompt_of_a_million_tokens_is_read() -> None:
    body = b'{"model": "m", "prompt": [' + b",".join([b"17"] * 1_000_000) + b"]}"
    assert read_body(body, KIND).prompt.tokens == 1_000_001
    text = json.dumps({"model": "m", "prompt": "so, and so, and " * 250_000}).encode()
    assert read_body(text, KIND).prompt.tokens == 1_000_001


@pytest.mark.parametrize("value", ["", 1, {}, [], {"type": "text"}, {"role": "user", "content": ""}])
def test_a_prompt_in_very_many_pieces_is_counted_by_its_body(value: object) -> None:
    values = [value] * (MAX_PIECES + 1)
    for body in (
        {"messages": values},
        {"prompt": ["", *values]},
        {"messages": [{"content": values}]},
        {"documents": values},
    ):
        assert prompt_text(body, 4_000_000) == (prompt_text(body).beginning, 4_000_000)


@pytest.mark.parametrize(
    ("prompt", "choices"), [("a", 1), (["a"], 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2), ([], 1), (7, 1)]
)
def test_every_prompt_has_answers_of_its_own(prompt: object, choices: int) -> None:
    body = json.dumps({"model": "m", "prompt": prompt, "n": 3}).encode()
    assert read_body(body, KIND).choices == 3 * choices


# ---- prefill


@given(st.dictionaries(st.text(max_size=8).filter(str.isprintable), JSON, min_size=1, max_size=5))
def test_transfer_parameters_pass_unchanged(params: dict[str, object]) -> None:
    answer = json.dumps({"choices": [], "kv_transfer_params": params}).encode()
    assert json.loads(decode_overrides(answer)) == {"kv_transfer_params": params}


@pytest.mark.parametrize("answer", [b"", b"[]", b"\xff", b"<html>", b'{"kv_transfer_params": [1]}'])
def test_no_answer_of_prefill(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expecting|object|decode"):
        decode_overrides(answer)
