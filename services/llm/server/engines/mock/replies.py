"""Writes the mock engine's answers as OpenAI's JSON. The common parts of a choice's events are written once. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from pierhead.llm.v1.llm_pb2 import LLMReply, Usage

from services.llm.server.engines.mock.plan import Answer, Plan

DONE = b"data: [DONE]\n\n"
_MARK = "\x00"
"""Stands where the token goes while a template is made; JSON writes it as six characters that no token has."""
_MARKED = b"\\u0000"

News: TypeAlias = tuple[int, int, bool]
"""The number of a choice, how many more tokens it has, and whether they are its last."""


class _Choice:
    """One answer as it is streamed: a token's event is `before`, the token as JSON, and `behind`."""

    __slots__ = ("before", "behind", "between", "given", "pieces")

    def __init__(self, before: bytes, behind: bytes, pieces: list[bytes]) -> None:
        self.before = before
        self.behind = behind
        self.between = behind + before
        self.pieces = pieces
        self.given = 0
        """Tokens that were streamed."""


class Writer:
    """Writes one request's answers, streamed or whole."""

    __slots__ = ("_choices", "_created", "_id", "_plan", "left")

    def __init__(self, plan: Plan, request_id: str, created: int) -> None:
        self._plan = plan
        self._id = f"{'chatcmpl' if plan.chat else 'cmpl'}-{request_id}"
        self._created = created
        self._choices = [self._choice_of(number, answer) for number, answer in enumerate(plan.answers)]
        self.left = plan.completion_tokens
        """Tokens that were not streamed yet."""

    def events(self, news: Iterable[News]) -> LLMReply:
        """The events of the new tokens."""
        data, before = b"", self.left
        for number, count, done in news:
            data += self._tokens(number, count)
            if done:
                data += self._finish(number)
        return LLMReply(data=data, tokens=before - self.left)

    def end(self, usage: Usage) -> bytes:
        """The last bytes of the stream."""
        if not self._plan.include_usage:
            return DONE
        return self._event([], usage=_usage(usage)) + DONE

    def whole(self, usage: Usage, more: dict[str, Any]) -> bytes:
        """The body of an answer that is not streamed."""
        body = self._frame("chat.completion" if self._plan.chat else "text_completion")
        body["choices"] = [self._choice(number, answer) for number, answer in enumerate(self._plan.answers)]
        return json.dumps(body | {"usage": _usage(usage)} | more).encode()

    def _tokens(self, number: int, count: int) -> bytes:
        """The events of the next tokens of a choice; the role or the call's name stands before the first token."""
        choice = self._choices[number]
        start = choice.given
        choice.given = end = start + count
        self.left -= count
        tokens = choice.before + choice.between.join(choice.pieces[start:end]) + choice.behind
        return tokens if start else self._head(number) + tokens

    def _finish(self, number: int) -> bytes:
        """The last event of a choice."""
        empty: dict[str, Any] = {"delta": {}} if self._plan.chat else {"text": ""}
        return self._event([_choice(number, empty, self._plan.answers[number].finish)])

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._plan.model}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        frame = self._frame("chat.completion.chunk" if self._plan.chat else "text_completion")
        return b"data: %b\n\n" % json.dumps(frame | {"choices": choices} | more).encode()

    def _choice_of(self, number: int, answer: Answer) -> _Choice:
        if not self._plan.chat:
            content: dict[str, Any] = {"text": _MARK}
        elif answer.tool is None:
            content = {"delta": {"content": _MARK}}
        else:
            content = {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": _MARK}}]}}
        before, _, behind = self._event([_choice(number, content, None)]).rpartition(_MARKED)
        return _Choice(before, behind, _escaped(answer.pieces))

    def _head(self, number: int) -> bytes:
        if not self._plan.chat:
            return b""
        tool = self._plan.answers[number].tool
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        if tool is not None:
            delta = {"role": "assistant", "content": None, "tool_calls": [{"index": 0, **self._call(number, tool, "")}]}
        return self._event([_choice(number, {"delta": delta}, None)])

    def _call(self, number: int, tool: str, arguments: str) -> dict[str, Any]:
        call_id = f"call_{self._id.rpartition('-')[2]}{number}"
        return {"id": call_id, "type": "function", "function": {"name": tool, "arguments": arguments}}

    def _choice(self, number: int, answer: Answer) -> dict[str, Any]:
        text = "".join(answer.pieces)
        if not self._plan.chat:
            return _choice(number, {"text": text}, answer.finish)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if answer.tool is not None:
            message |= {"content": None, "tool_calls": [self._call(number, answer.tool, text)]}
        return _choice(number, {"message": message}, answer.finish)


def _choice(number: int, content: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": number, **content, "logprobs": None, "finish_reason": finish}


def _escaped(pieces: Sequence[str]) -> list[bytes]:
    """Tokens as they stand in JSON. Most texts need no escape: one check of the whole text shows it."""
    text = "".join(pieces)
    if len(json.dumps(text)) == len(text) + 2:
        return [piece.encode() for piece in pieces]
    return [json.dumps(piece)[1:-1].encode() for piece in pieces]


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
