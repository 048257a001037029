"""Server-sent events of a streamed text completion, in the form that OpenAI's API gave it."""

from __future__ import annotations

import json
from typing import Final

DONE: Final = b"data: [DONE]\n\n"
_TEXT_PLACE: Final = "\x00"


class CompletionStream:
    """Encodes the pieces of one completion; everything that stays the same is encoded once."""

    def __init__(self, completion_id: str, created: int, model: str) -> None:
        """`created`: Unix time in seconds."""
        self._going_on = self._around_text(completion_id, created, model, finish_reason=None)
        self._last = self._around_text(completion_id, created, model, finish_reason="stop")

    def event(self, text: str, *, last: bool) -> bytes:
        """One `data:` event with a `text_completion.chunk` object; `last` marks the completion as finished."""
        before, after = self._last if last else self._going_on
        return before + json.dumps(text).encode() + after

    @staticmethod
    def _around_text(completion_id: str, created: int, model: str, finish_reason: str | None) -> tuple[bytes, bytes]:
        chunk = {
            "id": completion_id,
            "object": "text_completion.chunk",
            "created": created,
            "model": model,
            "choices": [{"index": 0, "text": _TEXT_PLACE, "logprobs": None, "finish_reason": finish_reason}],
        }
        before, _, after = json.dumps(chunk, separators=(",", ":")).partition(json.dumps(_TEXT_PLACE))
        return f"data: {before}".encode(), f"{after}\n\n".encode()
