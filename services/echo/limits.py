"""What both echo services agree on beyond proto/pierhead/echo/v1/echo.proto."""

from __future__ import annotations

from typing import Final

MAX_TOKENS: Final = 100_000
"""Pieces of one stream, at most."""
