"""Error responses over HTTP, in one form for aiohttp and ASGI applications:

{"error": {"code": "bad_request", "message": "...", "request_id": "..."}}

With PIERHEAD_DEBUG there is also "traceback", for exceptions of user code: here, or at a callee.

An aiohttp application can set another form for its clients: see `pierhead.http_errors`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from pierhead.errors import Backpressure, PierheadError, UserCodeError
from pierhead.request import REQUEST_ID_KEY
from pierhead.settings import Settings

CONTENT_TYPE = "application/json; charset=utf-8"


ErrorBody = Callable[[int, str, str, str], bytes]
"""JSON for status, code, message and request id."""


class Answer(NamedTuple):
    """A complete response."""

    status: int
    headers: dict[str, str]
    """Without Content-Length, which servers set themselves."""
    body: bytes

    def messages(self, *more: tuple[bytes, bytes], of: str = "http.response") -> tuple[dict[str, Any], dict[str, Any]]:
        """What an ASGI application sends in its place; `more`: further headers."""
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        headers += [(b"content-length", str(len(self.body)).encode()), *more]
        start = {"type": f"{of}.start", "status": self.status, "headers": headers}
        return start, {"type": f"{of}.body", "body": self.body}


def error_answer(
    error: PierheadError, request_id: str, settings: Settings, error_body: ErrorBody | None = None
) -> Answer:
    """The answer for an error of the runtime, or of user code after `Edge.error_for`."""
    status, retry_after_s = error.http_status, error.retry_after_s
    if isinstance(error, Backpressure):
        # The service's settings fill in what the error does not set.
        if status == Backpressure.http_status:
            status = settings.backpressure_status_code
        if "retry_after_s" not in vars(error) and type(error).retry_after_s == Backpressure.retry_after_s:
            retry_after_s = settings.backpressure_retry_after_s
    headers = {}
    if retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(retry_after_s))  # whole seconds, RFC 9110 10.2.3; never too early
    traceback = error.traceback if settings.debug and isinstance(error, UserCodeError) else ""
    return plain_answer(status, error.kind, error.message, request_id, headers, traceback, error_body)


def plain_answer(
    status: int,
    code: str,
    message: str,
    request_id: str,
    headers: dict[str, str] | None = None,
    traceback: str = "",
    error_body: ErrorBody | None = None,
) -> Answer:
    """The answer for errors without a class of ours: routes, methods, malformed requests."""
    all_headers = {"Content-Type": CONTENT_TYPE, REQUEST_ID_KEY: request_id} | (headers or {})
    if error_body is not None:
        return Answer(status, all_headers, error_body(status, code, message, request_id))
    described = {"code": code, "message": message, "request_id": request_id}
    if traceback:
        described["traceback"] = traceback
    return Answer(status, all_headers, json.dumps({"error": described}).encode())
