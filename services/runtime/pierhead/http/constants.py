"""Constants that both HTTP servers use: aiohttp's and uvicorn's."""

from __future__ import annotations

from typing import Any, Final

KEEPALIVE_S: Final = 3600
"""Keep-alive time: longer than HAProxy reuses idle connections, so that the server never closes first."""

BACKLOG: Final = 4096
"""Connections that the kernel queues until they are accepted."""

MALFORMED: Final = "malformed"
"""Label of requests that are not HTTP."""

CLIENT_LEFT: Final = "499"
"""Status counted when the client leaves before its answer and its deadline: nginx's 499."""

INTERNAL_ERROR: Final = 1011
"""WebSocket close code: the handler has failed; the reason is the error's code (RFC 6455, 7.4.1)."""

SERVICE_RESTART: Final = 1012
"""WebSocket close code: the server ends, connect again (IANA's registry of close codes)."""

TRY_AGAIN_LATER: Final = 1013
"""WebSocket close code: the server is full (the same registry)."""

MAX_HEAD_BYTES: Final = 32 * 1024
"""Most bytes of a request line or a header. HAProxy accepts heads of up to 16 KiB and answers longer ones itself."""

RUNNER_OPTIONS: Final[dict[str, Any]] = {
    "handle_signals": False,
    "access_log": None,  # the edge writes a line for each request
    "keepalive_timeout": KEEPALIVE_S,
    "handler_cancellation": True,
    "max_line_size": MAX_HEAD_BYTES,
    "max_field_size": MAX_HEAD_BYTES,
    "shutdown_timeout": 0.1,  # the drain is over by then
}
