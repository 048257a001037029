"""OpenAI's error object, a refused request, and how messages show a wrong value, for both the gateway and the server.

Imports neither of them.
"""

from __future__ import annotations

import json

from pierhead.errors import BadRequest


class LLMRequestError(BadRequest):
    """A request that an engine or a server refuses: the client gets OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | int | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.http_status = status
        self.error_code = code
        self.param = param
        """The member of the body that is wrong."""


def error_body(message: str, *, kind: str, code: str | int | None = None, param: str | None = None) -> bytes:
    """OpenAI's error object as JSON: {"error": {"message", "type", "param", "code"}}."""
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()


def kind_of(value: object) -> str:
    """JSON's name for the value's kind."""
    names = {"bool": "a boolean", "int": "a number", "float": "a number", "str": "a string", "list": "an array"}
    return "null" if value is None else names.get(type(value).__name__, "an object")


def shown(value: object) -> str:
    """A value in a message: as JSON while it is short, else by its kind. Cheap, however large it is."""
    if isinstance(value, list | dict):
        return kind_of(value)
    text = json.dumps(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."
