"""What a client sees of the gateway is what it sees of a bare `vllm serve`: one table of requests and answers.
tests/integration/test_llm_conformance.py asks a real one.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from pierhead import Settings, override_handle
from pierhead.calls.clients import Clients
from pierhead.llm.gateway.models.model_map import VARIABLE, read_models

from tests.unit.runtime.harness import until
from tests.unit.services.fake_llm_server import FakeLLMServer
from tests.unit.services.gateway_stand import CHAT, Stand, chat, error_of, with_key

MESSAGES = "/v1/messages"
ASKED: list[Any] = [{"role": "user", "content": "hi"}]
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Row:
    """A request, and what its answer is like."""

    path: str
    body: dict[str, Any] | bytes = field(default_factory=dict)
    status: int = 200
    code: str | None = None
    """Of an error."""
    rpc: str = ""
    """The call that the service got."""
    at: str = ""
    """LLMRequest.path of it."""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    location: str = ""


def passed(path: str, body: dict[str, Any], at: str, rpc: str = "PassThrough") -> Row:
    return Row(path, {"model": "qwen", **body}, rpc=rpc, at=at)


ROWS = {
    "max_tokens as text": Row(CHAT, chat(max_tokens="5"), rpc="Chat", at=CHAT),
    "max_tokens as a float": Row(CHAT, chat(max_tokens=5.0), rpc="Chat", at=CHAT),
    "n as text": Row(CHAT, chat(n=" 2 "), rpc="Chat", at=CHAT),
    "no model": Row(CHAT, {"messages": ASKED}, 400, "missing_required_parameter"),
    "model null": Row(CHAT, chat(model=None), 400, "missing_required_parameter"),
    "model empty": Row(CHAT, chat(model=""), 400, "missing_required_parameter"),
    "a form without a model": Row(
        "/v1/audio/transcriptions",
        b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n',
        400,
        "missing_required_parameter",
        headers={"Content-Type": "multipart/form-data; boundary=b"},
    ),
    "JSON as text": Row(CHAT, chat(), 400, "invalid_content_type", headers={"Content-Type": "text/plain"}),
    "JSON without a type": Row(CHAT, chat(), 400, "invalid_content_type", headers={}),
    "a slash at the end": Row(f"{CHAT}/?a=b", chat(), 307, location=f"{CHAT}?a=b"),
    "a slash behind a plain path": Row("/tokenize/", chat(), 307, location="/tokenize"),
    "a slash behind a list": Row("/v1/models/", status=307, location="/v1/models", method="GET"),
    "a slash behind nothing": Row("/v1/x/", chat(), 404, "not_found"),
    "files": Row("/v1/files", status=404, code="not_found", method="GET"),
    "files of two": Row("/v1/files/f-1/content", status=404, code="not_found", method="GET"),
    "a file sent": Row("/v1/files", b"x", 404, "not_found"),
    "batches": Row("/v1/batches", status=404, code="not_found", method="GET"),
    "a batch sent": Row("/v1/batches", {"input_file_id": "f"}, 404, "not_found"),
    "no such path": Row("/v1/nothing", status=404, code="not_found", method="GET"),
    "a path deleted": Row("/v1/nothing", status=404, code="not_found", method="DELETE"),
    "another method": Row(CHAT, status=405, code="method_not_allowed", method="GET"),
    "another method of what is passed on": Row("/v1/rerank", status=405, code="method_not_allowed", method="GET"),
    "unknown members": Row(CHAT, chat(nonsense={"a": [1]}), rpc="Chat", at=CHAT),
    **{
        path: passed(path, {"query": "a", "documents": ["b"]}, "/v1/rerank")
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    },
    **{
        path: passed(path, {"input": "a"}, f"/{path.rpartition('/')[2]}")
        for path in ("/classify", "/v1/classify", "/pooling", "/v1/pooling")
    },
    "score": passed("/score", {"text_1": "a", "text_2": "b"}, "/v1/score", "Score"),
    "tokens": passed("/v1/tokenize", {"prompt": "a"}, "/tokenize", "Tokenize"),
    "text of tokens": passed("/detokenize", {"tokens": [1]}, "/detokenize", "Detokenize"),
    "invoked with messages": passed("/invocations", {"messages": ASKED}, CHAT, "Chat"),
    "invoked with a prompt": passed("/invocations", {"prompt": "a"}, "/v1/completions", "Completions"),
    "invoked with inputs": passed("/invocations", {"input": "a"}, "/v1/embeddings", "Embeddings"),
    "invoked with texts": passed("/invocations", {"text_1": "a", "text_2": "b"}, "/v1/score", "Score"),
    "invoked with documents": passed("/invocations", {"query": "a", "documents": ["b"]}, "/v1/rerank"),
    "invoked with nothing": Row("/invocations", {"model": "qwen"}, 400, "missing_required_parameter"),
    "Anthropic's": passed(MESSAGES, {"messages": ASKED, "max_tokens": 5}, MESSAGES),
    "Anthropic's count": passed(f"{MESSAGES}/count_tokens", {"messages": ASKED}, f"{MESSAGES}/count_tokens"),
}


async def ask(client: aiohttp.ClientSession, base: str, row: Row) -> tuple[int, bytes, Any]:
    data = row.body if isinstance(row.body, bytes) else json.dumps(row.body).encode()
    sent: dict[str, Any] = {"data": data, "skip_auto_headers": ("Content-Type",)} if row.method == "POST" else {}
    asked = client.request(row.method, base + row.path, headers=row.headers, allow_redirects=False, **sent)
    async with asked as answer:
        return answer.status, await answer.read(), answer.headers


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
async def test_a_request_is_answered_as_by_vllm_itself(gateway: Stand, row: Row) -> None:
    status, body, headers = await ask(gateway.client, gateway.base, row)
    assert (status, headers.get("Location", "")) == (row.status, row.location), body
    if status >= 400:
        assert error_of(body)["code"] == row.code
    assert [(rpc, asked.path) for rpc, asked in gateway.qwen.asked] == ([(row.rpc, row.at)] if row.rpc else [])


async def test_where_one_model_is_served_none_has_to_be_named(stand: Stand) -> None:
    models = read_models({VARIABLE: json.dumps({"qwen": "llm-qwen", "default": {"alias_of": "qwen"}})})
    stand.settings = replace(stand.settings, models=models)
    await stand.start()
    for body in ({"messages": ASKED}, chat(model=None), chat(model="")):
        assert (await stand.post(CHAT, body))[0] == 200
        assert stand.qwen.asked[-1][1].model == "qwen"


async def test_where_several_are_served_the_error_names_those_of_the_key(gateway: Stand) -> None:
    _, body, _ = await gateway.post(CHAT, {"messages": ASKED})
    assert error_of(body)["message"] == (
        "you must provide a model parameter: qwen, big, away; GET /v1/models lists what there is"
    )
    assert (await gateway.post(CHAT, {"messages": ASKED}, headers=with_key("a", "qwen")))[0] == 200
    assert gateway.qwen.asked[-1][1].model == "qwen"


async def test_a_compressed_body_counts_as_what_it_becomes(stand: Stand) -> None:
    stand.settings = replace(stand.settings, max_body_bytes=8192, max_bodies_bytes=8192)
    await stand.start()
    packed = {"Content-Encoding": "gzip"}
    body = json.dumps(chat(padding="x" * 4000)).encode()
    assert (await stand.post(CHAT, gzip.compress(body), headers=packed))[0] == 200
    assert stand.qwen.asked[-1][1].body == body
    bomb = gzip.compress(b" " * 100_000_000)
    assert len(bomb) > 8192
    for data in (bomb, gzip.compress(b" " * 5_000_000)):
        status, answer, _ = await stand.post(CHAT, data, headers=packed)
        assert (status, error_of(answer)["code"]) == (413, "payload_too_large")
    assert stand.metrics.bodies.read() == 0


# ---- Anthropic's API


def anthropic_error(body: bytes) -> tuple[str, str]:
    found = json.loads(body)
    assert (set(found), found["type"], set(found["error"])) == ({"type", "error"}, "error", {"type", "message"})
    return found["error"]["type"], found["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"{", 400, "invalid_request_error"),
        ({"model": "qwen"}, 400, "invalid_request_error"),
        (chat(model="claude-9"), 404, "not_found_error"),
        (chat(fake="refuse"), 400, "invalid_request_error"),
        (chat(fake="raise"), 500, "api_error"),
        (chat(fake="full"), 503, "overloaded_error"),
        (chat(model="away"), 503, "overloaded_error"),
        (b" " * 9000, 413, "request_too_large"),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
async def test_errors_of_its_paths_are_anthropics(
    stand: Stand, path: str, body: object, status: int, kind: str
) -> None:
    Clients.use(Settings(max_queued_requests=0))  # a call without a replica is refused at once
    stand.settings = replace(stand.settings, max_body_bytes=8192)
    await stand.start()
    told, answer, _ = await stand.post(path, body)
    assert (told, anthropic_error(answer)[0]) == (status, kind)


async def test_a_stream_of_messages_ends_with_anthropics_error(gateway: Stand) -> None:
    status, body, _ = await gateway.post(MESSAGES, chat(stream=True, fake="raise"))
    last = body.split(b"\n\n")[-2]
    assert (status, last.partition(b"\n")[0]) == (200, b"event: error")
    assert anthropic_error(last.partition(b"data: ")[2])[0] == "api_error"


async def test_a_model_out_of_the_keys_scope_is_anthropics_error(gateway: Stand) -> None:
    status, body, _ = await gateway.post(MESSAGES, chat(), headers=with_key("a", "big"))
    assert (status, anthropic_error(body)[0]) == (403, "permission_error")


# ---- fallbacks, hosts and paths of models

ROUTES = {
    "qwen": "llm-qwen",
    "default": {"alias_of": "qwen"},
    "big": {"service": "llm-big", "host": "big.example.com", "path": "/big"},
    "away": {"service": "llm-away", "fallback": "qwen"},
    "gone": {"service": "llm-gone", "fallback": "away"},
}


@pytest.fixture
async def routed(stand: Stand) -> Stand:
    Clients.use(Settings(max_queued_requests=0))  # a call without a replica is refused at once
    stand.settings = replace(stand.settings, models=read_models({VARIABLE: json.dumps(ROUTES)}))
    await stand.start()
    return stand


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"fake": "refuse"}, {"fake": "raise"}])
async def test_a_model_without_a_replica_is_answered_for_by_its_fallback(routed: Stand, more: dict[str, Any]) -> None:
    for model in ("away", "away:support"):
        _, _, headers = await routed.post(CHAT, chat(model=model, **more))
        assert headers["x-pierhead-fallback"] == routed.qwen.asked[-1][1].model == "qwen"
    assert {labels[0] for labels in routed.counted()} == {"qwen"}, "it is counted as what has answered"
    _, _, headers = await routed.post(CHAT, chat(**more))
    assert "x-pierhead-fallback" not in headers


async def test_the_model_that_fell_back_is_woken_and_then_answers_itself(stand: Stand) -> None:
    stand.settings = replace(stand.settings, models=read_models({VARIABLE: json.dumps(ROUTES)}))
    await stand.start()
    waiting = Clients.current().pool("llm-away", Clients.current().settings.transport)
    assert (await stand.post(CHAT, chat(model="away")))[0] == 200
    await until(lambda: waiting.waiting == 1, "one call waits for a replica")
    assert (await stand.post(CHAT, chat(model="away")))[0] == 200
    assert waiting.waiting == 1
    with override_handle("llm-away", FakeLLMServer("away")):
        _, _, headers = await stand.post(CHAT, chat(model="away"))
        assert "x-pierhead-fallback" not in headers


async def test_without_a_replica_of_either_the_error_is_that_of_the_model_asked_for(routed: Stand) -> None:
    status, body, headers = await routed.post(CHAT, chat(model="gone"))
    assert (status, error_of(body)["code"], "x-pierhead-fallback" in headers) == (503, "no_replica", False)
    assert "llm-gone" in error_of(body)["message"]


@pytest.mark.parametrize(("prefix", "host"), [("/big", "any"), ("", "big.example.com"), ("", "BIG.example.com:8000")])
async def test_a_host_and_a_path_of_its_own_are_a_server_of_one_model(routed: Stand, prefix: str, host: str) -> None:
    at = {"Host": host}
    for body in (chat(model="big"), {"messages": ASKED}):
        assert (await routed.post(prefix + CHAT, body, headers=at))[0] == 200
        assert routed.big.asked[-1][1].model == "big"
    await routed.post(f"{prefix}/v1/audio/speech", chat(model="big"), headers=at)
    assert routed.big.asked[-1][1].path == "/v1/audio/speech"
    status, answer, _ = await routed.post(prefix + CHAT, chat(), headers=at)
    assert (status, error_of(answer)["code"]) == (404, "model_not_found")
    _, listed = await routed.get(f"{prefix}/v1/models", headers=at)
    assert [card["id"] for card in listed["data"]] == ["big"]
    assert (await routed.get(f"{prefix}/v1/models/qwen", headers=at))[0] == 404
    status, _, headers = await ask(routed.client, routed.base, Row(f"{prefix}{CHAT}/", chat(), headers=JSON | at))
    assert (status, headers["Location"]) == (307, prefix + CHAT)
    for path in ("/v1/nothing", "/v1/files"):
        assert (await routed.get(prefix + path, headers=at))[0] == 404


async def test_a_stored_response_is_asked_for_where_one_model_is(routed: Stand) -> None:
    """Its path names no model."""
    for method, end, sent in (("GET", "?stream=true", b""), ("POST", "/cancel", b"{}")):
        path = f"/v1/responses/resp_1{end}"
        assert (await ask(routed.client, routed.base, Row(f"/big{path}", b"", method=method, headers={})))[0] == 200
        (rpc, asked) = routed.big.asked[-1]
        assert (rpc, asked.path, asked.model, asked.body, asked.content_type) == ("PassThrough", path, "big", sent, "")
        status, body, _ = await ask(routed.client, routed.base, Row(path, b"", method=method, headers={}))
        assert (status, error_of(body)["code"]) == (404, "not_found")
    assert routed.qwen.asked == []


async def test_elsewhere_every_model_is_served(routed: Stand) -> None:
    assert (await routed.post(CHAT, chat(model="big"), headers={"Host": "example.com"}))[0] == 200
    assert (await routed.get("/small/v1/models"))[0] == 404
