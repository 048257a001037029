"""The errors of an LLM replica. They are PierheadErrors, so each has its gRPC status and HTTP code."""

from __future__ import annotations

from pierhead.errors import BadRequest, Broken, PierheadError, Unavailable
from pierhead.llm.openai_error import LLMRequestError as LLMRequestError


class LLMStartError(PierheadError):
    """The engine or its model could not be loaded. The message says what, where, why, and what to do."""


class SourceNotFoundError(LLMStartError):
    """A model or an adapter was not found at its source."""


class EngineStalledError(Broken):
    """The engine has requests and makes no tokens."""


class EngineDiedError(Broken):
    """The engine has reported that it died."""


class UpstreamError(PierheadError):
    """The server behind an engine sent an invalid answer."""

    http_status = 502


class NotSupported(BadRequest):
    """The engine does not support the operation."""


def not_started() -> Unavailable:
    """The error for a request or an operation before the engine has started."""
    return Unavailable("the engine is not started yet; ask again when the replica is ready")


def unknown_model(model: str, served: str) -> LLMRequestError:
    """OpenAI's answer for an unknown model; `served`: a text that names the served models."""
    return no_such_model(f'the model "{model}" does not exist: this replica serves {served}')


def no_such_model(message: str) -> LLMRequestError:
    """OpenAI's answer for an unknown model."""
    return LLMRequestError(message, status=404, code="model_not_found", param="model")


def unknown_path(path: str) -> LLMRequestError:
    """The answer for a path that the engine does not serve."""
    return LLMRequestError(f"this model's engine does not serve {path}", status=404, code="not_found")
