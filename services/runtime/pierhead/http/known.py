"""Chooses how the installed aiohttp is used: with the shortcuts of `inside.py`, or only by its public interface."""

from __future__ import annotations

from typing import Any

import aiohttp

KNOWN = ("3.14.",)
"""Versions of aiohttp whose private parts `inside.py` knows."""


def is_known() -> bool:
    """Whether `inside.py` may be imported."""
    return aiohttp.__version__.startswith(KNOWN)


def shortcuts() -> Any:
    """The module `inside`; None where it may not be imported."""
    if not is_known():
        return None
    from pierhead.http import inside

    return inside
