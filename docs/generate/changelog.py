"""The changelog as a page."""

from __future__ import annotations

from pathlib import Path


def page(root: Path) -> str:
    """Return CHANGELOG.md as it is."""
    return (root / "CHANGELOG.md").read_text(encoding="utf-8")
