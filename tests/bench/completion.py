"""The events of the echo's stream, made as services/echo/app.py makes them, for what is compared with it."""

from __future__ import annotations

import json
import time
from typing import Final

CHUNK: Final = (
    '{"id":"cmpl-%d","object":"text_completion.chunk","created":%d,"model":"echo","choices":[{"index":0,"text":%s'
)
DONE: Final = b"data: [DONE]\n\n"


class CompletionStream:
    """Encodes the pieces of one completion; everything that stays the same is encoded once."""

    def __init__(self, message: str, num_tokens: int) -> None:
        self._begin = CHUNK % (time.time_ns(), time.time(), json.dumps(message)[:-1])
        self._num_tokens = num_tokens

    def chunk(self, index: int) -> str:
        """The object of piece `index`, as JSON."""
        reason = "null" if index + 1 < self._num_tokens else '"stop"'
        return f'{self._begin} {index}","logprobs":null,"finish_reason":{reason}}}]}}'

    def event(self, index: int) -> bytes:
        """The event of piece `index`."""
        return f"data: {self.chunk(index)}\n\n".encode()
