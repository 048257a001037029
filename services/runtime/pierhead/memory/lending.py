"""A connection of a client that a caller lends to the replica of a call: docs/decisions/llm.md.

caller                                        replica
  the call ----------------------------------->
  <----------------------------------- first reply; `borrow` expects the connection
  writes the head and the first reply
  lends the connection, or says that it does not ->   writes the chunks that follow to the client
  <------------------------------------ last reply    has given the connection back
  writes the last reply and the end

The caller keeps the connection: it sees a client that leaves, and tells it of a replica that is lost.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from pierhead.tasks import wake

ARRIVAL_S = 5.0
"""The longest that a replica waits for the connection: a caller whose end of the link is not open cannot answer."""


class BorrowedConnection:
    """A client's connection in the middle of a chunked answer, or what waits for it. Belongs to one call."""

    def __init__(self, over: Callable[[], object]) -> None:
        """`over()`: it is not expected any more."""
        self._over = over
        self._arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._socket: socket.socket | None = None
        self._unfinished = False
        """Whether a part of a chunk was written."""

    def arrived(self, fd: int | None) -> None:
        """The caller lends the connection; None: it does not."""
        if fd is not None:
            try:
                self._socket = socket.socket(fileno=fd)
            except OSError:  # no socket
                os.close(fd)
        wake(self._arrival)

    async def write(self, data: bytes) -> bool:
        """Write a chunk, when the client takes it. False: nothing was written, and nothing can be from now on."""
        if not self._arrival.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrival, ARRIVAL_S)
            self._over()
        if self._socket is None:
            return False
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        sent = self._send(chunk)
        while 0 <= sent < len(chunk):
            self._unfinished = sent > 0
            chunk = chunk[sent:]
            await self._room(self._socket)
            sent = self._send(chunk)
        self._unfinished = False
        return sent >= 0

    def _send(self, data: bytes) -> int:
        """The bytes that the client took; -1 = it has left."""
        assert self._socket is not None  # noqa: S101
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self.close()
            return -1

    async def _room(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        room = loop.create_future()
        loop.add_writer(connection, wake, room)
        try:
            await room
        finally:
            loop.remove_writer(connection)

    def close(self) -> None:
        """Give it back. A chunk that is not whole ends it: what its owner wrote would be read as the chunk's rest."""
        self._over()
        connection, self._socket = self._socket, None
        if connection is not None:
            if self._unfinished:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            connection.close()
