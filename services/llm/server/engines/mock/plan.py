"""Plans the mock engine's whole answer as soon as the request is read. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.llm.server import bodies
from services.llm.server.engines.mock import text
from services.llm.server.engines.mock.arguments import MockArguments, Scripted
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
    prefills_for_another: bool = False
    """kv_transfer_params.do_remote_decode: another replica goes on with what was read."""
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
    return _plan(body, True, [text.conversation(body)], ("max_completion_tokens", "max_tokens"), arguments)


def plan_completions(body: bodies.Body, arguments: MockArguments) -> Plan:
    """Raises LLMRequestError."""
    return _plan(body, False, text.prompts(body, "prompt"), ("max_tokens",), arguments)


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
    body: bodies.Body, chat: bool, prompts: list[list[bytes]], limits: tuple[str, ...], arguments: MockArguments
) -> Plan:
    _check_sampling(body)
    stream = bodies.boolean(body, "stream")
    if body.get("stream_options") is not None and not stream:
        raise LLMRequestError("stream_options: expected stream to be true as well", param="stream_options")
    transfer = bodies.mapping(body, "kv_transfer_params")
    return Plan(
        chat=chat,
        model=str(body["model"]),
        prompts=prompts,
        answers=_answers(body, prompts, limits, arguments),
        stream=stream,
        include_usage=bodies.boolean(bodies.mapping(body, "stream_options"), "include_usage"),
        prefills_for_another=bodies.boolean(transfer, "do_remote_decode"),
        read_by_another=bodies.boolean(transfer, "do_remote_prefill"),
    )


def _check_sampling(body: bodies.Body) -> None:
    bodies.number(body, "temperature", 0, 2)
    bodies.number(body, "top_p", 0, 1)
    bodies.number(body, "presence_penalty", -2, 2)
    bodies.number(body, "frequency_penalty", -2, 2)
    bodies.integer(body, "top_logprobs", None, 0, 20)
    bodies.integer(body, "seed", None, -(1 << 63), (1 << 63) - 1)


def _answers(
    body: bodies.Body, prompts: list[list[bytes]], names: tuple[str, ...], arguments: MockArguments
) -> list[Answer]:
    limits = [bodies.integer(body, name, None, 1) for name in names]
    limit = next((each for each in limits if each is not None), None)
    stops = bodies.strings(body, "stop")
    count = bodies.integer(body, "n", 1, 1, MOST_CHOICES) or 1
    said = text.last_text(body)
    scripted = next((each for each in arguments.script if each.when in said), None)
    found = []
    for place, prompt in enumerate(prompts):
        check_length(len(prompt), limit or 1, arguments)
        for number in range(count):
            made = _scripted(scripted) if scripted is not None else _made_up(prompt, number, limit, arguments)
            pieces, finish = made
            most = min(arguments.max_model_len - len(prompt), limit or len(pieces))
            if len(pieces) > most:
                pieces, finish = pieces[:most], "length"
            if stops:
                pieces, stopped = text.until_stop(pieces, stops)
                finish = "stop" if stopped else finish
            found.append(Answer(place, pieces, finish, scripted.tool if scripted is not None else None))
    return found


def _scripted(scripted: Scripted) -> tuple[list[str], str]:
    return text.pieces(scripted.text), "stop" if scripted.tool is None else "tool_calls"


def _made_up(prompt: list[bytes], number: int, limit: int | None, arguments: MockArguments) -> tuple[list[str], str]:
    seed = text.seed_of(prompt, number)
    if limit is not None:
        return text.answer(seed, limit), "length"
    return text.answer(seed, arguments.answer_tokens), "stop"
