"""The mock engine's answer to a request: made as a whole when the request is read, written as OpenAI's JSON at once
or token by token. Pure.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pierhead.llm.mock import text
from pierhead.llm.mock.arguments import MockArguments
from pierhead.llm.objects import Usage
from pierhead.llm.openai_error import shown
from pierhead.llm.server import bodies
from pierhead.llm.server.errors import LLMRequestError
from pierhead.request import new_request_id
from pydantic import BaseModel, ConfigDict, Field, ValidationError

_MARK, _MARKED = "\x00", "\\u0000"
"""Stands where the token goes while a choice's event is made once for all of its tokens; and what JSON makes of it."""


@dataclass(slots=True)
class Choice:
    """One continuation of a prompt."""

    prompt: list[str]
    tokens: list[str]
    finish: str
    tool: str | None = None
    """The function that it calls; the tokens are then the arguments."""
    sent: int = 0
    """Tokens that were streamed."""


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _MockRequest(BaseModel):
    """What the mock reads of a request in addition to its prompts."""

    model_config = ConfigDict(strict=True)

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class MockAnswer:
    """To one request of chat or completions. Raises LLMRequestError for one that cannot be."""

    def __init__(self, body: bodies.Body, arguments: MockArguments, *, chat: bool) -> None:
        try:
            asked = _MockRequest.model_validate(body)
        except ValidationError as error:
            wrong, *_ = error.errors()
            name = str(wrong["loc"][0])
            message = f"{name}: {wrong['msg']}, found {shown(body[name])}"
            raise LLMRequestError(message, param=name, code="invalid_value") from None
        self._chat = chat
        self.stream = asked.stream or False
        if asked.stream_options is not None and not self.stream:
            raise LLMRequestError("stream_options: expected stream to be true as well", param="stream_options")
        self._include_usage = asked.stream_options is not None and asked.stream_options.include_usage
        self.n = asked.n or 1
        """Choices of each prompt."""
        self.choices = _choices(body, asked, arguments, chat=chat)
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{new_request_id()}"
        self._frame = {"id": self._id, "created": int(time.time()), "model": body["model"]}
        self._templates: list[tuple[str, str, str, list[str]]] = []
        """Of each choice: what stands before, between and behind tokens, and these as JSON; of streams only."""

    def events(self, given: Iterable[int]) -> tuple[str, int]:
        """The events of the new tokens, and how many these are. `given`: how many tokens each choice has now."""
        if not self._templates:
            self._templates = [self._template(number, choice) for number, choice in enumerate(self.choices)]
        data, count = "", 0
        for number, (choice, end) in enumerate(zip(self.choices, given, strict=True)):
            if end == choice.sent:
                continue
            if self._chat and not choice.sent:
                data += self._event(number, {"delta": self._message(number, "")})
            before, between, behind, tokens = self._templates[number]
            data += before + between.join(tokens[choice.sent : end]) + behind
            count += end - choice.sent
            choice.sent = end
            if end == len(choice.tokens):
                data += self._event(number, {"delta": {}} if self._chat else {"text": ""}, choice.finish)
        return data, count

    def end(self, usage: Usage) -> str:
        """The end of a stream."""
        last = self._line({"choices": [], "usage": _usage(usage)}) if self._include_usage else ""
        return last + "data: [DONE]\n\n"

    def whole(self, usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = []
        for number, choice in enumerate(self.choices):
            said = "".join(choice.tokens)
            content = {"message": self._message(number, said)} if self._chat else {"text": said}
            choices.append(_choice(number, content, choice.finish))
        kind = "chat.completion" if self._chat else "text_completion"
        return self._frame | {"object": kind, "choices": choices, "usage": _usage(usage)}

    def _message(self, number: int, said: str) -> dict[str, Any]:
        """A whole message, or with "" the first part of a streamed one."""
        tool = self.choices[number].tool
        if tool is None:
            return {"role": "assistant", "content": said, "refusal": None}
        call = {"index": 0, "id": f"call_{self._id.rpartition('-')[2]}{number}", "type": "function"}
        calls = [call | {"function": {"name": tool, "arguments": said}}]
        return {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}

    def _template(self, number: int, choice: Choice) -> tuple[str, str, str, list[str]]:
        delta: dict[str, Any] = {"content": _MARK}
        if choice.tool is not None:
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": _MARK}}]}
        before, _, behind = self._event(number, {"delta": delta} if self._chat else {"text": _MARK}).partition(_MARKED)
        said = "".join(choice.tokens)
        if len(json.dumps(said)) == len(said) + 2:  # most texts need no escape
            return before, behind + before, behind, choice.tokens
        return before, behind + before, behind, [json.dumps(token)[1:-1] for token in choice.tokens]

    def _event(self, number: int, content: dict[str, Any], finish: str | None = None) -> str:
        return self._line({"choices": [_choice(number, content, finish)]})

    def _line(self, members: dict[str, Any]) -> str:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return f"data: {json.dumps(self._frame | {'object': kind} | members)}\n\n"


def check_length(prompt: int, wanted: int, arguments: MockArguments) -> None:
    """Raises LLMRequestError for what does not fit the context."""
    if prompt + wanted > arguments.max_model_len:
        raise LLMRequestError(
            f"This model's maximum context length is {arguments.max_model_len} tokens. However, you requested "
            f"{prompt + wanted} tokens ({prompt} in the prompt, {wanted} in the completion). Please reduce the length "
            "of the prompt or of the completion.",
            code="context_length_exceeded", param="messages",
        )  # fmt: skip


def _choices(body: bodies.Body, asked: _MockRequest, arguments: MockArguments, *, chat: bool) -> list[Choice]:
    prompts = [text.conversation(body)] if chat else text.prompts(body, "prompt")
    limit = (asked.max_completion_tokens if chat else None) or asked.max_tokens
    said = text.content_of(body["messages"][-1]) if chat else str(body["prompt"])
    scripted = next((each for each in arguments.script if each.when in said), None)
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    choices = []
    for prompt in prompts:
        check_length(len(prompt), limit or 1, arguments)
        most = min(arguments.max_model_len - len(prompt), limit or arguments.max_model_len)
        for number in range(asked.n or 1):
            if scripted is not None:
                tokens, finish = text.cut(scripted.text) or [""], "tool_calls" if scripted.tool else "stop"
            else:
                made = text.answer(prompt, number, limit or arguments.answer_tokens)
                tokens, finish = made, "length" if limit else "stop"
            if len(tokens) > most:
                tokens, finish = tokens[:most], "length"
            if (kept := text.until_stop(tokens, stops)) is not None:
                tokens, finish = kept, "stop"
            choices.append(Choice(prompt, tokens, finish, scripted.tool if scripted is not None else None))
    return choices


def _choice(number: int, content: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": number, **content, "logprobs": None, "finish_reason": finish}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
