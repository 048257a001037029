"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}}.

| status | type | code |
|---|---|---|
| 400 | invalid_request_error | what is wrong, or null |
| 403 | invalid_request_error | model_not_allowed |
| 404 | invalid_request_error | model_not_found, not_found |
| 405, 413 | invalid_request_error | method_not_allowed, payload_too_large |
| 500, 502, 503, 504 | server_error | the runtime's code: internal, replica_died, no_replica, scaled_to_zero, ... |

Anthropic's paths have the form of its clients: {"type": "error", "error": {"type", "message"}}, the type by the status.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from aiohttp import hdrs, web
from pierhead.llm.openai_error import error_body, shown

JSON = "application/json"
EVENTS = "text/event-stream"

INVALID = "invalid_request_error"
SERVER = "server_error"

_ANTHROPIC = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


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


def answer_error(error: ApiError, headers: dict[str, str], *, anthropic: bool = False) -> web.Response:
    """An error of the gateway's own as a response."""
    body = anthropic_body(error.status, error.body) if anthropic else error.body
    return web.Response(status=error.status, body=body, headers={hdrs.CONTENT_TYPE: JSON, **headers, **error.headers})


def runtime_error_body(status: int, code: str, message: str, request_id: str) -> bytes:
    """An error of the runtime: see `pierhead.http_errors`. The request's id is in the answer's head."""
    return error_body(message, kind=SERVER if status >= 500 or code == "backpressure" else INVALID, code=code)


def anthropic_runtime_error_body(status: int, code: str, message: str, request_id: str) -> bytes:
    """The same for Anthropic's clients."""
    return anthropic_body(status, runtime_error_body(status, code, message, request_id))


def anthropic_body(status: int, body: bytes) -> bytes:
    """OpenAI's error object as Anthropic's; a body that is none of them does not change."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, TypeError, KeyError):
        return body
    kind = _ANTHROPIC.get(status, INVALID if status < 500 else "api_error")
    return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()


def error_event(status: int, code: str, message: str, *, anthropic: bool = False) -> bytes:
    """The last event of a stream that failed after it began; not even [DONE] follows."""
    body = error_body(message, kind=SERVER, code=code)
    if anthropic:
        return b"event: error\ndata: " + anthropic_body(status, body) + b"\n\n"
    return b"data: " + body + b"\n\n"


def wrong(param: str, expected: str, found: object, code: str = "invalid_type") -> ApiError:
    """400: a member of the body is invalid."""
    return ApiError(400, f"{param}: expected {expected}, found {shown(found)}", code=code, param=param)


def no_model(models: Sequence[str]) -> ApiError:
    """400: the request names no model, and several are served, or none for its key."""
    names = ": " + ", ".join(models[:20]) if models else ""
    message = f"you must provide a model parameter{names}; GET /v1/models lists what there is"
    return ApiError(400, message, code="missing_required_parameter", param="model")


def unknown_model(name: str) -> ApiError:
    """404: with OpenAI's message, which clients look for."""
    message = f"The model `{name[:200]}` does not exist; GET /v1/models lists those that do."
    return ApiError(404, message, code="model_not_found", param="model")


def wrong_form(where: str, found: str, *, stream: bool) -> ApiError:
    """502: whole where a stream was asked for, or the reverse. `found`: the answer's content type."""
    message = (
        f"{where} answered with {found}: expected {EVENTS if stream else JSON}, because the request's `stream` is "
        f"{json.dumps(stream)}; its engine, or the server behind the engine, must do what `stream` says"
    )
    return ApiError(502, message, kind=SERVER, code="internal")


def unknown_path(path: str) -> ApiError:
    """404: there is nothing of this name below /v1, whatever the engine is."""
    return ApiError(404, f"no route for {path[:200]}; expected a path of OpenAI's API", code="not_found")
