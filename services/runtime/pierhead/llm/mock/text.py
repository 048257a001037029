"""The mock engine's text: a token is four characters, and answers are numbers that depend on the prompt. Pure.

The parts of a conversation are cut one by one: an answer that comes back in the next turn's messages has the same
tokens there.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from pierhead.llm.server import bodies
from pierhead.llm.server.errors import LLMRequestError

_TOKEN = 4
"""Characters."""


def cut(text: str) -> list[str]:
    """A text as its tokens."""
    return [text[start : start + _TOKEN] for start in range(0, len(text), _TOKEN)]


def number_of(token: str) -> int:
    """The number that clients see for a token."""
    return int.from_bytes(token.encode("utf-32-be", "surrogatepass"))


def token_of(number: int) -> str:
    """The other way; what is no character becomes U+FFFD."""
    size = (number.bit_length() + 31) // 32 * 4
    return number.to_bytes(size).decode("utf-32-be", "replace")


def conversation(body: bodies.Body) -> list[str]:
    """The tokens of `messages`, as the model would read them. Raises LLMRequestError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bodies.wrong("messages", "an array that is not empty", messages)
    tokens = cut(f"<|tools|>\n{json.dumps(body['tools'])}") if body.get("tools") else []
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise bodies.wrong(f"messages[{place}]", "an object", message)
        tokens += cut(f"<|{message.get('role')}|>\n") + cut(content_of(message))
    return tokens + cut("<|assistant|>\n")


def content_of(message: dict[str, Any]) -> str:
    """A message's text; all of it as JSON where it has more than that."""
    content = message.get("content")
    return content if isinstance(content, str) and not message.get("tool_calls") else json.dumps(message)


def prompts(body: bodies.Body, name: str) -> list[list[str]]:
    """Every prompt of a member that has one or several, as text or as tokens. Raises LLMRequestError."""
    found = body.get(name)
    several = isinstance(found, list) and found and isinstance(found[0], str | list)
    return [_tokens(each, name) for each in (found if several else [found])]  # type: ignore[union-attr]


def _tokens(found: object, name: str) -> list[str]:
    if isinstance(found, str):
        return cut(found)
    if not isinstance(found, list) or not found:
        raise bodies.wrong(name, "a string, or an array of strings or tokens that is not empty", found)
    for number in found:
        if type(number) is not int or not 0 < number < 1 << 32 * _TOKEN:
            raise LLMRequestError(f"{name}: there is no token {number!r}", param=name, code="invalid_value")
    return [token_of(number) for number in found]


def answer(prompt: list[str], number: int, count: int) -> list[str]:
    """`count` made-up tokens: choice `number` of the answer to a prompt."""
    seed = zlib.crc32("".join(prompt[-64:]).encode(errors="surrogatepass"), len(prompt)) + number
    return [f" {(seed + place) % 1000:03d}" for place in range(count)]


def until_stop(tokens: list[str], stops: list[str]) -> list[str] | None:
    """The tokens before the first of the stop strings; None where there is none of them."""
    text = "".join(tokens)
    ends = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
    return (cut(text[: min(ends)]) or [""]) if ends else None
