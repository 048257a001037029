"""Responses as most of them are, short and whole, written at once.

aiohttp prepares a response in a dozen steps, because it may be a stream, compressed, chunked, or answer HTTP/1.0. For
one that is none of that the result is known beforehand: the very bytes that aiohttp would write, for a third of the
time. What is not plainly short and whole is left to aiohttp.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import formatdate

from aiohttp import hdrs, web
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11
from aiohttp.http_writer import _serialize_headers

from pierhead.request import REQUEST_ID_KEY

SHORT_BYTES = 32 * 1024
"""A longer body may have to wait until the client has taken it."""

_WITHOUT_BODY = frozenset((*range(100, 200), 204, 205, 304))

_WITHOUT_BODY_BY_METHOD = frozenset((hdrs.METH_HEAD, hdrs.METH_CONNECT))

_NOT_OURS = (
    hdrs.CONTENT_LENGTH, hdrs.TRANSFER_ENCODING, hdrs.CONNECTION, hdrs.DATE, hdrs.SERVER, REQUEST_ID_KEY,
)  # fmt: skip
"""Headers that are added here. Where a handler has set one, aiohttp knows what to make of it."""


class ShortResponses:
    """Writes them."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._second = 0
        self._dated = ""

    def write(self, request: web.Request, response: web.Response, request_id: str) -> bool:
        """Write `response` to `request`; False when that is aiohttp's to do, and nothing was written.

        Raises ValueError for headers that no response may have.
        """
        body, message, transport = response._body, request._message, request.transport
        if (
            body.__class__ is not bytes
            or not 0 < len(body) <= SHORT_BYTES
            or response._keep_alive is not None
            or response._chunked
            or response._compression
            or response._cookies
            or response._eof_sent
            or response._payload_writer is not None
            or request.writer.output_size  # the handler has sent another response by itself
            or response._status in _WITHOUT_BODY
            or message.should_close
            or message.method in _WITHOUT_BODY_BY_METHOD
            or message.version != HttpVersion11
            or transport is None
            or transport.is_closing()
        ):
            return False
        headers = response._headers
        typed = hdrs.CONTENT_TYPE in headers
        if (not typed or len(headers) > 1) and any(name in headers for name in _NOT_OURS):
            return False
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._dated = f"Date: {formatdate(second, usegmt=True)}\r\nServer: {SERVER_SOFTWARE}\r\n"
        added = (
            f"Content-Length: {len(body)}\r\n{'' if typed else _UNTYPED}{self._dated}"
            f"{REQUEST_ID_KEY}: {request_id}\r\n\r\n"
        )
        head = _serialize_headers(f"HTTP/1.1 {response._status} {response._reason}", headers)
        written = b"".join((head[:-2], added.encode(), body))
        transport.write(written)
        # As aiohttp leaves them.
        request.writer.output_size += len(written)
        response._body_length = len(written)
        response._keep_alive = response._eof_sent = True
        return True


_UNTYPED = "Content-Type: application/octet-stream\r\n"
