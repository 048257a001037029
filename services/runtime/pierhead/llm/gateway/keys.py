"""What HAProxy says of a request's API key, and what it is told in the answer. Pure.

HAProxy removes these headers from what clients send, so the gateway believes them.

    x-pierhead-key: team-a            the name of the key that it has checked; absent where none was needed
    x-pierhead-models: qwen,qwen:*    the models that the key is for: names as clients ask for them, or patterns
    x-pierhead-tokens: 512            in an answer: what it adds to the tokens that the key has used in this minute
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

KEY = "x-pierhead-key"
MODELS = "x-pierhead-models"
TOKENS = "x-pierhead-tokens"

EVERY_MODEL = "*"


@dataclass(frozen=True, slots=True)
class CheckedKey:
    """The key of a request, which HAProxy has checked."""

    name: str = ""
    """Its label in metrics; "" = the request needed none."""
    models: tuple[str, ...] = (EVERY_MODEL,)

    def may_use(self, names: Iterable[str]) -> bool:
        """Whether any of a model's names is in its scope."""
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.models)


NO_KEY = CheckedKey()


def checked_key(headers: Mapping[str, str]) -> CheckedKey:
    """The key that a request's headers name."""
    name = headers.get(KEY)
    if name is None:
        return NO_KEY
    return CheckedKey(name, tuple(headers.get(MODELS, EVERY_MODEL).split(",")))
