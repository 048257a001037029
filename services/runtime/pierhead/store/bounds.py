"""The bounds of the shared store, and the errors that name them. Checked by callers and by the store itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

MOST_KEY_BYTES = 256
MOST_VALUE_BYTES = 4096
MOST_KEYS_AT_ONCE = 512
"""Keys in one request. A reply then takes at most 2 MiB."""
MOST_BYTES_AT_ONCE = 128 * 1024
MOST_KEYS = 100_000
MOST_BYTES = 32 * 1024 * 1024
"""Keys and values that are kept."""
LONGEST_TTL_S = 86_400.0
LARGEST_NUMBER = 2**63 - 1
MOST_IN_FLIGHT = 256
"""Requests of one process that have not been answered yet."""


def check_keys(keys: Sequence[str]) -> None:
    """Raise ValueError for keys that cannot be read together."""
    if len(keys) > MOST_KEYS_AT_ONCE:
        raise ValueError(f"shared store: expected at most {MOST_KEYS_AT_ONCE} keys at once, found {len(keys)}")
    for key in keys:
        if not 0 < size_of(key) <= MOST_KEY_BYTES:
            raise ValueError(
                f"shared store: expected a key of 1 to {MOST_KEY_BYTES} bytes, found {size_of(key)}: {key[:60]!r}"
            )


def check_values(values: Mapping[str, str], ttl_s: float) -> None:
    """Raise ValueError for values that cannot be set together."""
    check_keys(list(values))
    check_ttl(ttl_s)
    for key, value in values.items():
        if size_of(value) > MOST_VALUE_BYTES:
            raise ValueError(
                f"shared store: {key}: expected a value of at most {MOST_VALUE_BYTES} bytes, found {size_of(value)}"
            )
    size = sum(size_of(key) + size_of(value) for key, value in values.items())
    if size > MOST_BYTES_AT_ONCE:
        raise ValueError(
            f"shared store: expected at most {MOST_BYTES_AT_ONCE} bytes of keys and values at once, found {size}"
        )


def check_ttl(ttl_s: float) -> None:
    """Raise ValueError for a time that a key cannot live."""
    if not (math.isfinite(ttl_s) and 0 < ttl_s <= LONGEST_TTL_S):
        raise ValueError(f"shared store: ttl_s: expected seconds above 0, at most {LONGEST_TTL_S:.0f}, found {ttl_s}")


def size_of(text: str) -> int:
    """Bytes of a text. Raises ValueError for one that UTF-8 cannot hold."""
    return len(text.encode())
