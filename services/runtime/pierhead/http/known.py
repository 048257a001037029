"""Chooses how the installed aiohttp is used: with the shortcuts of `inside.py`, or only by its public interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from pierhead.edge.edge import Edge
from pierhead.http.constants import RUNNER_OPTIONS
from pierhead.http.gate import Gate

if TYPE_CHECKING:
    from pierhead.http.inside import DirectWriter

KNOWN = ("3.14.",)
"""Versions of aiohttp whose private parts `inside.py` knows."""


def is_known() -> bool:
    """Whether `inside.py` may be imported."""
    return aiohttp.__version__.startswith(KNOWN)


def runner_for(app: web.Application, edge: Edge) -> tuple[Gate, web.AppRunner]:
    """The gate and the runner of an application that has not been started."""
    if is_known():
        from pierhead.http import inside

        if inside.is_untouched():
            runner = inside.GateRunner(app, edge)
            return runner.gate, runner
    gate = Gate(app, edge)
    gate.join()
    return gate, web.AppRunner(app, **RUNNER_OPTIONS)


def direct_writer(writer: AbstractStreamWriter) -> DirectWriter | None:
    """A writer for the pieces of a prepared response whose first piece was written; None if they have to go through
    `writer`.
    """
    if not is_known():
        return None
    from pierhead.http import inside

    return inside.direct_writer(writer)


def event_response() -> type[web.StreamResponse]:
    """The class for a response of events; with a known aiohttp its head is sent with the first event."""
    if not is_known():
        return web.StreamResponse
    from pierhead.http import inside

    return inside.EventResponse
