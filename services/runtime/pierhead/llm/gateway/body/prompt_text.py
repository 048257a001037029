"""Extracts the prompt of a request: its beginning, for policies that prefer replicas which have read the same text, and
its length, to estimate its tokens. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

MAX_CHARACTERS = 8192
"""Characters of the beginning; see LLMRequest.routing_text."""

MAX_PIECES = 20_000
"""Pieces of a prompt that are read. A million empty messages would take seconds, and would block all other requests
during them.
"""

CHARACTERS_PER_TOKEN = 4
"""OpenAI's rule of thumb for English."""

_RANKED = ("query", "queries", "documents", "text_1", "text_2")
"""Members of requests to rank texts, or to score them."""


class PromptText(NamedTuple):
    """The beginning and the length of a prompt."""

    beginning: str
    """At most MAX_CHARACTERS; the same for the same beginning of a conversation."""
    characters: int
    """Of the whole; of one in more than MAX_PIECES pieces, of the whole body."""

    @property
    def tokens(self) -> int:
        """An estimate."""
        return -(-self.characters // CHARACTERS_PER_TOKEN)


def prompt_text(body: Mapping[str, object], size: int = 0) -> PromptText:
    """Flatten `messages`, else `prompt`, else `instructions` and `input` and what is ranked or scored. A form that is
    not OpenAI's is skipped: the engine refuses it. `size`: of the body, in bytes.
    """
    pieces: list[str] = []
    total = 0
    for number, (piece, characters) in enumerate(_pieces(body)):
        if number == MAX_PIECES:
            total = max(total, size)
            break
        if total < MAX_CHARACTERS:
            pieces.append(piece[:MAX_CHARACTERS])
        total += characters
    # Lone surrogates, which JSON can hold, have no encoding; a message with them could not be sent.
    beginning = "".join(pieces)[:MAX_CHARACTERS].encode(errors="replace").decode()
    return PromptText(beginning, total)


def prompts(body: Mapping[str, object]) -> int:
    """How many prompts a completion is asked for at once; 1 for every other body."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return 1
    return len(prompt)


Pieces = Iterator[tuple[str, int]]
"""Texts, each with the number of characters that it stands for. A skipped form counts as an empty text."""


def _pieces(body: Mapping[str, object]) -> Pieces:
    messages = body.get("messages")
    if isinstance(messages, list):
        return _messages(messages)
    prompt = body.get("prompt")
    if prompt is not None:
        return _prompt(prompt)
    given = body.get("input")
    if isinstance(given, list) and any(isinstance(item, dict) for item in given):
        inputs = _messages(given)
    else:
        inputs = _prompt(given)
    ranked = (_ranked(body[name]) for name in _RANKED if name in body)
    return chain(_text(body.get("instructions")), inputs, *ranked)


def _text(text: object) -> Pieces:
    if isinstance(text, str):
        yield text, len(text)
        yield "\n", 1
    else:
        yield "", 0


def _messages(messages: list[object]) -> Pieces:
    for message in messages:
        if isinstance(message, dict):
            role = message.get("role")
            yield from _text(role if isinstance(role, str) else "")
            yield from _content(message.get("content"))
        else:
            yield "", 0


def _content(content: object) -> Pieces:
    """Text, or the parts of it; a part that is no text, such as an image, by the name of its kind."""
    if isinstance(content, list):
        for part in content:
            if isinstance(part, dict):
                text, kind = part.get("text"), part.get("type")
                yield from _text(text if isinstance(text, str) else f"<{kind[:40] if isinstance(kind, str) else ''}>")
            else:
                yield from _text(part)
    else:
        yield from _text(content)


def _prompt(prompt: object) -> Pieces:
    """A string, several, the numbers of tokens, or several lists of those."""
    if not isinstance(prompt, list):
        yield from _text(prompt)
    elif prompt and isinstance(prompt[0], int):
        yield from _numbers(prompt)
    else:
        for item in prompt:
            yield from _numbers(item) if isinstance(item, list) else _text(item)


def _ranked(given: object) -> Pieces:
    """One or several: texts, objects with a `text`, and those with parts as a message has them."""
    for each in given if isinstance(given, list) else [given]:
        if isinstance(each, dict):
            yield "", 0
            yield from _content(each.get("content", [each]))
        else:
            yield from _text(each)


def _numbers(tokens: list[object]) -> Pieces:
    """Token ids from the client; each takes at least two characters."""
    text = " ".join(str(token) for token in tokens[: MAX_CHARACTERS // 2] if isinstance(token, int))
    yield text, len(tokens) * CHARACTERS_PER_TOKEN
    yield "\n", 1
