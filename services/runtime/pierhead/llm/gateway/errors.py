"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}}.

| status | type | code |
|---|---|---|
| 400 | invalid_request_error | what is wrong, or null |
| 401 | invalid_request_error | invalid_api_key |
| 403 | invalid_request_error | model_not_allowed |
| 404 | invalid_request_error | model_not_found, not_found |
| 405, 413 | invalid_request_error | method_not_allowed, payload_too_large |
| 429 | requests, tokens | rate_limit_exceeded |
| 500, 502, 503, 504 | server_error | the runtime's code: internal, replica_died, no_replica, scaled_to_zero, ... |
"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import hdrs, web
from pierhead.llm.openai_error import error_body, shown

JSON = "application/json"

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """An error of the gateway itself; `str(error)` is the message."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body = error_body(message, kind=kind, code=code, param=param)


def answer_error(error: ApiError, headers: dict[str, str]) -> web.Response:
    """An error of the gateway's own as a response."""
    return web.Response(
        status=error.status, body=error.body, headers={hdrs.CONTENT_TYPE: JSON, **headers, **error.headers}
    )


def runtime_error_body(status: int, code: str, message: str, request_id: str) -> bytes:
    """An error of the runtime: see `pierhead.http_errors`. The request's id is in the answer's head."""
    return error_body(message, kind=SERVER if status >= 500 or code == "backpressure" else INVALID, code=code)


def error_event(code: str, message: str) -> bytes:
    """The last event of a stream that failed after it began; not even [DONE] follows."""
    return b"data: " + error_body(message, kind=SERVER, code=code) + b"\n\n"


def wrong(param: str, expected: str, found: object, code: str = "invalid_type") -> ApiError:
    """400: a member of the body is invalid."""
    return ApiError(400, f"{param}: expected {expected}, found {shown(found)}", code=code, param=param)


def unknown_model(name: str) -> ApiError:
    """404: with OpenAI's message, which clients look for."""
    message = f"The model `{name[:200]}` does not exist; GET /v1/models lists those that do."
    return ApiError(404, message, code="model_not_found", param="model")


def unknown_path(path: str) -> ApiError:
    """404: there is nothing of this name below /v1, whatever the engine is."""
    return ApiError(404, f"no route for {path[:200]}; expected a path of OpenAI's API", code="not_found")
