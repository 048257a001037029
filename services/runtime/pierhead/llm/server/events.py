"""Server-sent events of an OpenAI-compatible server, or of a user's engine: whole ones, their tokens, and what the last
ones say. Pure.

Events are searched, not parsed, but for the few at the end of a stream that hold a reason or the usage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pierhead.llm.objects import Usage, usage_in, usage_of
from pierhead.llm.server.errors import UpstreamError

DONE = b"[DONE]"
LARGEST_EVENT = 16 * 1024 * 1024
"""Bytes of one event: far more than any token or image takes."""

_END = re.compile(rb"\r?\n\r?\n")
_END_BYTES = 4
"""Of the longest one."""
_TEXT = re.compile(
    rb'"(?:content|text|reasoning_content|reasoning|arguments|refusal|delta|thinking|partial_json)"\s*:\s*"[^"]'
)
_REASON = re.compile(rb'"finish_reason"\s*:\s*"')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_ERROR = re.compile(rb'(?:event: *error\r?\n)?data: *\{\s*"(?:error"|object"\s*:\s*"error")')


class Splitter:
    """Bytes as they come, as whole events with the blank line at their ends."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The events that these bytes complete. Raises UpstreamError for one without an end.

        A large event, an image say, comes in hundreds of pieces: each is looked at once, not with all before it.
        """
        text: bytes | bytearray = data
        sought = begin = 0
        if self._rest:
            sought = max(0, len(self._rest) - _END_BYTES + 1)
            self._rest += data
            text = self._rest
        for end in _END.finditer(text, sought):
            yield bytes(text[begin : end.end()])
            begin = end.end()
        if begin or text is data:
            self._rest = bytearray(text[begin:])
        if len(self._rest) > LARGEST_EVENT:
            raise UpstreamError(f"an event of its stream has more than {LARGEST_EVENT} bytes")

    @property
    def rest(self) -> bytes:
        """The beginning of an event that has not ended."""
        return bytes(self._rest)


class Account:
    """Tokens, usage and end of one answer, as far as it was read."""

    __slots__ = ("_hide_usage", "_taken", "done", "tokens", "usage")

    def __init__(self, *, hide_usage: bool) -> None:
        self._hide_usage = hide_usage
        self._taken = 0
        self.tokens = 0
        """Made so far. While it streams each event with text counts as one; the usage at the end says it exactly."""
        self.usage = Usage()
        self.done = False

    def take(self) -> int:
        """Tokens made since the last call."""
        new = max(self.tokens - self._taken, 0)
        self._taken += new
        return new

    def note(self, event: bytes) -> bool:
        """Count an event; False: the client has not asked for it. Raises UpstreamError for an error event."""
        if _TEXT.search(event):
            self.tokens += 1
        if _ERROR.match(event):
            raise UpstreamError(f"it failed while it answered: {_error_text(event)}")
        if DONE in event and event.lstrip().removeprefix(b"data:").strip() == DONE:
            self.done = True
        elif _REASON.search(event) or _USAGE.search(event):
            return self._read(event)
        return True

    def _read(self, event: bytes) -> bool:
        body = _data(event)
        self.note_body(body)
        return not (self._hide_usage and body.get("choices") == [])

    def note_body(self, body: dict[str, Any]) -> None:
        """Take reason and usage from a whole answer, or from one of the last events."""
        said, before = usage_of(body), self.usage
        said.finish_reason = said.finish_reason or before.finish_reason
        if usage_in(body) is None:
            before.finish_reason = said.finish_reason
            return
        self.usage, self.tokens = said, said.completion_tokens
        if not said.prompt_tokens:  # the first event of Anthropic's API has them, the last one need not
            said.prompt_tokens, said.cached_tokens = before.prompt_tokens, before.cached_tokens


def _data(event: bytes) -> dict[str, Any]:
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    try:
        found = json.loads(b"\n".join(lines))
    except ValueError:
        raise UpstreamError(f"an event of its stream is not JSON: {event[:200]!r}") from None
    return found if isinstance(found, dict) else {}


def _error_text(event: bytes) -> str:
    try:
        found = _data(event)
    except UpstreamError:
        return event[:200].decode(errors="replace")
    error = found.get("error", found)
    return str(error.get("message", error) if isinstance(error, dict) else error)[:1000]
