"""How the mock engine's answers look: OpenAI's JSON. What all events of a choice have alike is written once. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from pierhead.llm.v1.llm_pb2 import LLMReply, Usage

from services.llm.server.engines.mock.plan import Answer, Plan
from services.llm.server.engines.mock.text import bytes_of

DONE = b"data: [DONE]\n\n"
_MARK = "\x00"
"""Stands where the token goes while a template is made; JSON writes it as six characters that no token has."""
_MARKED = b"\\u0000"

News: TypeAlias = tuple[int, int, bool]
"""The number of a choice, how many more tokens it has, and whether they are its last."""


class _Choice:
    """One answer as it is streamed: a token's event is what stands before it, the token as JSON, and what is behind."""

    __slots__ = ("before", "behind", "between", "given", "offset", "pieces")

    def __init__(self, before: bytes, behind: bytes, pieces: list[bytes]) -> None:
        self.before = before
        self.behind = behind
        self.between = behind + before
        self.pieces = pieces
        self.given = 0
        """Tokens that were streamed."""
        self.offset = 0
        """Where the next one stands in the text, for logprobs; characters."""


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
        """The events of what is new."""
        data, before = b"", self.left
        for number, count, done in news:
            data += self._tokens(number, count)
            if done:
                data += self._finish(number)
        return LLMReply(data=data, tokens=before - self.left)

    def end(self, usage: Usage) -> bytes:
        """What ends the stream."""
        if not self._plan.include_usage:
            return DONE
        return self._event([], usage=_usage(usage)) + DONE

    def whole(self, usage: Usage, more: dict[str, Any]) -> bytes:
        """The body of an answer that is not streamed."""
        body = self._frame("chat.completion" if self._plan.chat else "text_completion")
        body["choices"] = [self._choice(number, answer) for number, answer in enumerate(self._plan.answers)]
        return json.dumps(body | {"usage": _usage(usage)} | more).encode()

    # ---- inside

    def _tokens(self, number: int, count: int) -> bytes:
        """The events of the next tokens of a choice; with the first one, what comes before it."""
        choice = self._choices[number]
        start = choice.given
        choice.given = end = start + count
        self.left -= count
        if self._plan.logprobs is not None and self._plan.answers[number].tool is None:
            tokens = b"".join(self._with_logprobs(number, at) for at in range(start, end))
        else:
            tokens = choice.before + choice.between.join(choice.pieces[start:end]) + choice.behind
        return tokens if start else self._head(number) + tokens

    def _finish(self, number: int) -> bytes:
        """The last event of a choice."""
        reason = self._plan.answers[number].finish
        empty: dict[str, Any] = {"delta": {}} if self._plan.chat else {"text": ""}
        return self._event([{"index": number, **empty, "logprobs": None, "finish_reason": reason}])

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
        event = self._event([{"index": number, **content, "logprobs": None, "finish_reason": None}])
        before, _, behind = event.rpartition(_MARKED)
        return _Choice(before, behind, _escaped(answer.pieces))

    def _head(self, number: int) -> bytes:
        if not self._plan.chat:
            return b""
        answer = self._plan.answers[number]
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        if answer.tool is not None:
            call = {"index": 0, "id": self._call_id(number), "type": "function"}
            call["function"] = {"name": answer.tool, "arguments": ""}
            delta = {"role": "assistant", "content": None, "tool_calls": [call]}
        return self._event([{"index": number, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _call_id(self, number: int) -> str:
        return f"call_{self._id.rpartition('-')[2]}{number}"

    def _choice(self, number: int, answer: Answer) -> dict[str, Any]:
        text = "".join(answer.pieces)
        logprobs = None if self._plan.logprobs is None else self._logprobs(answer.pieces, 0)
        rest = {"logprobs": logprobs, "finish_reason": answer.finish}
        if not self._plan.chat:
            return {"index": number, "text": text, **rest}
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if answer.tool is not None:
            call = {"id": self._call_id(number), "type": "function"}
            call["function"] = {"name": answer.tool, "arguments": text}  # type: ignore[assignment]
            message |= {"content": None, "tool_calls": [call]}
            rest["logprobs"] = None
        return {"index": number, "message": message, **rest}

    def _with_logprobs(self, number: int, at: int) -> bytes:
        piece = self._plan.answers[number].pieces[at]
        choice = self._choices[number]
        offset, choice.offset = choice.offset, choice.offset + len(piece)
        content: dict[str, Any] = {"delta": {"content": piece}} if self._plan.chat else {"text": piece}
        logprobs = self._logprobs([piece], offset)
        return self._event([{"index": number, **content, "logprobs": logprobs, "finish_reason": None}])

    def _logprobs(self, pieces: Sequence[str], offset: int) -> dict[str, Any]:
        """Made up: of a token's others, each is half as likely as the one before it."""
        top = self._plan.logprobs or 0
        if self._plan.chat:
            return {
                "content": [
                    _entry(piece, 1)
                    | {"top_logprobs": [_entry(_other(piece, rank), rank) for rank in range(1, top + 1)]}
                    for piece in pieces
                ],
                "refusal": None,
            }
        offsets = []
        for piece in pieces:
            offsets.append(offset)
            offset += len(piece)
        return {
            "tokens": list(pieces),
            "token_logprobs": [_chance(1)] * len(pieces),
            "top_logprobs": [{_other(piece, rank): _chance(rank) for rank in range(1, top + 1)} for piece in pieces],
            "text_offset": offsets,
        }


def _escaped(pieces: Sequence[str]) -> list[bytes]:
    """As they stand in JSON; most need no escape, which one look at all of them tells."""
    text = "".join(pieces)
    if len(json.dumps(text)) == len(text) + 2:
        return [piece.encode() for piece in pieces]
    return [json.dumps(piece)[1:-1].encode() for piece in pieces]


def _chance(rank: int) -> float:
    return round(-rank * math.log(2), 6)


def _other(piece: str, rank: int) -> str:
    """The token itself, or one that was not taken."""
    return piece if rank == 1 else f"{piece}~{rank}"


def _entry(piece: str, rank: int) -> dict[str, Any]:
    return {"token": piece, "logprob": _chance(rank), "bytes": list(bytes_of(piece))}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
