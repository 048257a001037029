"""Metadata as a lane carries it: keys and values in turn, binary values (keys that end in "-bin") as base64."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from typing import Any

Pair = tuple[str, str | bytes]

_KEY = re.compile(r"[a-z0-9_.-]+")

MAX_BYTES = 16 * 1024
"""Most bytes of one call's metadata in each direction; plain gRPC's limit in connection.CHANNEL_OPTIONS."""


def flatten(metadata: Iterable[Pair]) -> list[str]:
    """Pairs -> [key, value, key, value, ...]. Raises TypeError or ValueError for metadata that gRPC would refuse.

    Everything is checked here: an invalid packet would end the lane, and with it all other calls.
    """
    flat: list[str] = []
    for key, value in metadata:
        if key.endswith("-bin"):
            value = b64encode(value if isinstance(value, bytes) else value.encode()).decode()
        lower = key.lower()
        if not _KEY.fullmatch(lower):
            raise ValueError(f"metadata {key!r}: expected a key of ASCII letters, digits, _, - and .")
        flat += (lower, text_of(key, value))
    if flat and size_of(flat) > MAX_BYTES:
        raise ValueError(f"metadata: expected at most {MAX_BYTES} bytes, found {size_of(flat)}; send it in the message")
    return flat


def text_of(key: str, value: Any) -> str:
    """A value that can stand in a header. Raises TypeError or ValueError."""
    if isinstance(value, bytes):
        value = value.decode("ascii")
    if not isinstance(value, str):
        raise TypeError(f'metadata "{key}": expected str or bytes, found {type(value).__name__}')
    if not (value.isascii() and value.isprintable()):
        raise ValueError(
            f'metadata "{key}": expected printable ASCII, found {value!r}; other bytes need a key with -bin'
        )
    return value


def size_of(flat: Sequence[str]) -> int:
    """The approximate bytes of flat metadata in a packet."""
    return sum(map(len, flat)) + 4 * len(flat)


def unflatten(flat: Sequence[str]) -> tuple[Pair, ...]:
    """The inverse of `flatten`. Raises ValueError for input that `flatten` does not produce."""
    if not flat:
        return ()
    if len(flat) % 2:
        raise ValueError(f"metadata: expected keys and values in turn, found {len(flat)} strings")
    return tuple(
        (key, b64decode(value, validate=True) if key.endswith("-bin") else value)
        for key, value in zip(flat[::2], flat[1::2], strict=True)
    )
