"""What explains the state of a stack, in one text, without secrets. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

REMOVED = "(removed)"
MOST_OF_SECTION = 500_000
"""Characters; of a longer section the end stays."""
_WORDS = "token(?!s)|secret|passw(?:or)?d|pwd|credential|api[_-]?key|private[_-]?key|webhook|authorization"
_NAME = rf"[\w.-]{{0,60}}(?:{_WORDS})[\w.-]{{0,60}}"
_NAMED: Final = re.compile(rf"""(?i)(["']?\b{_NAME}["']?\s*[=:]\s*)(?:"[^"\n]*"|'[^'\n]*'|[^\s,;&}}\]]+)""")
"""A value that is named as a secret, in JSON, YAML, a query or a log line."""
_SHAPED: Final = re.compile(
    r"(?i)\b(?:Bearer|Basic) +[\w.~+/=-]{8,}"
    r"|\b(?:ph|sk|hf|ghp|xox[abp])[_-][\w-]{16,}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----"
)
"""What is a secret by its form: keys of APIs, JSON Web Tokens, private keys."""
_USER_IN_URL: Final = re.compile(r"(\b[a-z][a-z0-9+]{1,15}://)[^\s/@:]{0,200}:[^\s/@]{1,500}@", re.IGNORECASE)
_SECRET_SETTING: Final = re.compile(_NAME, re.IGNORECASE)


def secrets_of(settings: Mapping[str, str]) -> frozenset[str]:
    """The values of settings whose names say that they are secrets."""
    return frozenset(value for name, value in settings.items() if len(value) >= 4 and _SECRET_SETTING.fullmatch(name))


def without_secrets(text: str, known: Collection[str] = ()) -> str:
    """The text without these secrets, and without what is named or formed as one."""
    for secret in sorted(known, key=len, reverse=True):
        text = text.replace(secret, REMOVED)
    text = _SHAPED.sub(REMOVED, text)
    text = _USER_IN_URL.sub(rf"\1{REMOVED}@", text)
    return _NAMED.sub(rf"\1{REMOVED}", text)


def bundle(sections: Iterable[tuple[str, str]], known: Collection[str] = ()) -> str:
    """One text of all sections (title, text)."""
    return "\n".join(f"===== {title}\n{without_secrets(_end_of(text), known).rstrip()}\n" for title, text in sections)


def contents(sections: Sequence[tuple[str, str]]) -> str:
    """The titles of the sections."""
    return ", ".join(title for title, _ in sections)


def _end_of(text: str) -> str:
    return text if len(text) <= MOST_OF_SECTION else f"(the beginning is left out)\n{text[-MOST_OF_SECTION:]}"
