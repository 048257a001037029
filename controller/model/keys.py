"""Keys of clients: who may call the services that ask for one (x-serve.auth: key), and how much. Pure.

The state and HAProxy know the SHA-256 of a key alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from dataclasses import dataclass, field, fields
from operator import attrgetter

NAME = re.compile(r"[A-Za-z0-9._@-]{1,63}")
MODEL = re.compile(r"[A-Za-z0-9._:/@*?\[\]!-]{1,200}")
"""A model's name, or a pattern."""
DAY_S = 86_400.0


def random_key() -> str:
    """A new key of a client."""
    return f"sk-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> str:
    """The hash of a key, which the state and HAProxy know in its place."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


@dataclass(frozen=True, slots=True)
class ServiceKey:
    """One key. A limit of 0 is none."""

    name: str
    digest: str = field(repr=False)
    """SHA-256 of the key, in hexadecimal digits. Enough for a random key of 256 bits."""
    made_at: float
    """Unix time, as `ends_at`."""
    services: tuple[str, ...] = ()
    """Those that it opens; () = every one."""
    models: tuple[str, ...] = ()
    """Names and patterns ("qwen*") of the language models that it may use; () = all."""
    per_minute: int = 0
    """Requests."""
    tokens_per_minute: int = 0
    """Of language models."""
    concurrent: int = 0
    """Requests at a time."""
    ends_at: float | None = None
    """From when on it opens nothing; None = never."""


_TOLD = attrgetter(*(each.name for each in fields(ServiceKey)))


@dataclass(frozen=True, slots=True)
class KeySet:
    """The keys that are in force."""

    keys: tuple[ServiceKey, ...] = field(default=(), repr=False, compare=False)
    digest: str = ""
    """Of all of them; "" for NO_KEYS alone."""

    @classmethod
    def of(cls, keys: tuple[ServiceKey, ...]) -> KeySet:
        """These keys, with their digest."""
        told = sorted(map(_TOLD, keys))
        return cls(keys, hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16])


NO_KEYS = KeySet()
"""Nothing asks for one."""
