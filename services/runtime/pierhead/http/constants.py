"""What the HTTP servers agree on: aiohttp's and uvicorn's."""

from __future__ import annotations

from typing import Any, Final

KEEPALIVE_S: Final = 3600
"""Idle connections outlive HAProxy's reuse of them: the side that closes first must never be the server."""

BACKLOG: Final = 4096
"""Connections that the kernel holds until they are accepted."""

MALFORMED: Final = "malformed"
"""Label of what is not HTTP."""

CLIENT_LEFT: Final = "499"
"""Counted when the client goes away before its answer: nginx's number, which HAProxy's readers know, too."""

INTERNAL_ERROR: Final = 1011
"""WebSocket close code: the handler has failed; the reason is the error's code (RFC 6455, 7.4.1)."""

SERVICE_RESTART: Final = 1012
"""WebSocket close code: the server ends, connect again (IANA's registry of close codes)."""

TRY_AGAIN_LATER: Final = 1013
"""WebSocket close code: the server is full (the same registry)."""

MAX_HEAD_BYTES: Final = 32 * 1024
"""Of a request line or a header. HAProxy takes heads of 16 KiB at most and answers longer ones itself."""

RUNNER_OPTIONS: Final[dict[str, Any]] = {
    "handle_signals": False,
    "access_log": None,  # the edge writes a line for each request
    "keepalive_timeout": KEEPALIVE_S,
    "handler_cancellation": True,
    "max_line_size": MAX_HEAD_BYTES,
    "max_field_size": MAX_HEAD_BYTES,
    "shutdown_timeout": 0.1,  # the drain is over by then
}
"""How an `aiohttp.web.AppRunner` runs in a replica."""
