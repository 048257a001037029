"""The LLM gateway before fake services that answer as the request says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from google.protobuf.message import DecodeError
from pierhead import Settings, handle
from pierhead.calls.clients import Clients
from pierhead.llm.gateway.body.multipart import form_fields
from pierhead.llm.gateway.keys import TOKENS
from pierhead.llm.gateway.models.cards import ModelCards
from pierhead.llm.gateway.models.model_map import VARIABLE, read_models
from pierhead.llm.v1.llm_pb2 import ModelCard

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import pass_deadlines, until
from tests.unit.services.fake_llm_server import FakeLLMServer, event
from tests.unit.services.gateway_stand import ALL, CHAT, Stand, chat, error_of, with_key


async def test_every_path_is_its_call(gateway: Stand) -> None:
    paths = {
        CHAT: ("Chat", CHAT),
        "/v1/completions": ("Completions", "/v1/completions"),
        "/v1/embeddings": ("Embeddings", "/v1/embeddings"),
        "/v1/score": ("Score", "/v1/score"),
        "/score": ("Score", "/v1/score"),
        "/tokenize": ("Tokenize", "/tokenize"),
        "/v1/detokenize": ("Detokenize", "/detokenize"),
        "/v1/responses": ("PassThrough", "/v1/responses"),
        "/v1/audio/speech": ("PassThrough", "/v1/audio/speech"),
    }
    for path, expected in paths.items():
        status, body, headers = await gateway.post(path, chat())
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert json.loads(body)["rpc"] == expected[0]
        rpc, asked = gateway.qwen.asked[-1]
        assert (rpc, asked.path, asked.model) == (*expected, "qwen")


async def test_the_body_is_passed_on_unchanged(gateway: Stand) -> None:
    body = b'{ "model" : "default",\n "messages":[{"role":"user","content":"h\xc3\xa9"}], "temperature": 1.00 }'
    await gateway.post(CHAT, body, headers={"x-session-id": "s-1", "Content-Type": "application/json"})
    _, asked = gateway.qwen.asked[-1]
    assert asked.body == body
    assert (asked.model, asked.content_type, asked.overrides) == ("qwen", "", "")
    assert asked.routing_text == "user\nhé\n"
    context = gateway.qwen.contexts[-1]
    assert context is not None
    assert context.session_id == "s-1"
    assert context.model_id is None


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
async def test_members_that_are_the_operators_reach_no_engine(gateway: Stand, path: str) -> None:
    """With kv_transfer_params a client would have the GPU's host connect to any address and read other clients' blocks;
    with priority it would overtake them."""
    transfer = {"do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 80}
    wanted = {"kv_transfer_params": transfer, "ec_transfer_params": transfer, "priority": -(2**31)}
    kept = chat(temperature=0.5, prompt="h\u00e9", tools=[{"priority": 1}])
    extra = {"vllm_xargs": {"kv_transfer_params": "x", "ec_transfer_params": "x", "session_id": "s"}}
    assert (await gateway.post(path, kept | wanted | extra | {"Model": "other", "Priority": 1}))[0] == 200
    _, asked = gateway.qwen.asked[-1]
    assert json.loads(asked.body) == kept | {"vllm_xargs": {"session_id": "s"}}
    assert asked.overrides == ""


WHOLE = json.dumps({"rpc": "Embeddings", "text": "".join(FakeLLMServer.words)}).encode()


@pytest.mark.parametrize(
    ("path", "body", "expected", "content_type"),
    [
        (CHAT, chat(stream=True), ALL, "text/event-stream"),
        ("/v1/embeddings", chat(stream=True), WHOLE, "application/json"),
        ("/v1/audio/speech", chat(fake="sound"), b"\x00\x01\x02", "audio/mpeg"),
    ],
    ids=["events", "no events", "sound"],
)
async def test_an_answer_goes_out_byte_for_byte(
    gateway: Stand, path: str, body: object, expected: bytes, content_type: str
) -> None:
    status, answer, headers = await gateway.post(path, body)
    assert (status, answer, headers["Content-Type"]) == (200, expected, content_type)
    assert "x-request-id" in headers


async def test_a_form_is_passed_on_with_the_models_own_name(gateway: Stand) -> None:
    """LLMRequest.model takes the place of a member of JSON; a form has to say it itself."""
    for asked in ("default", "default:support", "qwen"):
        form = aiohttp.FormData()
        form.add_field("file", b"\x00\xff" * 500, filename="a.wav", content_type="audio/wav")
        form.add_field("model", asked)
        async with gateway.client.post(gateway.base + "/v1/audio/transcriptions", data=form) as answer:
            assert answer.status == 200
        rpc, got = gateway.qwen.asked[-1]
        assert (rpc, got.path) == ("PassThrough", "/v1/audio/transcriptions")
        assert got.model == asked.replace("default", "qwen")
        assert form_fields(got.body, got.content_type, ("model",))["model"].text == got.model
        assert b"\x00\xff" * 500 in got.body


@pytest.mark.parametrize(
    "path",
    ["/v1/../sleep", "/v1/%2e%2e/sleep", "/v1/x/%2E%2E%2F..%2Fsleep", "/v1/./x", "/v1//x", "/v1/x/", "/v1/a%3Fb=1",
     "/v1/a%23b", "/v1/a%20b", "/v1/x%00", "/v1/%ff"],
)  # fmt: skip
async def test_no_path_leads_out_of_the_api(gateway: Stand, path: str) -> None:
    """`..` behind an engine that is a web server of its own would be what that has for operators."""
    body = json.dumps(chat()).encode()
    host, port = gateway.base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert error_of(answer.partition(b"\r\n\r\n")[2])["code"] == "not_found"
    assert gateway.qwen.asked == []


async def test_calls_are_routed_by_the_adapter_and_never_by_the_clients_own_header(gateway: Stand) -> None:
    """All calls for a model that no replica holds go to one replica: a client must not choose that for a model."""
    for model, told in (("qwen", None), ("default:support", "support")):
        await gateway.post(CHAT, chat(model=model), headers={"x-multiplexed-model-id": "invented"})
        assert gateway.qwen.asked[-1][1].model == model.replace("default", "qwen")
        context = gateway.qwen.contexts[-1]
        assert context is not None
        assert context.model_id == told


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b"{", None, "invalid_json"),
        (b"[1]", None, "invalid_json"),
        (b"[" * 100_000, None, "invalid_json"),
        ({"messages": []}, "model", "missing_required_parameter"),
        (chat(model=7), "model", "invalid_type"),
        (chat(stream="yes"), "stream", "invalid_type"),
        (chat(messages="hi"), "messages", "invalid_type"),
        (chat(n=0), "n", "invalid_value"),
        (chat(n=2**31), "n", "invalid_value"),
        (chat(model=None), "model", "missing_required_parameter"),
    ],
)
async def test_wrong_bodies_reach_no_engine(gateway: Stand, body: object, param: str | None, code: str) -> None:
    status, answer, _ = await gateway.post(CHAT, body)
    error = error_of(answer)
    assert (status, error["type"], error["param"], error["code"]) == (400, "invalid_request_error", param, code)
    assert gateway.qwen.asked == []


async def test_unknown_models_paths_and_methods(gateway: Stand) -> None:
    for model in ("gpt-4", "", "gpt-4:support", "qwen:\n", "qwen:" + "x" * 200, "\ud800"):
        status, answer, _ = await gateway.post(CHAT, chat(model=model))
        assert (status, error_of(answer)["code"]) == (
            (404, "model_not_found") if model else (400, "missing_required_parameter")
        )
    status, told = await gateway.get("/v2/models")
    assert (status, told["error"]["code"]) == (404, "not_found")
    status, told = await gateway.get(CHAT)
    assert (status, told["error"]["code"]) == (405, "method_not_allowed")
    assert gateway.qwen.asked == []
    assert {labels[0] for labels in gateway.counted()} == {""}, "no series for what clients invent"


async def test_health_version_and_load(gateway: Stand) -> None:
    """As vLLM's."""
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        async with gateway.client.request(method, gateway.base + path) as answer:
            assert (answer.status, await answer.read()) == (200, b"")
    assert await gateway.get("/version") == (200, {"version": version("pierhead")})
    assert await gateway.get("/load") == (200, {"server_load": 0})
    async with asyncio.TaskGroup() as group:
        group.create_task(gateway.post(CHAT, chat(fake="wait")))
        await asyncio.wait_for(gateway.qwen.waiting.wait(), PATIENCE_S)
        assert await gateway.get("/load") == (200, {"server_load": 1})
        gateway.qwen.gate.set()
    assert await gateway.get("/load") == (200, {"server_load": 0})


async def test_a_refused_body_frees_its_room(stand: Stand) -> None:
    stand.settings = replace(stand.settings, max_body_bytes=8192, max_bodies_bytes=8192)
    await stand.start()

    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 1000

    padding = {"padding": "x" * 5000}
    refused: list[tuple[object, int, str]] = [
        (b"{" + b" " * 5000, 400, "invalid_json"),
        (chat(model="gpt-4", **padding), 404, "model_not_found"),
        (b" " * 9000, 413, "payload_too_large"),
        (in_pieces(), 413, "payload_too_large"),
        (chat(fake="refuse", **padding), 400, "too_long"),
    ]
    for body, status, code in refused:
        found, answer, _ = await stand.post(CHAT, body)
        assert (found, error_of(answer)["code"]) == (status, code)
        assert stand.metrics.bodies.read() == 0
    assert (await stand.post(CHAT, chat(**padding)))[0] == 200


async def test_the_bodies_of_all_requests_are_bounded_until_their_answers_begin(stand: Stand) -> None:
    stand.settings = replace(stand.settings, max_body_bytes=8192, max_bodies_bytes=8192)
    await stand.start(backpressure_status_code=503)
    large = chat(padding="x" * 5000)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(stand.post(CHAT, large | {"fake": "wait"}))
        await stand.qwen.waiting.wait()
        status, body, headers = await stand.post(CHAT, large)
        assert (await stand.post(CHAT, chat()))[0] == 200, "there is room for a short one"
        stand.qwen.gate.set()
    error = error_of(body)
    assert (status, error["type"], error["code"], headers["Retry-After"]) == (503, "server_error", "backpressure", "1")
    assert error["message"] == (
        "the bodies of all requests that wait for an answer have the 8192 bytes that this gateway keeps for them; "
        "ask again in a moment"
    )
    assert first.result()[0] == 200
    stand.qwen.gate.clear()
    async with stand.client.post(stand.base + CHAT, json=large | {"stream": True, "fake": "wait"}) as streamed:
        await streamed.content.readany()
        assert (await stand.post(CHAT, large))[0] == 200, "the answer of the stream has begun"
        stand.qwen.gate.set()
        assert (await streamed.content.read()).endswith(b"data: [DONE]\n\n")
    assert stand.metrics.bodies.read() == 0


async def test_a_body_that_is_not_what_its_encoding_says(gateway: Stand) -> None:
    status, answer, _ = await gateway.post(CHAT, b"no gzip", headers={"Content-Encoding": "gzip"})
    error = error_of(answer)
    assert (status, error["code"]) == (400, "invalid_body")
    assert error["message"] == "the request body cannot be read: Can not decode content-encoding: gzip"
    assert gateway.qwen.asked == []


async def test_errors_of_engine_and_runtime(stand: Stand) -> None:
    Clients.use(Settings(max_queued_requests=0))  # a call without a replica is refused at once
    await stand.start(backpressure_status_code=429)
    expected = {
        "refuse": (400, "too_long"),
        "raise": (500, "internal"),
        "full": (429, "backpressure"),
        "nothing": (503, "unavailable"),
    }
    for fake, (status, code) in expected.items():
        told, body, headers = await stand.post(CHAT, chat(fake=fake))
        assert (told, error_of(body)["code"]) == (status, code)
        assert ("Retry-After" in headers) == (code in ("backpressure", "unavailable"))
    assert stand.metrics.tokens.values == {}, "what was refused has used nothing"
    status, body, headers = await stand.post(CHAT, chat(model="away"))
    assert (status, error_of(body)["code"], headers["Retry-After"]) == (503, "no_replica", "1")
    status, body, _ = await stand.post(CHAT, chat(fake="wait"), headers={"x-request-timeout-seconds": "0.2"})
    assert (status, error_of(body)["code"]) == (504, "deadline_exceeded")
    status, body, _ = await stand.post(CHAT, chat(), headers={"x-request-timeout-seconds": "soon"})
    assert (status, error_of(body)["code"]) == (400, "bad_request")
    assert stand.counted()[("qwen", "llm-qwen", "", "429", "")] == 1


@pytest.mark.parametrize(("fake", "code"), [("raise", "internal"), ("wait", "deadline_exceeded")])
async def test_a_stream_that_fails_ends_with_an_error(gateway: Stand, fake: str, code: str) -> None:
    begun = event("The") + event(" capital")
    async with gateway.client.post(gateway.base + CHAT, json=chat(stream=True, fake=fake)) as answer:
        assert (answer.status, await answer.content.readexactly(len(begun))) == (200, begun)
        if fake == "wait":
            pass_deadlines(100.0)
        body = await answer.content.read()
    assert body.startswith(b"data: ")
    assert body.endswith(b"\n\n")
    assert error_of(body.removeprefix(b"data: "))["code"] == code
    assert b"[DONE]" not in body
    told = {"raise": "500", "wait": "504"}[fake]
    assert gateway.counted() == {("qwen", "llm-qwen", "", told, ""): 1}
    # "user\n" and thirty characters more and "\n" make nine tokens, by estimate.
    assert gateway.metrics.tokens.values == {
        ("qwen", "llm-qwen", "prompt", ""): 9, ("qwen", "llm-qwen", "completion", ""): 2,
    }  # fmt: skip


async def test_a_stream_that_its_client_leaves_is_cancelled_and_accounted(gateway: Stand) -> None:
    """The engine counts at the end, which a client could avoid by leaving just before it."""
    async with gateway.client.post(gateway.base + CHAT, json=chat(stream=True, fake="wait")) as answer:
        await asyncio.wait_for(answer.content.readexactly(len(event("The"))), PATIENCE_S)
    await asyncio.wait_for(gateway.qwen.cancelled.wait(), PATIENCE_S)
    await until(lambda: bool(gateway.counted()), "it is counted")
    assert gateway.counted() == {("qwen", "llm-qwen", "", "499", ""): 1}
    assert gateway.metrics.tokens.values == {
        ("qwen", "llm-qwen", "prompt", ""): 9, ("qwen", "llm-qwen", "completion", ""): 2,
    }  # fmt: skip


async def knows_adapters(stand: Stand) -> bool:
    return "qwen:support" in await stand.models()


async def test_models(stand: Stand) -> None:
    await stand.start()
    await until(lambda: knows_adapters(stand), "the service has said which adapters it has")
    assert await stand.models() == ["qwen", "qwen:support", "default", "big", "away"]
    status, told = await stand.get("/v1/models/default")
    assert (status, told["root"], told["max_model_len"], told["created"]) == (200, "qwen", 4096, 1_700_000_000)
    assert (await stand.get("/v1/models/qwen:support"))[1]["parent"] == "qwen"
    status, told = await stand.get("/v1/models/qwen:other")
    assert (status, told["error"]["code"]) == (404, "model_not_found")
    stand.qwen.unavailable = "it says nothing any more"
    async with asyncio.timeout(PATIENCE_S):  # what a service said ten minutes ago is not known any more
        while "qwen:support" in await stand.models():
            stand.now += 601


async def test_a_service_that_answers_nonsense_keeps_no_other_from_being_asked(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nonsense(_: object) -> None:
        raise DecodeError("as protobuf has it")

    def make(stub: Any, service: str, **options: Any) -> Any:
        return SimpleNamespace(Describe=nonsense) if service == "llm-big" else handle(stub, service, **options)

    monkeypatch.setattr("pierhead.llm.gateway.models.cards.handle", make)
    cards = ModelCards(("llm-big", "llm-qwen"), 0.01, lambda: stand.now)
    keeping = asyncio.create_task(cards.refresh())
    await until(lambda: cards.card("llm-qwen") is not None, "the other has answered")
    stand.qwen.card.adapters.append("another")
    await until(lambda: "another" in (cards.card("llm-qwen") or ModelCard()).adapters, "it is asked again")
    assert cards.card("llm-big") is None
    keeping.cancel()
    await asyncio.wait([keeping])


# ---- keys


async def test_a_key_has_the_models_of_its_scope(gateway: Stand) -> None:
    scope = {"headers": with_key("a", "default,qwen:*")}
    assert (await gateway.post(CHAT, chat(), headers=with_key("b")))[0] == 200
    assert (await gateway.post(CHAT, chat(model="default"), **scope))[0] == 200
    assert (await gateway.post(CHAT, chat(model="qwen:support"), **scope))[0] == 200
    status, body, _ = await gateway.post(CHAT, chat(), **scope)
    assert (status, error_of(body)["code"]) == (403, "model_not_allowed")
    await until(lambda: knows_adapters(gateway), "the service has said which adapters it has")
    assert await gateway.models(**scope) == ["qwen:support", "default"]
    assert (await gateway.get("/v1/models/big", **scope))[0] == 404
    assert gateway.counted()[("qwen", "llm-qwen", "b", "200", "stop")] == 1
    assert gateway.metrics.tokens.values[("qwen", "llm-qwen", "prompt", "b")] == 7


async def charge_of(gateway: Stand, path: str = CHAT, key: str = "a", **more: Any) -> str | None:
    """The charge at the head of an answer, which has ended and is counted."""
    before = sum(gateway.counted().values())
    _, _, headers = await gateway.post(path, chat(**more), headers=with_key(key))
    await until(lambda: sum(gateway.counted().values()) == before + 1, "it is counted")
    charge: str | None = headers.get(TOKENS)
    return charge


async def test_a_whole_answer_is_charged_by_what_was_used(gateway: Stand) -> None:
    assert await charge_of(gateway, max_tokens=100) == "12"
    assert await charge_of(gateway, "/v1/embeddings") == "12"
    assert await charge_of(gateway, fake="refuse") == "0", "what the engine refuses costs nothing"


@pytest.mark.parametrize(
    ("path", "charge"),
    [
        (CHAT, "9"),
        ("/v1/embeddings", "9"),
        ("/classify", "9"),
        ("/v1/audio/speech", "9"),
        ("/invocations", "9"),
        ("/tokenize", "0"),
        ("/v1/detokenize", "0"),
        ("/v1/messages/count_tokens", "0"),
    ],
)
async def test_a_prompt_that_the_engine_does_not_count_is_charged_where_paths_cost_tokens(
    gateway: Stand, path: str, charge: str
) -> None:
    assert await charge_of(gateway, path, fake="uncounted") == charge
    assert await charge_of(gateway, path, fake="refuse") == "0"


async def test_a_stream_is_charged_with_the_next_answer_of_its_key(gateway: Stand) -> None:
    assert await charge_of(gateway, stream=True, max_tokens=10**9) == "0"
    assert [await charge_of(gateway, key="b"), await charge_of(gateway), await charge_of(gateway)] == ["12", "24", "12"]
    assert await charge_of(gateway, "/v1/audio/speech", fake="sound") == "0"
    assert await charge_of(gateway, stream=True) == "9", "what no engine counts is estimated by its prompt"


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"fake": "refuse"}])
async def test_without_a_key_nothing_is_charged(gateway: Stand, more: dict[str, Any]) -> None:
    _, _, headers = await gateway.post(CHAT, chat(**more))
    assert TOKENS not in headers


async def test_what_no_model_has_answered_is_charged_nothing(stand: Stand) -> None:
    Clients.use(Settings(max_queued_requests=0))  # a call without a replica is refused at once
    await stand.start()
    refused: list[tuple[object, int]] = [
        (b"{", 400), (chat(model="big"), 403), (chat(model="qwen9"), 404), (chat(model="away"), 503),
        (chat(fake="full"), 503), (chat(fake="raise"), 500),
    ]  # fmt: skip
    for body, status in refused:
        found, _, headers = await stand.post(CHAT, body, headers=with_key("a", "qwen*,away"))
        assert (found, TOKENS in headers) == (status, False)
    assert await charge_of(stand) == "12"


async def test_a_prompt_that_its_client_gives_up_is_charged_with_the_next_answer(gateway: Stand) -> None:
    """The engine has read it, and may have made the whole answer but for its end."""
    messages = [{"role": "user", "content": "x" * 4000}]
    asked = chat(fake="wait", max_tokens=3000, messages=messages)
    one = asyncio.create_task(gateway.post(CHAT, asked, headers=with_key("a")))
    await asyncio.wait_for(gateway.qwen.waiting.wait(), PATIENCE_S)
    one.cancel()
    await until(lambda: bool(gateway.counted()), "it is counted")
    assert await charge_of(gateway) == str(1002 + 12)


# ---- prefill and decode apart

TRANSFER = {"do_remote_prefill": True, "remote_block_ids": [1, 2**70], "remote_host": "10.0.0.1", "new_one": {"a": 1.5}}
ASK = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


async def test_prefill_first(gateway: Stand) -> None:
    gateway.prefill.transfer = TRANSFER
    asked = chat(model="big", stream=True, stream_options={"include_usage": True}, max_completion_tokens=9)
    injected = {"kv_transfer_params": {"remote_host": "169.254.169.254"}}
    assert (await gateway.post(CHAT, asked | injected))[1] == ALL
    [(_, first)], [(_, second)] = gateway.prefill.asked, gateway.big.asked
    assert first.body == second.body == json.dumps(asked).encode()
    assert json.loads(first.overrides) == {
        "max_tokens": 1, "max_completion_tokens": 1, "stream": False, "stream_options": None, "kv_transfer_params": ASK,
    }  # fmt: skip
    assert json.loads(second.overrides) == {"kv_transfer_params": TRANSFER}
    assert gateway.metrics.prefill.values == {("big", "llm-big", "done"): 1}


async def test_requests_without_a_transfer(gateway: Stand) -> None:
    """What prefill hands over is the state of one sequence: several choices or prompts are decode's alone."""
    assert (await gateway.post(CHAT, chat(model="big")))[0] == 200
    await gateway.post("/v1/embeddings", chat(model="big"))
    await gateway.post(CHAT, chat(model="big", n=2))
    await gateway.post("/v1/completions", {"model": "big", "prompt": ["a", "b"]})
    assert [len(gateway.prefill.asked), len(gateway.big.asked)] == [1, 4]
    assert {asked.overrides for _, asked in gateway.big.asked} == {""}
    assert gateway.metrics.prefill.values == {
        ("big", "llm-big", "nothing_to_hand_over"): 1, ("big", "llm-big", "several_choices"): 2,
    }  # fmt: skip


async def test_a_client_that_leaves_while_the_prompt_is_read(gateway: Stand) -> None:
    one = asyncio.create_task(gateway.post(CHAT, chat(model="big", fake="wait", stream=True)))
    await asyncio.wait_for(gateway.prefill.waiting.wait(), PATIENCE_S)
    one.cancel()
    await asyncio.wait_for(gateway.prefill.cancelled.wait(), PATIENCE_S)
    await until(lambda: ("big", "llm-big", "", "499", "") in gateway.counted(), "it is counted as left")
    assert gateway.big.asked == []


async def test_an_error_of_prefill_reaches_the_client(gateway: Stand) -> None:
    status, body, _ = await gateway.post(CHAT, chat(model="big", fake="refuse"))
    assert (status, error_of(body)["code"]) == (400, "too_long")
    assert (await gateway.post(CHAT, chat(model="big", fake="raise")))[0] == 500
    assert gateway.big.asked == []
    assert gateway.metrics.prefill.values == {("big", "llm-big", "error"): 2}


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize(("prefill", "outcome"), [("llm-prefill", "unavailable"), ("llm-away", "no_replica")])
async def test_without_prefill_decode_does_the_whole_or_it_is_an_error(
    stand: Stand, fallback: bool, prefill: str, outcome: str
) -> None:
    Clients.use(Settings(max_queued_requests=0))  # a call without a replica is refused at once
    models = read_models({VARIABLE: json.dumps({"big": {"service": "llm-big", "prefill": prefill}})})
    stand.settings = replace(stand.settings, models=models, prefill_fallback=fallback)
    stand.prefill.unavailable = "the engine sleeps"
    await stand.start()
    status, body, _ = await stand.post(CHAT, chat(model="big", stream=True))
    assert (status, body == ALL) == ((200, True) if fallback else (503, False))
    assert [asked.overrides for _, asked in stand.big.asked] == ([""] if fallback else [])
    assert stand.metrics.prefill.values == {("big", "llm-big", outcome if fallback else "error"): 1}


# ---- metrics


async def test_a_streams_trace_has_what_the_engine_did(gateway: Stand) -> None:
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    body = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    assert (await gateway.post(CHAT, body, headers={"traceparent": traceparent}))[0] == 200
    (server,) = gateway.cluster.running
    traces = server.edge.traces
    assert traces is not None
    await until(lambda: b"prefill" in traces.page(), "its trace is kept")
    (kept,) = json.loads(traces.page())["traces"]
    assert [(span["kind"], span["name"]) for span in kept["spans"]] == [
        ("client", "pierhead.llm.v1.LLMServer/Chat"), ("engine", "prefill"), ("engine", "decode"),
    ]  # fmt: skip
    call, prefill, decode = kept["spans"]
    assert call["began"] <= decode["began"] == pytest.approx(prefill["began"] + prefill["seconds"], abs=0.001)
    assert decode["attributes"]["tokens"] == len(FakeLLMServer.words)
    assert kept["trace"] == "a" * 32


async def test_metrics_of_a_stream_and_of_an_adapter_that_clients_invent(gateway: Stand) -> None:
    await gateway.post(CHAT, chat(model="default:support", stream=True))
    await gateway.post(CHAT, chat(model="qwen:invented", fake="refuse"))
    labels = ("qwen:support", "llm-qwen")
    assert gateway.counted() == {(*labels, "", "200", "stop"): 1, ("qwen", "llm-qwen", "", "400", ""): 1}
    assert gateway.metrics.tokens.values == {
        (*labels, "prompt", ""): 7, (*labels, "completion", ""): 5, (*labels, "cached", ""): 3,
    }  # fmt: skip
    found = [sample for metric in gateway.metrics.collect() for sample in metric.samples]
    samples = {sample.name: sample.value for sample in found if sample.labels.get("model") == "qwen:support"}
    for name in ("time_to_first_token", "time_per_output_token", "request"):
        assert samples[f"pierhead_llm_{name}_seconds_count"] == 1
        assert 0 <= samples[f"pierhead_llm_{name}_seconds_sum"] < 5
