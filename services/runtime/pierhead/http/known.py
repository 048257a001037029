"""Whether the installed aiohttp is one whose inner ways are known here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import FunctionType
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.web_urldispatcher import UrlDispatcher

KNOWN = ("3.14.",)


def is_known(version: str = aiohttp.__version__) -> bool:
    """Whether what goes on inside this aiohttp is known here: its version is, and nobody has put functions of their own
    in place of what is gone around (tracers do).
    """
    around: tuple[Any, ...] = (
        web.Application._handle,
        UrlDispatcher.resolve,
        web.RequestHandler.finish_response,
        web.StreamResponse.prepare,
        web.StreamResponse.write_eof,
        web.Response._start,
        web.Response.write_eof,
    )
    return version.startswith(KNOWN) and are_aiohttps_own(around)


def are_aiohttps_own(functions: Iterable[Any]) -> bool:
    """Whether nobody has put something in their place."""
    return all(type(each) is FunctionType and Path(each.__code__.co_filename).parent == _PLACE for each in functions)


_PLACE = Path(aiohttp.__file__).parent
