"""What the gateway reads of a request's body; the rest is the engine's. Pure.

JSON for all paths but those that take forms (audio/transcriptions), of which the fields `model` and `stream` are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from services.llm.gateway.errors import ApiError, wrong
from services.llm.gateway.multipart import form_fields
from services.llm.gateway.prompt_text import PromptText, prompt_text

FORM = "multipart/form-data"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as far as the gateway has to understand it."""

    model: str
    stream: bool
    prompt: PromptText
    max_tokens: int
    """Of each choice; 0 = the request does not say."""
    choices: int
    """`n`"""
    members: frozenset[str]
    """Names of the body's members; empty for a form."""

    @property
    def tokens(self) -> int:
        """An estimate of what it will use, for limits."""
        return self.prompt.tokens + self.max_tokens * self.choices


def read_body(body: bytes, content_type: str, *, messages: bool = False) -> Asked:
    """Read a body. `messages`: it has to have them. Raises ApiError 400 for the first thing that is wrong."""
    if content_type.partition(";")[0].strip().lower() == FORM:
        return _read_form(body, content_type)
    found = _parse(body)
    model, stream = _model(found.get("model")), found.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise wrong("stream", "a boolean", stream)
    if messages and not isinstance(found.get("messages"), list):
        raise wrong("messages", "a list of messages", found.get("messages"))
    limits = [_count(found, name, 0) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")]
    choices = _count(found, "n", 1)
    return Asked(model, bool(stream), prompt_text(found), max(limits), choices, frozenset(found))


def _parse(body: bytes) -> Mapping[str, object]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        message = f"We could not parse the JSON body of your request: {error}. Send an object with a member `model`."
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body: expected a JSON object with a member `model`", code="invalid_json")
    return found


def _model(model: object) -> str:
    if model is None or model == "":
        message = "you must provide a model parameter; GET /v1/models lists what there is"
        raise ApiError(400, message, code="missing_required_parameter", param="model")
    if not isinstance(model, str):
        raise wrong("model", "a string", model)
    return model


def _count(found: Mapping[str, object], name: str, least: int) -> int:
    """A number of something; `least` where it is not given."""
    value = found.get(name)
    if value is None:
        return least
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(name, f"an integer >= {least}", value)
    if not least <= value < 2**31:
        raise wrong(name, f"an integer >= {least}", value, "invalid_value")
    return value


def _read_form(body: bytes, content_type: str) -> Asked:
    fields = form_fields(body, content_type, ("model", "stream"))
    model = _model(fields.get("model"))
    return Asked(model, fields.get("stream") == "true", PromptText("", 0), 0, 1, frozenset())
