"""Who is at work in a thread, read from its stack: the service's own code, and the request that it works for."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from pierhead.edge.methods import ServedMethod

MOST_FRAMES = 40
"""Of a stack, from the innermost on; beyond it there are only frames of servers and of the interpreter's start."""

_NOT_OURS = tuple(
    {
        f"{path}/"
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(name)) is not None
    }
    | {f"{Path(__file__).parent}/", "<frozen"}
)


class Place(NamedTuple):
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


def place_of(frame: FrameType | None) -> Place | None:
    """The service's own frame nearest to the top; where there is none, the top one. None without a stack."""
    frames = list(_from_the_top(frame))
    ours = next((one for one in frames if not one.f_code.co_filename.startswith(_NOT_OURS)), None)
    found = ours or next(iter(frames), None)
    return None if found is None else Place(found.f_code.co_filename, found.f_lineno, found.f_code.co_qualname)


def request_of(frame: FrameType | None) -> str:
    """The gRPC method or the route that the stack works for, as metrics call it; "" where it does not tell."""
    web: Any = sys.modules.get("aiohttp.web")  # a replica without HTTP has not imported it
    for one in _from_the_top(frame):
        found = one.f_locals
        method = found.get("method")
        if isinstance(method, ServedMethod):
            return method.name
        request = found.get("request")
        if web is not None and isinstance(request, web.Request):
            resource = request.match_info.route.resource
            return f"{request.method} {resource.canonical}" if resource is not None else ""
    return ""


def stack_of(frame: FrameType | None) -> str:
    """The stack as tracebacks show it."""
    return "".join(traceback.format_stack(frame)[-MOST_FRAMES:]).rstrip() if frame is not None else "no Python code"


def _from_the_top(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
