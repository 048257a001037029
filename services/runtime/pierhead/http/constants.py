"""What the HTTP servers agree on: aiohttp's and uvicorn's."""

from __future__ import annotations

from typing import Final

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
