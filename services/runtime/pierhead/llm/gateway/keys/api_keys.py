"""API keys: the models and limits of each. Pure; `key_file` reads them.

[{"name": "team-a", "sha256": "<hex of the key's SHA-256>", "models": ["*"], "requests_per_minute": 600,
  "tokens_per_minute": 100000, "max_concurrent": 50}]

`models` are names of models as clients ask for them, or patterns: "*", "qwen*", "qwen:*" (its adapters).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pierhead.llm.openai_error import kind_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEYS = ("name", "sha256", "models", "requests_per_minute", "tokens_per_minute", "max_concurrent")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, of which only the hash is known."""

    name: str
    """Its label in metrics."""
    digest: bytes
    models: tuple[str, ...] = ("*",)
    requests_per_minute: float | None = None
    """Of all gateways together; None = no limit."""
    tokens_per_minute: float | None = None
    max_concurrent: float | None = None
    """Requests at a time, of all gateways together."""

    def may_use(self, names: Iterable[str]) -> bool:
        """Whether any of a model's names is in its scope."""
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.models)


def digest_of(key: str) -> bytes:
    """SHA-256 of a key."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def find_key(keys: Iterable[ApiKey], presented: str) -> ApiKey | None:
    """The key whose digest is that of `presented`. Takes as long for a wrong one as for a right one."""
    digest, found = digest_of(presented), None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Parse the file's text. Raises ValueError that names every problem, a line each, and never a digest."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON, a list of keys; {error}") from None
    if not isinstance(found, list):
        expected = 'a list of keys, [{"name": ..., "sha256": ...}]'
        raise ValueError(f"expected {expected}, found {_kind(found)}")  # noqa: TRY004 - one error for what is no file of keys
    problems: list[str] = []
    keys = [key for index, entry in enumerate(found) if (key := _key(f"[{index}]", entry, problems)) is not None]
    for what, values in (("name", [key.name for key in keys]), ("sha256", [key.digest for key in keys])):
        if len(set(values)) < len(values):
            problems.append(f"{what}: expected a different one for each key")
    if problems:
        raise ValueError("\n".join(problems))
    return tuple(keys)


def _key(where: str, entry: object, problems: list[str]) -> ApiKey | None:
    before = len(problems)
    if not isinstance(entry, dict):
        problems.append(f"{where}: expected an object of {', '.join(_KEYS)}, found {_kind(entry)}")
        return None
    problems.extend(f"{where}.{key}: unknown; there are {', '.join(_KEYS)}" for key in entry if key not in _KEYS)
    name, sha256, models = entry.get("name"), entry.get("sha256"), entry.get("models", ["*"])
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        problems.append(f"{where}.name: expected up to 63 letters, digits, and . _ @ - within, found {_kind(name)}")
    if not isinstance(sha256, str) or _SHA256.fullmatch(sha256.lower()) is None:
        problems.append(f"{where}.sha256: expected 64 hexadecimal digits (printf %s KEY | sha256sum)")
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        problems.append(f'{where}.models: expected a list of names or patterns such as "*", found {_kind(models)}')
    limits = [_limit(f"{where}.{what}", entry.get(what), problems) for what in _KEYS[3:]]
    if len(problems) > before:
        return None
    return ApiKey(str(name), bytes.fromhex(str(sha256)), tuple(models), *limits)


def _limit(where: str, value: object, problems: list[str]) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e12:
        problems.append(f"{where}: expected a number above 0 (leave it out for no limit), found {_kind(value)}")
        return None
    return float(value)


def _kind(value: object) -> str:
    """The kind of a value; not the value, which may be a misplaced secret."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value)[:40] if is_number else kind_of(value)
