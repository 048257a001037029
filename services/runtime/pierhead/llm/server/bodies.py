"""Reads a request's JSON body once, with the overrides of LLMRequest. Pure.

body = bodies.read(request)         # a wrong body raises here, before the engine sees the request
model = body["model"]
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

from pierhead.llm.openai_error import kind_of
from pierhead.llm.server.errors import LLMRequestError
from pierhead.llm.v1.llm_pb2 import LLMRequest

Body = dict[str, Any]

_OPERATORS = frozenset({"load_lora_adapter", "unload_lora_adapter"})
"""Paths of OpenAI-compatible servers that are the operator's; the others are for clients."""


def read(request: LLMRequest) -> Body:
    """The body's members, those of `overrides` and the `model` of LLMRequest in their place.

    Raises LLMRequestError: 400 where the body is not a JSON object, naming what was found.
    """
    body = _object(request.body, "the request's body")
    if request.overrides:
        body.update(_object(request.overrides, "LLMRequest.overrides"))
    if request.model:
        body["model"] = request.model
    return body


def written(request: LLMRequest) -> bytes:
    """The body as JSON again, for engines that take bytes; the client's own bytes if there are no overrides."""
    body = read(request)
    if not request.overrides and json.loads(request.body).get("model") == body.get("model"):
        return request.body
    return json.dumps(body).encode()


def model_of(request: LLMRequest) -> str:
    """The model that the body names, for requests without LLMRequest.model. Raises LLMRequestError."""
    model = read(request).get("model")
    if not isinstance(model, str):
        raise wrong("model", "a string", model)
    return model


def is_for_clients(path: str) -> bool:
    """Whether a path belongs to the API for clients. Paths for adapters are the operator's. Paths with dots are
    refused: normalised, they could lead to any page of the server behind an engine."""
    parts = unquote(path).split("/")
    return path.startswith("/") and not {".", ".."} & set(parts) and not (_OPERATORS & set(parts))


def _object(text: bytes | str, what: str) -> Body:
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise LLMRequestError(f"{what} is not JSON: {error}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise LLMRequestError(f"{what}: expected a JSON object, found {kind_of(found)}", code="invalid_type")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def wrong(name: str, expected: str, found: object) -> LLMRequestError:
    """The error for a member of the wrong kind."""
    return LLMRequestError(f"{name}: expected {expected}, found {kind_of(found)}", param=name, code="invalid_type")
