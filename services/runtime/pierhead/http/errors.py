"""Lets an aiohttp application set its own form of errors, for the runtime's (full, late, draining, no
route, a body that is too large) and for the exceptions of its handlers.

    app[ERROR_BODY] = lambda status, code, message, request_id: json.dumps({"detail": message}).encode()

Status and headers do not change; the content type is JSON. A handler adds headers to the runtime's answer for it, as
when it raises or its deadline passes:

    request[ERROR_HEADERS] = {"x-left": "9"}

and another form for it, where a path has clients of its own:

    request[ERROR_BODY_HERE] = another_error_body
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aiohttp import web

from pierhead.http.answers import ErrorBody

ERROR_BODY: Final[web.AppKey[ErrorBody]] = web.AppKey("pierhead_error_body")

ERROR_BODY_HERE: Final[web.RequestKey[ErrorBody]] = web.RequestKey("pierhead_error_body_here")

ERROR_HEADERS: Final[web.RequestKey[Mapping[str, str]]] = web.RequestKey("pierhead_error_headers")
