"""Finds values of YAML that JSON cannot hold: dates, bytes, keys that are numbers, .nan. Pure.

For settings that are written in YAML and sent as JSON: a value is sent unchanged or refused, never converted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple


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
