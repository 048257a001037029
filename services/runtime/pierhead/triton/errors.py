"""What Triton's statuses and words mean as PierheadErrors."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Any, NoReturn

import grpc

from pierhead.errors import (
    Backpressure,
    BadRequest,
    DeadlineExceeded,
    NotFound,
    PierheadError,
    RemoteError,
    ReplicaDied,
    UserCodeError,
)

_WRONG_INPUT = re.compile(r"inference input '|unexpected shape for|byte size mismatch|expected .* inputs but got")
"""Triton's words for a request that does not fit the model."""


def load_error(words: str) -> PierheadError | None:
    """What a failed load or unload means by Triton's words; its statuses do not say it."""
    if "failed to poll from model repository" in words:
        return NotFound(words)
    failed = "load failed" in words or "explicit model load / unload is not allowed" in words
    return RemoteError(words, grpc.StatusCode.INTERNAL) if failed else None


async def reply_of(call: Awaitable[Any]) -> Any:
    """The reply of a call. Raises what Triton's error means."""
    try:
        return await call
    except PierheadError as error:
        translate(error)


def error_of(words: str) -> PierheadError:
    """The error of a stream, which comes as a text: Triton 2.51 crashes now and then when it is asked for a status
    (`triton_grpc_error`).
    """
    if "unknown model" in words:
        return NotFound(words)
    return BadRequest(words) if _WRONG_INPUT.search(words) else RemoteError(words, grpc.StatusCode.INTERNAL)


def translate(error: PierheadError) -> NoReturn:
    """Raise what a call's error means where Triton says it. Its own UNAVAILABLE looks like a lost connection's."""
    cause = error.__cause__
    words = str(cause.details() or "") if isinstance(cause, grpc.aio.AioRpcError) else ""
    found: PierheadError | None = None
    if "bytes to hold the results" in words:
        found = BadRequest(words)
    elif isinstance(error, ReplicaDied):
        found = load_error(words)
        if "maximum queue size" in words:
            found = Backpressure(words)
        elif "timeout expired" in words:
            found = DeadlineExceeded(words)
        found = found or ReplicaDied(f"{error.message} ({words})")
    elif isinstance(error, UserCodeError) and isinstance(cause, LookupError):
        raise Backpressure(str(cause)) from error
    raise (found or error) from cause
