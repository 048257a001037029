"""vLLM's answers as replies: events, whole bodies, and errors in OpenAI's form."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from pierhead.llm.server.answers import error_reply
from pierhead.llm.server.engines.vllm.counting import TokenTally
from pierhead.llm.server.engines.vllm.errors import openai_error, reason
from pierhead.llm.server.errors import LLMRequestError
from pierhead.llm.v1.llm_pb2 import LLMReply
from pydantic import ValidationError
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

_DONE = "data: [DONE]\n\n"


async def streamed(events: AsyncGenerator[str, None], tally: TokenTally) -> AsyncIterator[LLMReply]:
    """vLLM's events, unchanged. An error before the first token is a reply with its status, a later one is raised."""
    status = 200
    async with contextlib.aclosing(events):
        async for event in events:
            if tally.failure is not None:
                if status:
                    yield refusal(tally.failure)
                    return
                raise tally.failure
            if event == _DONE:
                yield LLMReply(data=_DONE.encode(), status=status, tokens=tally.take(), usage=tally.usage())
            else:
                if '"finish_reason":"tool_calls"' in event:
                    tally.finish_reason = "tool_calls"
                yield LLMReply(data=event.encode(), status=status, tokens=tally.take())
            status = 0


def whole(answer: Any, tally: TokenTally) -> LLMReply:
    """One reply of a request that does not stream."""
    if isinstance(answer, ErrorResponse):
        return _error(answer)
    usage = tally.usage()
    if answer.choices and answer.choices[0].finish_reason:
        usage.finish_reason = answer.choices[0].finish_reason
    return LLMReply(data=answer.model_dump_json().encode(), status=200, tokens=tally.take(), usage=usage)


def refusal(error: Exception) -> LLMReply:
    """The reply for an error of vLLM's own, with its status."""
    return _error(create_error_response(error))


def _error(answer: ErrorResponse) -> LLMReply:
    error = openai_error(answer.error.code, answer.error.message, answer.error.param)
    return error_reply(answer.error.code, error.message, kind=error.kind, code=error.code, param=error.param)


def as_openai(status: int, body: bytes) -> LLMReply:
    """An error that vLLM has written already."""
    try:
        return _error(ErrorResponse.model_validate_json(body))
    except ValidationError:  # not one of its own: unchanged
        return LLMReply(data=body, status=status)


def check(answer: ErrorResponse | str, what: str) -> None:
    """Raises LLMRequestError, `what` in front, where vLLM answered with an error."""
    if isinstance(answer, ErrorResponse):
        raise LLMRequestError(what + reason(answer.error.message))


def _is_failure(record: logging.LogRecord) -> bool:
    """Whether a line of vLLM's log is about more than a refused request, of which the client has the error."""
    error = record.exc_info[1] if record.exc_info else None
    refused = isinstance(error, Exception) and create_error_response(error).error.code < 500
    return not refused and not str(record.msg).startswith("Error with model")


for _module in ("chat_completion", "completion"):
    logging.getLogger(f"vllm.entrypoints.openai.{_module}.serving").addFilter(_is_failure)
