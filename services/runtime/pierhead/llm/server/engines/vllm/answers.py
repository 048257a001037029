"""vLLM's answers as ours: events, whole bodies, and errors in OpenAI's form."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

from pierhead import ReplicaDied, Unavailable, recheck
from pierhead.llm.objects import ErrorResponse, OpenAIAnswer, StreamEvents
from pierhead.llm.openai_error import LLMRequestError
from pierhead.llm.server.engine import Answers
from pierhead.llm.server.engines.vllm.counting import TokenTally
from pierhead.llm.server.engines.vllm.errors import DIED, is_death, openai_error, reason
from pydantic import ValidationError
from vllm.entrypoints.serve.engine import protocol
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

_DONE = "data: [DONE]\n\n"


async def streamed(events: AsyncGenerator[str, None], tally: TokenTally) -> Answers:
    """vLLM's events, unchanged. An error before the first token is an ErrorResponse, a later one is raised."""
    begun = False
    async with contextlib.aclosing(events):
        async for event in events:
            if tally.failure is not None:
                if not begun:
                    yield refusal(tally.failure)
                    return
                raise died_while_it_answered() if is_death(str(tally.failure)) else tally.failure
            if event == _DONE:
                yield StreamEvents(event, tally.take(), tally.usage())
            else:
                if '"finish_reason":"tool_calls"' in event:
                    tally.finish_reason = "tool_calls"
                yield StreamEvents(event, tally.take())
            begun = True


def died_while_it_answered() -> ReplicaDied:
    """The error of a stream that has begun; the health check then replaces the replica."""
    recheck()
    return ReplicaDied(DIED)


def whole(answer: Any, tally: TokenTally, kind: type[OpenAIAnswer]) -> OpenAIAnswer:
    """The answer to a request that does not stream."""
    if isinstance(answer, protocol.ErrorResponse):
        return _error(answer)
    usage = tally.usage()
    if answer.choices and answer.choices[0].finish_reason:
        usage.finish_reason = answer.choices[0].finish_reason
    return kind.from_bytes(answer.model_dump_json().encode()).counted(usage)


def refusal(error: Exception) -> ErrorResponse:
    """The answer for an error of vLLM's own, with its status."""
    return _error(create_error_response(error))


def _error(answer: protocol.ErrorResponse) -> ErrorResponse:
    if is_death(answer.error.message):
        recheck()
        raise Unavailable(DIED)
    error = openai_error(answer.error.code, answer.error.message, answer.error.param)
    return ErrorResponse.of(answer.error.code, error.message, kind=error.kind, code=error.code, param=error.param)


def as_openai(status: int, body: bytes) -> ErrorResponse:
    """An error that vLLM has written already."""
    try:
        return _error(protocol.ErrorResponse.model_validate_json(body))
    except ValidationError:  # not one of its own: unchanged
        return ErrorResponse.from_bytes(body).with_status(status)


def check(answer: protocol.ErrorResponse | str, what: str) -> None:
    """Raises LLMRequestError, `what` in front, where vLLM answered with an error."""
    if isinstance(answer, protocol.ErrorResponse):
        raise LLMRequestError(what + reason(answer.error.message))


def _is_failure(record: logging.LogRecord) -> bool:
    """Whether a line of vLLM's log is about more than a refused request, of which the client has the error."""
    error = record.exc_info[1] if record.exc_info else None
    refused = isinstance(error, Exception) and create_error_response(error).error.code < 500
    return not refused and not str(record.msg).startswith("Error with model")


for _module in ("chat_completion", "completion"):
    logging.getLogger(f"vllm.entrypoints.openai.{_module}.serving").addFilter(_is_failure)
