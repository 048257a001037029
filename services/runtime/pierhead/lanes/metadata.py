"""Metadata as a lane carries it: keys and values in turn, binary values (keys that end in "-bin") as base64."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence

Pair = tuple[str, str | bytes]


def flatten(metadata: Iterable[Pair]) -> list[str]:
    """Pairs -> [key, value, key, value, ...]. Raises ValueError as gRPC would refuse them."""
    flat: list[str] = []
    for key, value in metadata:
        if key.endswith("-bin"):
            value = b64encode(value if isinstance(value, bytes) else value.encode()).decode()
        elif isinstance(value, bytes):
            value = value.decode("ascii")
        flat += (key.lower(), value)
    return flat


def unflatten(flat: Sequence[str]) -> tuple[Pair, ...]:
    """The other way. Raises ValueError for what `flatten` does not make."""
    if not flat:
        return ()
    if len(flat) % 2:
        raise ValueError(f"metadata: expected keys and values in turn, found {len(flat)} strings")
    return tuple(
        (key, b64decode(value, validate=True) if key.endswith("-bin") else value)
        for key, value in zip(flat[::2], flat[1::2], strict=True)
    )
