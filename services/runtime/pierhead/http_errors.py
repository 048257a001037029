"""How an aiohttp application has its errors told in a shape of its own: those of the runtime (full, late, draining, no
route, a body that is too large) as well as what its handlers raise.

    app[ERROR_BODY] = lambda status, code, message, request_id: json.dumps({"detail": message}).encode()

Status and headers stay as they are; the content type is JSON.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

from pierhead.answers import ErrorBody

ERROR_BODY: Final[web.AppKey[ErrorBody]] = web.AppKey("pierhead_error_body")
