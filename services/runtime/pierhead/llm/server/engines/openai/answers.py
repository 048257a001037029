"""A server's HTTP answers as ours: events, whole bodies, and errors in OpenAI's form; and its page of metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

import aiohttp
from pierhead.llm.objects import ErrorResponse, OpenAIAnswer, RawAnswer, StreamEvents
from pierhead.llm.server.engine import Answers
from pierhead.llm.server.errors import UpstreamError
from pierhead.llm.server.events import Account, Splitter

LARGEST_ANSWER = 60 * 1024 * 1024
"""Bytes of an answer that does not stream: a little less than the largest message between services."""
END_WITHIN_S = 0.1
"""Of the [DONE] of a stream. Servers send both at once."""
_JSON = "application/json"
_EVENTS = "text/event-stream"
_OURS = (b"process_", b"python_", b"pierhead_")
"""Families of metrics that the replica has itself."""
_KINDS = ("invalid_request_error", "server_error", "requests", "tokens", "insufficient_quota")
"""Types of OpenAI's errors. Others are the servers' own."""
_CONTEXT = re.compile(
    r"maximum context length|max_model_len|maximum model length|longer than the maximum|available context size",
    re.IGNORECASE,
)
_DECODES = re.compile(rb"^llamacpp:n_decode_total\b.*", re.MULTILINE)
_NO_MODEL = re.compile(r"model\b.*(?:not found|does not exist)", re.IGNORECASE)
_MODEL = re.compile(rb'"model"\s*:\s*"(?:[^"\\]|\\.)*"')


async def answers_of(
    response: aiohttp.ClientResponse, account: Account, kind: type[OpenAIAnswer], *, ends: bool, model: str
) -> Answers:
    """An answer of this kind, as far as it is known. `model`: its name in the answer; "" = the server's.

    Raises UpstreamError, aiohttp's errors.
    """
    if response.status in (401, 403):
        raise UpstreamError(f"it refuses the key of this replica ({response.status}); set engine_kwargs.api_key_env")
    if response.status != 200:
        yield _failure(response.status, await read_body(response, LARGEST_ANSWER))
    elif response.content_type == _EVENTS:
        async for events in _events(response, account, ends=ends, model=model):
            yield events
    elif response.content_type == _JSON or ends:
        yield _whole(await read_body(response, LARGEST_ANSWER), account, kind, model)
    else:
        content_type = response.headers.get("Content-Type", "")
        data = b""
        async for following in response.content.iter_any():
            if data:
                yield RawAnswer(data, content_type)
            data = following
        yield RawAnswer(data, content_type, usage=account.usage)


async def _events(response: aiohttp.ClientResponse, account: Account, *, ends: bool, model: str) -> Answers:
    """A stream's events, as many together as came together."""
    splitter, named = Splitter(), b'"model":' + json.dumps(model).encode()
    async for data in response.content.iter_any():
        whole = b"".join([event for event in splitter.feed(data) if account.note(event)])
        if model:
            whole = _MODEL.sub(lambda _: named, whole)
        if account.done:
            await _end_of(response.content)
        if whole:
            yield StreamEvents.from_bytes(whole, account.take(), account.usage if account.done else None)
        if account.done:
            break
    if splitter.rest.strip() or (ends and not account.done):
        raise UpstreamError("its stream ended in the middle")
    if not account.done:
        yield StreamEvents("", account.take(), account.usage)


async def _end_of(content: aiohttp.StreamReader) -> None:
    """Wait for the end of a stream whose [DONE] has come: clients leave when they have it, and a request that has not
    ended by then counts as left; and the connection can be kept."""
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(END_WITHIN_S):
            await content.readany()


def _whole(data: bytes, account: Account, kind: type[OpenAIAnswer], model: str) -> OpenAIAnswer:
    try:
        body = json.loads(data)
    except ValueError:
        raise UpstreamError(f"its answer is not JSON: {short(data)}") from None
    if not isinstance(body, dict):
        raise UpstreamError(f"its answer is not a JSON object: {short(data)}")
    account.note_body(body)
    if model and body.get("model", model) != model:
        data = json.dumps({**body, "model": model}).encode()
    return kind.from_bytes(data).counted(account.usage)


def _failure(status: int, data: bytes) -> ErrorResponse:
    """The server's own error in OpenAI's words: servers have types and codes of their own."""
    if not 400 <= status < 600:
        raise UpstreamError(f"it answers with status {status}: {short(data)}")
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else body
    info = error if isinstance(error, dict) else {"message": error}
    message, kind, param = info.get("message"), info.get("type"), info.get("param")
    if not isinstance(message, str):
        message = f"the server behind this model answers with {status}: {short(data)}"
    if kind not in _KINDS:
        kind = "invalid_request_error" if status < 500 else "server_error"
    param = param if isinstance(param, str) else None
    return ErrorResponse.of(status, message, kind=kind, code=_code(status, info, message), param=param)


def _code(status: int, info: dict[str, Any], message: str) -> str | None:
    code = info.get("code")
    if status < 500 and (_CONTEXT.search(message) or info.get("type") == "exceed_context_size_error"):
        return "context_length_exceeded"
    if isinstance(code, str) or status != 404:
        return code if isinstance(code, str) else None
    return "model_not_found" if info.get("param") == "model" or _NO_MODEL.search(message) else "not_found"


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


def decodes_in(text: bytes) -> list[bytes]:
    """The lines of a page of metrics that change at each decode. llama.cpp counts tokens only when an answer ends."""
    return _DECODES.findall(text)


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
