"""Text from outside, made fit to be kept and shown. Pure.

A replica's JSON may hold any code point, half a character ("\\udce9") and line breaks among them. UTF-8 has no form for
the former, so neither a file nor a socket takes it; the latter would break a table.
"""

from __future__ import annotations

import re

_BREAKS = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def storable(text: str) -> str:
    """The text with every lone surrogate written as its escape: it has a form in UTF-8, and keeps its meaning."""
    return text.encode(errors="backslashreplace").decode()


def one_line(text: str) -> str:
    """Storable text without line breaks and control characters, each run of which becomes one space."""
    return _BREAKS.sub(" ", storable(text)).strip()
