"""Replies that every engine makes alike: OpenAI's error object."""

from __future__ import annotations

from collections.abc import AsyncIterator

from pierhead.llm.openai_error import error_body
from pierhead.llm.server.errors import LLMRequestError
from pierhead.llm.v1.llm_pb2 import LLMReply


def error_reply(
    status: int, message: str, *, kind: str, code: str | int | None = None, param: str | None = None
) -> LLMReply:
    """An error as a reply."""
    return LLMReply(data=error_body(message, kind=kind, code=code, param=param), status=status)


def reply_to(error: LLMRequestError) -> LLMReply:
    """The reply to a refused request."""
    kind = "invalid_request_error"
    return error_reply(error.http_status, error.message, kind=kind, code=error.error_code, param=error.param)


def not_supported(path: str) -> LLMReply:
    """The reply for a path that the engine does not serve."""
    message = f"this model's engine does not serve {path}"
    return error_reply(404, message, kind="invalid_request_error", code="not_found")


async def only(reply: LLMReply) -> AsyncIterator[LLMReply]:
    """An answer of this reply alone."""
    yield reply
