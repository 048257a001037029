"""What the mock engine is to answer: all of it is known once the request is read. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from services.llm.server import bodies
from services.llm.server.engines.mock import text as mock_text
from services.llm.server.engines.mock.arguments import MockArguments
from services.llm.server.engines.mock.schema import smallest, smallest_match
from services.llm.server.errors import LLMRequestError

MOST_CHOICES = 128


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice."""

    prompt: int
    """Which of the prompts it continues."""
    pieces: list[str]
    """Its text, token by token."""
    finish: str
    tool: str | None = None
    """The function that it calls; the pieces are then the arguments."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One request of chat or completions."""

    chat: bool
    model: str
    prompts: list[list[bytes]]
    answers: list[Answer]
    stream: bool
    include_usage: bool
    logprobs: int | None
    """None = none; else how many others for each token."""
    prefills_for_another: bool = False
    """kv_transfer_params.do_remote_decode: what was read goes to another replica."""
    read_by_another: bool = False
    """kv_transfer_params.do_remote_prefill."""

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def completion_tokens(self) -> int:
        """Of all choices."""
        return sum(len(answer.pieces) for answer in self.answers)


def plan_chat(body: bodies.Body, arguments: MockArguments) -> Plan:
    """Raises LLMRequestError."""
    prompt = mock_text.conversation(body)
    wants = bodies.boolean(body, "logprobs")
    top = bodies.integer(body, "top_logprobs", 0, 0, 20)
    if top and not wants:
        raise LLMRequestError("top_logprobs: expected logprobs to be true as well", param="top_logprobs")
    given = _given_text(body)
    tool = _tool(body)
    if tool is not None:
        name, named, parameters = tool
        given = json.dumps(smallest(parameters, "tools"))
        answers = [Answer(0, mock_text.pieces(given), "stop" if named else "tool_calls", name)]
        answers *= _count(body)
    else:
        answers = _answers(body, [prompt], given, arguments, ("max_completion_tokens", "max_tokens"))
    return _plan(body, True, [prompt], answers, top if wants else None, arguments)


def plan_completions(body: bodies.Body, arguments: MockArguments) -> Plan:
    """Raises LLMRequestError."""
    prompts = mock_text.prompts(body, "prompt")
    answers = _answers(body, prompts, _given_text(body), arguments, ("max_tokens",))
    return _plan(body, False, prompts, answers, bodies.integer(body, "logprobs", None, 0, 20), arguments)


def check_length(prompt: int, wanted: int, arguments: MockArguments) -> None:
    """Raises LLMRequestError for what does not fit the context."""
    if prompt + wanted > arguments.max_model_len:
        raise LLMRequestError(
            f"This model's maximum context length is {arguments.max_model_len} tokens. However, you requested "
            f"{prompt + wanted} tokens ({prompt} in the prompt, {wanted} in the completion). Please reduce the length "
            "of the prompt or of the completion.",
            code="context_length_exceeded", param="messages",
        )  # fmt: skip


def _plan(
    body: bodies.Body,
    chat: bool,
    prompts: list[list[bytes]],
    answers: list[Answer],
    logprobs: int | None,
    arguments: MockArguments,
) -> Plan:
    _check_sampling(body)
    for answer in answers:
        check_length(len(prompts[answer.prompt]), len(answer.pieces), arguments)
    stream = bodies.boolean(body, "stream")
    if body.get("stream_options") is not None and not stream:
        raise LLMRequestError("stream_options: expected stream to be true as well", param="stream_options")
    transfer = bodies.mapping(body, "kv_transfer_params")
    return Plan(
        chat=chat,
        model=str(body["model"]),
        prompts=prompts,
        answers=answers,
        stream=stream,
        include_usage=bodies.boolean(bodies.mapping(body, "stream_options"), "include_usage"),
        logprobs=logprobs,
        prefills_for_another=bodies.boolean(transfer, "do_remote_decode"),
        read_by_another=bodies.boolean(transfer, "do_remote_prefill"),
    )


def _check_sampling(body: bodies.Body) -> None:
    bodies.number(body, "temperature", 0, 2)
    bodies.number(body, "top_p", 0, 1)
    bodies.number(body, "presence_penalty", -2, 2)
    bodies.number(body, "frequency_penalty", -2, 2)
    bodies.integer(body, "seed", None, -(1 << 63), (1 << 63) - 1)


def _count(body: bodies.Body) -> int:
    return bodies.integer(body, "n", 1, 1, MOST_CHOICES) or 1


def _answers(
    body: bodies.Body,
    prompts: list[list[bytes]],
    given: str | None,
    arguments: MockArguments,
    names: tuple[str, ...],
) -> list[Answer]:
    limits = [bodies.integer(body, name, None, 1) for name in names]
    limit = next((each for each in limits if each is not None), None)
    stops = bodies.strings(body, "stop")
    count = _count(body)
    found = []
    for place, prompt in enumerate(prompts):
        check_length(len(prompt), limit or 1, arguments)
        for number in range(count):
            seed = mock_text.seed_of(prompt, number)
            found.append(_answer(place, len(prompt), seed, given, limit, stops, arguments))
    return found


def _answer(
    place: int,
    prompt: int,
    seed: int,
    given: str | None,
    limit: int | None,
    stops: tuple[str, ...],
    arguments: MockArguments,
) -> Answer:
    room = arguments.max_model_len - prompt
    finish = "stop"
    if given is not None:
        pieces = mock_text.pieces(given)
    elif limit is not None:
        pieces, finish = mock_text.answer(seed, limit), "length"
    else:
        pieces = mock_text.answer(seed, arguments.answer_tokens)
    most = min(room, limit or room)
    if len(pieces) > most:
        pieces, finish = pieces[:most], "length"
    if stops:
        pieces, stopped = mock_text.until_stop(pieces, stops)
        finish = "stop" if stopped else finish
    return Answer(place, pieces, finish)


def _given_text(body: bodies.Body) -> str | None:
    """What a request for structured output gets: the smallest thing of that structure."""
    wanted = bodies.mapping(body, "response_format")
    kind = wanted.get("type")
    if wanted and kind not in ("text", "json_object", "json_schema"):
        raise LLMRequestError(
            f"response_format.type: expected text, json_object or json_schema, found {json.dumps(kind)}",
            param="response_format", code="invalid_value",
        )  # fmt: skip
    if kind == "json_object":
        return "{}"
    if kind == "json_schema":
        schema = bodies.mapping(wanted, "json_schema").get("schema")
        return json.dumps(smallest(schema, "response_format"))
    ours = bodies.mapping(body, "structured_outputs")
    schema, pattern = ours.get("json", body.get("guided_json")), ours.get("regex", body.get("guided_regex"))
    if schema is not None:
        return json.dumps(smallest(schema, "structured_outputs"))
    if pattern is None:
        return None
    if not isinstance(pattern, str):
        raise bodies.wrong("structured_outputs.regex", "a string", pattern)
    return smallest_match(pattern, "structured_outputs")


def _tool(body: bodies.Body) -> tuple[str, bool, object] | None:
    """The function that the answer must call: its name, whether the request names it, the schema of its parameters."""
    functions = _functions(body)
    choice = body.get("tool_choice")
    if choice is None or choice in ("none", "auto"):
        return None
    if choice == "required":
        if not functions:
            raise LLMRequestError("tool_choice: expected tools, when it is required", param="tool_choice")
        name = next(iter(functions))
        return name, False, functions[name]
    function = choice.get("function") if isinstance(choice, dict) else None
    wanted = function.get("name") if isinstance(function, dict) else None
    if not isinstance(wanted, str) or wanted not in functions:
        raise LLMRequestError(
            f"tool_choice: expected none, auto, required or a function of tools, found {json.dumps(choice)}; tools has "
            f"{', '.join(functions) or 'none'}",
            param="tool_choice", code="invalid_value",
        )  # fmt: skip
    return wanted, True, functions[wanted]


def _functions(body: bodies.Body) -> dict[str, Any]:
    tools = body.get("tools")
    if tools is None:
        return {}
    if not isinstance(tools, list):
        raise bodies.wrong("tools", "an array", tools)
    found: dict[str, Any] = {}
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise bodies.wrong(f"tools[{place}]", "an object with a function that has a name", tool)
        found[name] = function.get("parameters") or {"type": "object"}
    return found
