"""What may be read as JSON, and what JSON can hold. Pure.

Bodies of requests count as JSON by their Content-Type alone. Settings are written in YAML and sent as JSON: a value is
sent unchanged or refused, never converted. JSON cannot hold dates, bytes, keys that are numbers, and .nan.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

_JSON = re.compile(r"application/(?:[a-z0-9.!#$&^_-]+\+)?json")


class NotJson(NamedTuple):
    """A value that JSON cannot hold."""

    place: tuple[object, ...]
    """The keys and indices of its path."""
    value: object
    is_key: bool = False
    """The mapping at `place` has `value` as a key."""


def find_not_json(value: object, place: tuple[object, ...] = ()) -> NotJson | None:
    """The first value that JSON cannot hold, or None. Raises RecursionError for too deep a value."""
    match value:
        case None | bool() | int() | str():
            return None
        case float():
            return None if math.isfinite(value) else NotJson(place, value)
        case Mapping():
            odd = [NotJson(place, key, is_key=True) for key in value if not isinstance(key, str)]
            found = (find_not_json(inner, (*place, key)) for key, inner in value.items())
            return odd[0] if odd else next((each for each in found if each), None)
        case list():
            found = (find_not_json(inner, (*place, number)) for number, inner in enumerate(value))
            return next((each for each in found if each), None)
        case _:
            return NotJson(place, value)


def not_json(content_type: str | None) -> str:
    """What is wrong with the Content-Type of a body that is to be read as JSON; "" = nothing.

    Browsers let any web page send text, forms and bodies without a type to any address, this machine's included. For
    other types they ask the server first.
    """
    found = (content_type or "").partition(";")[0].strip().lower()
    if _JSON.fullmatch(found):
        return ""
    return f"Content-Type: expected application/json, found {found[:80] or 'none'}; with curl, send the body by --json"
