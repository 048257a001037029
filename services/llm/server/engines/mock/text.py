"""The mock engine's text: a tokeniser of four bytes of UTF-8 to a token, and answers that depend on the prompt. Pure.

The parts of a conversation are tokenised one by one: an answer that comes back in the next turn's messages has the same
tokens there.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from services.llm.server import bodies
from services.llm.server.errors import LLMRequestError

TOKEN_BYTES = 4
_WORDS = 1024
_CONSONANTS, _VOWELS = "bcdfghjklmnprstv", "aeiou"
_SYLLABLES = ["".join(each) for each in itertools.product(_CONSONANTS, _VOWELS, _CONSONANTS)][:_WORDS]
WORDS = tuple(f" {word}" for word in _SYLLABLES)
"""The tokens of answers: a space and three letters, the same in JSON."""
_AGAIN = WORDS + WORDS

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def tokenise(text: str) -> list[bytes]:
    """The tokens of a text."""
    raw = bytes_of(text)
    return [raw[start : start + TOKEN_BYTES] for start in range(0, len(raw), TOKEN_BYTES)]


def bytes_of(text: str) -> bytes:
    """UTF-8; half a character, which JSON can hold, as if it had a form there."""
    return text.encode(errors="surrogatepass")


def ids_of(tokens: Iterable[bytes]) -> list[int]:
    """Tokens as numbers: their length, and their bytes."""
    return [len(token) << 32 | int.from_bytes(token) for token in tokens]


def tokens_of(ids: Sequence[object], name: str) -> list[bytes]:
    """The tokens of numbers. Raises LLMRequestError for a number without a token."""
    tokens = []
    for place, number in enumerate(ids):
        known = isinstance(number, int) and not isinstance(number, bool) and 0 < number < (TOKEN_BYTES + 1) << 32
        length = number >> 32 if isinstance(number, int) and known else 0
        if not isinstance(number, int) or not length or number & 0xFFFFFFFF >= 1 << 8 * length:
            raise LLMRequestError(f"{name}[{place}]: there is no token {number!r}", param=name, code="invalid_value")
        tokens.append((number & 0xFFFFFFFF).to_bytes(length))
    return tokens


def text_of(tokens: Iterable[bytes]) -> str:
    """The text of tokens; what is no UTF-8 becomes U+FFFD."""
    return b"".join(tokens).decode(errors="replace")


def conversation(body: bodies.Body) -> list[bytes]:
    """The tokens of `messages`, as the model would read them. Raises LLMRequestError."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise bodies.wrong("messages", "an array", messages)
    if not messages:
        raise LLMRequestError("messages: expected at least one message", param="messages", code="invalid_value")
    tokens: list[bytes] = []
    if body.get("tools"):
        tokens += tokenise(f"<|tools|>\n{json.dumps(body['tools'])}")
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise bodies.wrong(f"messages[{place}]", "an object", message)
        role = message.get("role")
        if role not in ROLES:
            raise LLMRequestError(
                f"messages[{place}].role: expected one of {', '.join(ROLES)}, found {json.dumps(role)}",
                param="messages", code="invalid_value",
            )  # fmt: skip
        tokens += header(str(role))
        tokens += tokenise(_content(message, place))
    return tokens + header("assistant")


def header(role: str) -> list[bytes]:
    """What stands before a message."""
    return tokenise(f"<|{role}|>\n")


def last_text(body: bodies.Body) -> str:
    """The text of the last message, or of the prompt; "" where there is none."""
    messages = body.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        return _content(messages[-1], len(messages) - 1)
    prompt = body.get("prompt")
    return prompt if isinstance(prompt, str) else ""


def _content(message: dict[str, Any], place: int) -> str:
    content = message.get("content")
    calls = message.get("tool_calls")
    text = json.dumps(calls) if calls else ""
    if content is None or isinstance(content, str):
        return (content or "") + text
    name = f"messages[{place}].content"
    if not isinstance(content, list):
        raise bodies.wrong(name, "a string or an array", content)
    for number, part in enumerate(content):
        if not isinstance(part, dict):
            raise bodies.wrong(f"{name}[{number}]", "an object", part)
        piece = part.get("text", "")
        text += piece if part.get("type") == "text" and isinstance(piece, str) else json.dumps(part)
    return text


def prompts(body: bodies.Body, name: str) -> list[list[bytes]]:
    """Every prompt of a body that has one or several, as text or as tokens. Raises LLMRequestError."""
    found = body.get(name)
    if isinstance(found, str):
        return [tokenise(found)]
    if not isinstance(found, list) or not found:
        raise bodies.wrong(name, "a string, or an array of strings or tokens that is not empty", found)
    if all(isinstance(each, str) for each in found):
        return [tokenise(each) for each in found]
    if all(isinstance(each, list) and each for each in found):
        return [tokens_of(each, name) for each in found]
    return [tokens_of(found, name)]


def seed_of(tokens: Sequence[bytes], number: int = 0) -> int:
    """What an answer depends on: the prompt, and which of several answers it is."""
    return zlib.crc32(b"".join(tokens[-64:]), len(tokens) + 7 * number)


def answer(seed: int, count: int) -> list[str]:
    """`count` tokens of text, without the first one's space."""
    start = seed % _WORDS
    words = list(_AGAIN[start : start + _WORDS])
    found = (words * (count // _WORDS + 1))[:count]
    if found:
        found[0] = f"{found[0][1:]}s"  # four characters as well: what is read again must have the same tokens
    return found


def pieces(text: str) -> list[str]:
    """A given text as the tokens it is streamed in; at least one."""
    return [text[start : start + TOKEN_BYTES] for start in range(0, len(text), TOKEN_BYTES)] or [""]


def until_stop(found: list[str], stops: Sequence[str]) -> tuple[list[str], bool]:
    """The tokens before the first of the stop strings, and whether one was met."""
    text = "".join(found)
    ends = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
    if not ends:
        return found, False
    kept: list[str] = []
    left = min(ends)
    for token in found:
        kept.append(token[:left])
        left -= len(token)
        if left <= 0:
            break
    return kept or [""], True
