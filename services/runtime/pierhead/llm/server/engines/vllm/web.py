"""Requests to vLLM's web application in this process, called as a web server would call it (ASGI)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from pierhead.llm.server.engines.vllm.counting import TALLY, TokenTally
from pierhead.llm.v1.llm_pb2 import LLMReply, LLMRequest

_MOST_CHUNKS = 16
"""Pieces of an answer that wait for a slow reader."""


class WebRequest:
    """One request to vLLM's web application, in this process: it is called as a web server would call it (ASGI)."""

    def __init__(self, app: Any, request: LLMRequest, body: bytes, tally: TokenTally) -> None:
        self._tally = tally
        self._body: bytes | None = body
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_MOST_CHUNKS)
        self._gone = asyncio.Event()
        token = TALLY.set(tally)
        try:
            self._task = asyncio.create_task(self._run(app, _scope(request, bool(body))))
        finally:
            TALLY.reset(token)

    async def _run(self, app: Any, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._said.put)
        finally:
            with contextlib.suppress(asyncio.QueueFull):  # the reader of a full queue sees the end of the task
                self._said.put_nowait({"type": "end"})

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def replies(self) -> AsyncIterator[LLMReply]:
        """The answer, in the pieces that vLLM sends."""
        status, content_type = 0, ""
        while True:
            said = await self._said.get()
            if said["type"] == "http.response.start":
                status = said["status"]
                content_type = dict(said["headers"]).get(b"content-type", b"").decode("latin-1")
                continue
            if said["type"] == "end":
                await self._task  # raises what it raised
                return
            reply = LLMReply(data=said.get("body", b""), status=status, content_type=content_type)
            reply.tokens = self._tally.take()
            last = not said.get("more_body", False)
            if last:
                reply.usage.CopyFrom(self._tally.usage())
            if reply.data or last:
                yield reply
                status, content_type = 0, ""
            if last:
                return

    async def close(self) -> None:
        """End the request, whether or not its answer is complete."""
        self._gone.set()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._task


def is_json(request: LLMRequest) -> bool:
    """Whether the request has a body of JSON."""
    return bool(request.body) and request.content_type.partition(";")[0].strip() in ("", "application/json")


def _scope(request: LLMRequest, has_body: bool) -> dict[str, Any]:
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
