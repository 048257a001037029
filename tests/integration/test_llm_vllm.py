"""vLLM itself, on the CPU, with real models, in its own environment: its part of the engines' contract suite, and what
goes the whole way, OpenAI's client -> gateway -> gRPC -> LLM server -> vLLM.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shutil
import subprocess
import sys
import time
import wave
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import openai
import pytest
from pierhead.llm.v1.llm_pb2 import Operation
from PIL import Image

from tests.environments import vllm
from tests.environments.random_models import IMAGE_TOKENS, SOUND_MARKS
from tests.environments.vllm import MODELS
from tests.harness.llm_clients import ask_clients, needs_clients
from tests.harness.stack import ROOT
from tests.harness.vllm_processes import ANSWER_S, PLAIN, make_random_models, vllm_environment
from tests.harness.whole_way import CHAT_ENGINE, Processes, WholeWay, all_ready, whole_way

PAGE = (ROOT / "docs" / "how-to" / "language-models.md").read_text(encoding="utf-8")
START_AND_TESTS_S = 1500
"""vLLM's start alone takes half a minute on two idle cores, and four minutes on busy ones."""


pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(START_AND_TESTS_S + 60),
    pytest.mark.skipif(not vllm.VLLM.is_made(), reason="no vLLM here; python -m tests.environments.vllm makes it"),
]


def test_vllm_is_what_every_engine_is(request: pytest.FixtureRequest) -> None:
    if any("running" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue(
            "starting"
        )  # what the other tests need starts at the same time: a start keeps one core busy
    environment = vllm_environment(PIERHEAD_TEST_LLM_MODEL=f"{MODELS}/smollm2")
    # vLLM's dependencies warn of each other; what the other tests share needs packages that its environment lacks.
    options = ["--noconftest", "--override-ini=filterwarnings=", "-p", "no:cacheprovider", "--timeout=600"]
    command = [vllm.VLLM.python, "-m", "pytest", *options, "-k", "vllm", "tests/contract/test_llm_engines.py"]
    began = time.monotonic()
    run = subprocess.run(
        [*command, "--durations=5"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=START_AND_TESTS_S, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 30, "it ran"
    longest = re.findall(r"^\d+\.\d+s .*", run.stdout, re.MULTILINE)
    print("", *longest, f"{time.monotonic() - began:.0f} s with vLLM's start", sep="\n  ")


# ------------------------------------------------------------------------------------------------------ the whole way

NAMES = {
    "smollm2": "llm",
    "default": {"service": "llm", "alias_of": "smollm2"},
    "minilm": "llm-minilm",
    "vision": "llm-vision",
    "audio": "llm-audio",
}


@pytest.fixture(scope="module")
def starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Processes, WholeWay]]:
    """Gateway and LLM servers, which are not ready yet; one start for all tests."""
    made = tmp_path_factory.mktemp("models")
    make_random_models(made, "vision", "audio")
    engines = {
        "llm": (f"{MODELS}/smollm2", CHAT_ENGINE),
        "llm-minilm": (f"{MODELS}/minilm", PLAIN),
        "llm-vision": (f"{made}/vision", PLAIN),
        "llm-audio": (f"{made}/audio", PLAIN),
    }
    with whole_way(engines, NAMES, tmp_path_factory.mktemp("logs")) as started:
        yield started


@pytest.fixture(scope="module")
def running(starting: tuple[Processes, WholeWay]) -> Iterator[WholeWay]:
    """All of it, ready."""
    with all_ready(*starting) as way:
        yield way


@pytest.fixture
def way(running: WholeWay, request: pytest.FixtureRequest) -> Iterator[WholeWay]:
    """What the processes logged is kept when a test fails."""
    failed = request.session.testsfailed
    yield running
    if request.session.testsfailed > failed:
        shutil.copytree(running.logs, ROOT / "test-evidence" / request.node.name, dirs_exist_ok=True)


def test_what_the_site_shows_prints_what_it_says(way: WholeWay) -> None:
    shown = re.search(r"^import openai\n.*?# (?P<prints>[^\n]+)\n(?=```)", PAGE, re.DOTALL | re.MULTILINE)
    assert shown is not None
    code = shown[0].replace("http://127.0.0.1:8000/v1", str(way.client.base_url))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=ANSWER_S, check=False)
    assert (done.returncode, done.stdout) == (0, shown["prints"]), done.stderr


@needs_clients
def test_other_clients_take_all_of_it(way: WholeWay) -> None:
    ask_clients({"url": f"http://127.0.0.1:{way.lanes['gateway']}", "chat": "smollm2", "embeddings": "minilm"})


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "sure": {"type": "boolean"}},
    "required": ["city", "sure"],
    "additionalProperties": False,
}
LOOK_UP: Any = {
    "type": "function",
    "function": {"name": "look_up", "description": "A city.", "parameters": CITY, "strict": True},
}
"""`strict`: without it vLLM makes sure of the call and not of its arguments, as OpenAI does."""


def is_city(text: str) -> bool:
    """Whether it is JSON of that schema."""
    found = json.loads(text)
    return set(found) == {"city", "sure"} and found["city"] in ("Paris", "Rome") and isinstance(found["sure"], bool)


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "look_up"}}, "required"])
def test_a_tool_that_must_be_called_is(way: WholeWay, choice: Any) -> None:
    asked = {"tools": [LOOK_UP], "tool_choice": choice, "max_tokens": 200}
    answer = way.chat(**asked).choices[0]
    [call] = answer.message.tool_calls
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop"), "as OpenAI has it"
    assert call.function.name == "look_up"
    assert is_city(call.function.arguments)
    said, name = "", ""
    for part in way.chat(**asked, stream=True):
        for delta in (part.choices[0].delta.tool_calls or []) if part.choices else []:
            name += delta.function.name or ""
            said += delta.function.arguments or ""
    assert name == "look_up"
    assert json.loads(said) == json.loads(call.function.arguments)


def test_an_eager_engine_compiles_nothing_while_it_serves(way: WholeWay) -> None:
    told = way.client.completions.create(
        model="smollm2", prompt="Paris is the", echo=True, logprobs=1, max_tokens=4, temperature=0.7
    ).choices[0].logprobs  # fmt: skip
    assert len(told.tokens) == len(told.token_logprobs) == 7
    assert list((way.logs / "compiled").rglob("*.so")) == []


@pytest.mark.parametrize("level", [1, 2])
def test_a_cpu_has_no_sleep_and_says_so(way: WholeWay, level: int) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        way.operate("llm", Operation(sleep=Operation.Sleep(level=level)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "vLLM has no sleep mode on cpu" in str(refused.value.details())
    assert way.chat(max_tokens=1).usage.completion_tokens == 1, "it is awake"


SOUND_TOKENS = 12 + len(SOUND_MARKS)
"""Of half a second: 50 frames of 10 ms, of which four are one, between two marks."""


def picture(colour: str) -> dict[str, Any]:
    """Part of a message: a plain image."""
    file = io.BytesIO()
    Image.new("RGB", (28, 28), colour).save(file, "PNG")
    return image(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def tone(hertz: int) -> dict[str, Any]:
    """Part of a message: half a second of sound."""
    file, rate = io.BytesIO(), 16_000
    samples = array("h", (round(9000 * math.sin(2 * math.pi * hertz * i / rate)) for i in range(rate // 2)))
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples.tobytes())
    return sound(base64.b64encode(file.getvalue()).decode())


def sound(data: str) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


@pytest.mark.parametrize(
    ("model", "one", "other", "tokens", "bad", "words"),
    [
        ("vision", picture("red"), picture("blue"), IMAGE_TOKENS, image("data:image/png;base64,AAAA"), "load image"),
        ("audio", tone(200), tone(900), SOUND_TOKENS, sound("AAAA"), "Invalid or corrupted audio data"),
    ],
)
def test_images_and_sound_in_a_message_reach_the_engine(
    way: WholeWay, model: str, one: Any, other: Any, tokens: int, bad: Any, words: str
) -> None:
    def ask(*parts: Any) -> tuple[int, list[float]]:
        """Tokens of the prompt, and how probable the first tokens of the answer were."""
        asked = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}]
        answer = way.chat(asked, model=model, max_tokens=4, logprobs=True)
        return answer.usage.prompt_tokens, [token.logprob for token in answer.choices[0].logprobs.content]

    alone, _ = ask()
    prompt, probabilities = ask(one)
    assert prompt == alone + tokens
    assert ask(one)[1] == pytest.approx(probabilities, abs=1e-4)
    assert ask(other)[1] != pytest.approx(probabilities, abs=1e-3)
    with pytest.raises(openai.BadRequestError, match=words):
        ask(bad)


def test_an_address_of_an_image_is_not_fetched(way: WholeWay) -> None:
    inside = image(f"http://127.0.0.1:{way.admins['llm-vision']}/readyz")
    with pytest.raises(openai.BadRequestError, match=r"image_url: expected the content itself as a data: URL, found"):
        way.chat([{"role": "user", "content": [inside]}], model="vision")


TEXTS = ["Paris is the capital of France.", "France's capital city is Paris.", "My bicycle has a flat tyre."]


def likeness(one: list[float], other: list[float]) -> float:
    """Cosine of two vectors."""
    return sum(a * b for a, b in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))


@pytest.mark.parametrize("members", [{}, {"encoding_format": "float"}], ids=["base64, as the client asks", "float"])
def test_embeddings(way: WholeWay, members: Any) -> None:
    answer = way.client.embeddings.create(model="minilm", input=TEXTS, **members)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    vectors = [entry.embedding for entry in answer.data]
    assert {len(vector) for vector in vectors} == {384}
    assert likeness(vectors[0], vectors[1]) > 0.8 > 0.3 > likeness(vectors[0], vectors[2])
    assert answer.usage.prompt_tokens > 20
    alone = way.client.embeddings.create(model="minilm", input=TEXTS[0], **members).data[0].embedding
    assert likeness(alone, vectors[0]) > 0.999


def test_score(way: WholeWay) -> None:
    body = {"model": "minilm", "text_1": TEXTS[0], "text_2": TEXTS[1:]}
    answer = way.client.post("/score", body=body, cast_to=object)
    scores = [entry["score"] for entry in answer["data"]]
    assert scores[0] > 0.8 > 0.3 > scores[1]


@pytest.mark.parametrize(
    "ask",
    [
        lambda way: way.chat(model="minilm"),
        lambda way: way.client.embeddings.create(model="smollm2", input=TEXTS),
        lambda way: way.client.embeddings.create(model="minilm", input="far " * 600),
    ],
    ids=["a chat of an embedding model", "embeddings of a chat model", "too long a text"],
)
def test_what_a_model_cannot_is_refused_with_a_reason(way: WholeWay, ask: Callable[[WholeWay], Any]) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refused:
        ask(way)
    print(f"\n  {refused.value}")
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["type"] == "invalid_request_error"
    assert refused.value.body["message"]
