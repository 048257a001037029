"""Reads the parts of a request's body that the gateway needs; the engine reads the rest. Pure.

Bodies are JSON, or forms (audio/transcriptions), of which the fields `model` and `stream` are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pierhead.json_data import not_json
from pierhead.llm.gateway.body.media import refuse_addresses
from pierhead.llm.gateway.body.multipart import FormField, form_fields
from pierhead.llm.gateway.body.prompt_text import PromptText, prompt_text, prompts
from pierhead.llm.gateway.errors import ApiError, wrong

FORM = "multipart/form-data"

MAX_VALUES = 2**20
"""Most values in a body, counted by its commas and brackets: enough for a prompt of a million token ids. A body of
brackets alone would take half a minute to parse, and would block all other requests during it.
"""

MOST = 2**31 - 1
"""Of what is counted."""

_TRUE = ("true", "1", "on", "yes", "t", "y")
"""The words for true in forms, as vLLM takes them."""

OPERATORS = frozenset({"kv_transfer_params", "ec_transfer_params", "priority"})
"""Members of vLLM's API for operators only, removed from every client's body. The first two make an engine connect to
the address that they name and read other clients' blocks; `priority` overtakes other clients.
"""

_NUMBER = re.compile(r"\s*[+-]?[0-9]{1,15}(?:\.0*)?\s*")

_REMOVED = OPERATORS | {"model"}

ENGINE_ARGUMENTS = "vllm_xargs"
"""An object that vLLM merges into its own arguments: the same members are removed there."""

_AT_ONCE = 2**20
"""Bytes of a body that are looked at before its size is judged."""


@dataclass(frozen=True, slots=True)
class RequestParts:
    """The parts of a request that the gateway needs."""

    model: str
    """"" = none is named."""
    stream: bool
    prompt: PromptText
    choices: int
    """Answers in all: `n` to each prompt."""
    members: frozenset[str]
    """Names of the body's members; empty for a form."""
    field: FormField | None = None
    """Of a form: the field with the model's name."""
    cleaned: bytes | None = None
    """The body without the operator's members; None if it has none of them."""

    def body_for(self, body: bytes, model: str) -> bytes:
        """The body for the service. In a form the model's name is replaced; JSON has LLMRequest.model for it."""
        if self.cleaned is not None:
            return self.cleaned
        field = self.field
        if field is None or body[field.begin : field.end] == model.encode():
            return body
        return b"".join((body[: field.begin], model.encode(), body[field.end :]))


NOTHING_ASKED = RequestParts("", False, PromptText("", 0), 1, frozenset())
"""Of a request without a body."""


def read_body(
    body: bytes, content_type: str, *, messages: bool = False, media_hosts: Collection[str] = ()
) -> RequestParts:
    """Read a body. `messages`: it must have them. `media_hosts`: where engines may fetch what a request names.

    Raises ApiError for the first problem: 400, or 413.
    """
    if content_type.partition(";")[0].strip().lower() == FORM:
        return _read_form(body, content_type)
    if problem := not_json(content_type):
        raise ApiError(400, problem, code="invalid_content_type")
    found = _parse(body)
    model, stream = _model(found.get("model")), found.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise wrong("stream", "a boolean", stream)
    if messages and not isinstance(found.get("messages"), list):
        raise wrong("messages", "a list of messages", found.get("messages"))
    refuse_addresses(found, media_hosts)
    choices = _choices(found) * prompts(found)
    kept = _for_clients(found)
    cleaned = None if kept == found else json.dumps(kept).encode()
    return RequestParts(model, bool(stream), prompt_text(found, len(body)), choices, frozenset(kept), None, cleaned)


def _for_clients(found: Mapping[str, object]) -> Mapping[str, object]:
    """The members that a client may set. Some servers behind the engine `openai` ignore the case of names: for them
    `Model` would be another model than the one that the client's key was checked for.
    """
    kept = {name: value for name, value in found.items() if name == "model" or name.casefold() not in _REMOVED}
    extra = found.get(ENGINE_ARGUMENTS)
    if isinstance(extra, dict) and OPERATORS & extra.keys():
        kept[ENGINE_ARGUMENTS] = {name: value for name, value in extra.items() if name not in OPERATORS}
    return kept


def _parse(body: bytes) -> Mapping[str, object]:
    values = 0
    for begin in range(0, len(body), _AT_ONCE):
        values += sum(body.count(mark, begin, begin + _AT_ONCE) for mark in (b",", b"[", b"{"))
        if values > MAX_VALUES:
            message = f"the request body holds more than the {MAX_VALUES} values that this gateway takes; send less"
            raise ApiError(413, message, code="payload_too_large")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        message = f"We could not parse the JSON body of your request: {error}. Send an object with a member `model`."
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body: expected a JSON object with a member `model`", code="invalid_json")
    return found


def _model(model: object) -> str:
    if model is not None and not isinstance(model, str):
        raise wrong("model", "a string", model)
    return model or ""


def _choices(found: Mapping[str, object]) -> int:
    """The member `n`; 1 if it is absent. Engines take a number in a string, and 5.0, as an integer."""
    given = value = found.get("n")
    if value is None:
        return 1
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong("n", "an integer >= 1", given)
    if not 1 <= value <= MOST:
        raise wrong("n", f"an integer from 1 to {MOST}", value, "invalid_value")
    return value


def _read_form(body: bytes, content_type: str) -> RequestParts:
    fields = form_fields(body, content_type, ("model", "stream", ENGINE_ARGUMENTS))
    if ENGINE_ARGUMENTS in fields:
        message = f"the field {ENGINE_ARGUMENTS} is not for clients of this gateway; leave it out"
        raise ApiError(400, message, code="invalid_form", param=ENGINE_ARGUMENTS)
    field, stream = fields.get("model"), fields.get("stream")
    model = _model(None if field is None else field.text)
    streams = stream is not None and stream.text.lower() in _TRUE
    return RequestParts(model, streams, PromptText("", 0), 1, frozenset(), field)
