"""What of a request's path and members is the same for every engine. Pure."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from pierhead.llm.openai_error import LLMRequestError, kind_of

Body = dict[str, Any]

_OPERATORS = frozenset({"load_lora_adapter", "unload_lora_adapter"})
"""Paths of OpenAI-compatible servers that are the operator's; the others are for clients."""


def is_for_clients(path: str) -> bool:
    """Whether a path belongs to the API for clients. Paths for adapters are the operator's. Paths with dots are
    refused: normalised, they could lead to any page of the server behind an engine."""
    parts = unquote(path).split("/")
    return path.startswith("/") and not {".", ".."} & set(parts) and not (_OPERATORS & set(parts))


def wrong(name: str, expected: str, found: object) -> LLMRequestError:
    """The error for a member of the wrong kind."""
    return LLMRequestError(f"{name}: expected {expected}, found {kind_of(found)}", param=name, code="invalid_type")
