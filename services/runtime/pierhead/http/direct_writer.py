"""Pieces of a response that streams, written by whoever has one in hand, in the same turn of the event loop.

aiohttp's writer has to be awaited, because a client may be slow. One that keeps up never makes it wait: what is to be
written for it is known beforehand, the very bytes that aiohttp would write, and no task has to be woken to do it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_writer import StreamWriter

from pierhead.http.known import KNOWN, are_aiohttps_own


class DirectWriter:
    """Writes to a client without waiting for it."""

    __slots__ = ("_protocol", "_writer")

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._protocol: Any = writer.protocol

    def write(self, data: bytes) -> bool:
        """Write a piece; returns whether the client keeps up. Where it does not, `await writer.write(...)` is next:
        that waits, or says that the client has gone, to whom nothing is written.
        """
        protocol = self._protocol
        transport = protocol.transport
        if transport is None or transport.is_closing():
            return False
        if data:  # an empty chunk would be the end
            chunk = b"%x\r\n%b\r\n" % (len(data), data)
            self._writer.output_size += len(chunk)
            self._writer.buffer_size += len(chunk)  # by which aiohttp's own next write knows that it has to wait
            transport.write(chunk)
        return not protocol._paused


def direct_writer(writer: AbstractStreamWriter) -> DirectWriter | None:
    """For a response that has been prepared and whose first piece was written; None where that is for aiohttp alone to
    do: compressed or unchunked bodies, an aiohttp whose inside is not known here.
    """
    if not _is_known() or writer.__class__ is not StreamWriter:
        return None
    ours = cast("Any", writer)
    plain = (
        ours.chunked
        and ours.length is None
        and ours._compress is None
        and ours._on_chunk_sent is None
        and getattr(ours, "on_body_write", None) is None  # 3.14.0 has none
        and ours._headers_buf is None
        and not ours._eof
    )
    return DirectWriter(ours) if plain else None


@cache
def _is_known(version: str = aiohttp.__version__) -> bool:
    around = (StreamWriter.write, StreamWriter._write_chunked_payload, StreamWriter._writelines, StreamWriter.drain)
    return version.startswith(KNOWN) and are_aiohttps_own(around)
