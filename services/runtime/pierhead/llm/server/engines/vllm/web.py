"""Requests to vLLM's web application in this process, called as a web server would call it (ASGI)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from pierhead.llm.objects import OpenAIRequest, RawAnswer
from pierhead.llm.server.engines.vllm.counting import TALLY, TokenTally

_MOST_CHUNKS = 16
"""Pieces of an answer that wait for a slow reader."""


class WebRequest:
    """One request to vLLM's web application, in this process: it is called as a web server would call it (ASGI)."""

    def __init__(self, app: Any, request: OpenAIRequest, tally: TokenTally) -> None:
        """Raises LLMRequestError where the body cannot be written."""
        self._tally = tally
        self._body: bytes | None = request.to_bytes()
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_MOST_CHUNKS)
        self._gone = asyncio.Event()
        token = TALLY.set(tally)
        try:
            self._task = asyncio.create_task(self._run(app, _scope(request, bool(self._body))))
        finally:
            TALLY.reset(token)

    async def _run(self, app: Any, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._said.put)
        finally:
            with contextlib.suppress(asyncio.QueueFull):  # `parts` sees the end of the task, once it has read all
                self._said.put_nowait({"type": "end"})

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def parts(self) -> AsyncIterator[RawAnswer]:
        """The answer, in the pieces that vLLM sends; the last one has the usage."""
        status, content_type = 200, ""
        while True:
            is_over = self._said.empty() and self._task.done()
            said: dict[str, Any] = {"type": "end"} if is_over else await self._said.get()
            if said["type"] == "http.response.start":
                status = said["status"]
                content_type = dict(said["headers"]).get(b"content-type", b"").decode("latin-1")
                continue
            if said["type"] == "end":
                await self._task  # raises what it raised
                return
            data, last = said.get("body", b""), not said.get("more_body", False)
            if data or last:
                usage = self._tally.usage() if last else None
                yield RawAnswer(data, content_type, status, self._tally.take(), usage)
                content_type = ""
            if last:
                return

    async def close(self) -> None:
        """End the request, whether or not its answer is complete."""
        self._gone.set()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._task


def _scope(request: OpenAIRequest, has_body: bool) -> dict[str, Any]:
    path, _, query = request.path.partition("?")
    content_type = request.content_type or "application/json"
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST" if has_body else "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"engine"), (b"content-type", content_type.encode("latin-1"))],
        "client": None,
        "server": ("engine", 80),
        "state": {},
    }
