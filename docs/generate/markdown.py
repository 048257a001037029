"""Text of the code as Markdown."""

from __future__ import annotations

import re

_CODE = re.compile(r"(`[^`]*`)")
_SPECIAL = re.compile(r"([\\*\[\]])")


def escape(text: str) -> str:
    """Return text that Markdown shows as it is written; `code` stays code."""
    return "".join(part if part.startswith("`") else _plain(part) for part in _CODE.split(text))


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return escape(" ".join(text.split())).replace("|", "\\|")


def _plain(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text.replace("<", "&lt;"))
