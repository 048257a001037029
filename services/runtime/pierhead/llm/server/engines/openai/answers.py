"""A server's HTTP answers as ours: events, whole bodies, and errors in OpenAI's form; and its page of metrics."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
from pierhead.llm.objects import ErrorResponse, OpenAIAnswer, RawAnswer, StreamEvents
from pierhead.llm.server.engine import Answers
from pierhead.llm.server.errors import UpstreamError
from pierhead.llm.server.events import Account, Splitter

LARGEST_ANSWER = 60 * 1024 * 1024
"""Bytes of an answer that does not stream: a little less than the largest message between services."""
_JSON = "application/json"
_EVENTS = "text/event-stream"
_OURS = (b"process_", b"python_", b"pierhead_")
"""Families of metrics that the replica has itself."""


async def answers_of(
    response: aiohttp.ClientResponse, account: Account, kind: type[OpenAIAnswer], *, ends: bool
) -> Answers:
    """An answer of this kind, as far as it is known. Raises UpstreamError, aiohttp's errors."""
    if response.status in (401, 403):
        raise UpstreamError(f"it refuses the key of this replica ({response.status}); set engine_kwargs.api_key_env")
    if response.status != 200:
        yield _failure(response.status, await read_body(response, LARGEST_ANSWER), response.url.path)
    elif response.content_type == _EVENTS:
        async for events in _events(response, account, ends=ends):
            yield events
    elif response.content_type == _JSON or ends:
        yield _whole(await read_body(response, LARGEST_ANSWER), account, kind)
    else:
        content_type = response.headers.get("Content-Type", "")
        data = b""
        async for following in response.content.iter_any():
            if data:
                yield RawAnswer(data, content_type)
            data = following
        yield RawAnswer(data, content_type, usage=account.usage)


async def _events(response: aiohttp.ClientResponse, account: Account, *, ends: bool) -> Answers:
    """A stream's events, as many together as came together."""
    splitter = Splitter()
    async for data in response.content.iter_any():
        whole = b"".join([event for event in splitter.feed(data) if account.note(event)])
        if whole:
            yield StreamEvents.from_bytes(whole, account.take(), account.usage if account.done else None)
    if splitter.rest.strip() or (ends and not account.done):
        raise UpstreamError("its stream ended in the middle")
    if not account.done:
        yield StreamEvents("", account.take(), account.usage)


def _whole(data: bytes, account: Account, kind: type[OpenAIAnswer]) -> OpenAIAnswer:
    try:
        body = json.loads(data)
    except ValueError:
        raise UpstreamError(f"its answer is not JSON: {short(data)}") from None
    if not isinstance(body, dict):
        raise UpstreamError(f"its answer is not a JSON object: {short(data)}")
    account.note_body(body)
    return kind.from_bytes(data).counted(account.usage)


def _failure(status: int, data: bytes, path: str) -> ErrorResponse:
    """The server's own error, where it is one as OpenAI has them; else made into one."""
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        if {"type", "param", "code"} <= set(error):
            return ErrorResponse.from_bytes(data).with_status(status)
        kind = error.get("type") or _kind(status)
        return ErrorResponse.of(status, error["message"], kind=kind, code=error.get("code"), param=error.get("param"))
    if not 400 <= status < 600:
        raise UpstreamError(f"it answers with status {status}: {short(data)}")
    code = "not_found" if status == 404 else None
    message = error if isinstance(error, str) else short(data)
    return ErrorResponse.of(
        status, f"the server behind this model answers {path} with {status}: {message}", kind=_kind(status), code=code
    )


def _kind(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"


async def read_body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body. Raises UpstreamError for a larger one."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > most:
            raise UpstreamError(f"its answer has more than {most} bytes")
        parts.append(part)
    return b"".join(parts)


def cards_of(body: bytes) -> dict[str, dict[str, Any]]:
    """A server's list of models; nothing where it is none."""
    try:
        return {card["id"]: card for card in json.loads(body)["data"] if isinstance(card["id"], str)}
    except (ValueError, TypeError, KeyError):
        return {}


def message_of(body: bytes) -> str:
    """The message of OpenAI's error object; "" where it is none."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"])[:1000]
    except (ValueError, TypeError, KeyError):
        return ""


def without_ours(text: bytes) -> bytes:
    """A page of metrics without the families that the replica's own page has."""
    kept = [line for line in text.splitlines() if line and line != b"# EOF" and not _family(line).startswith(_OURS)]
    return b"\n".join(kept) + b"\n" if kept else b""


def _family(line: bytes) -> bytes:
    words = line.split(None, 3)
    return words[2] if line.startswith(b"#") and len(words) > 2 else line


def short(data: bytes) -> str:
    """The beginning of a body, in one line, for a message."""
    text = " ".join(data[:400].decode(errors="replace").split())
    return text or "nothing"
