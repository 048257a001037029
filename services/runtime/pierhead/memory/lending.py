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


class Burst:
    """Sends what the streams of one turn of the event loop have written, all at once.

    An engine makes a token for each of its requests at the same time. A client or proxy of many streams that is woken
    for the first of them finds the others, and is not woken again for each: with 64 streams that saves a tenth of what
    a token costs replica and HAProxy.
    """

    def __init__(self) -> None:
        self._due: list[BorrowedConnection] = []

    def add(self, connection: BorrowedConnection) -> None:
        """Have it send in the next turn, when every task that is ready now has run."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._send)
        self._due.append(connection)

    def _send(self) -> None:
        due, self._due = self._due, []
        for connection in due:
            if connection.is_due:
                connection.send()


class BorrowedConnection:
    """A client's connection in the middle of a chunked answer, or what waits for it. Belongs to one call."""

    def __init__(self, over: Callable[[], object], burst: Burst) -> None:
        """`over()`: it is not expected any more."""
        self._over = over
        self._burst = burst
        self._arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._socket: socket.socket | None = None
        self._unsent = b""
        self.is_due = False
        """Whether it sends with the burst."""
        self._unfinished = False
        """Whether the client has taken a part of what was written together."""

    def arrived(self, fd: int | None) -> None:
        """The caller lends the connection; None: it does not."""
        if fd is not None:
            try:
                self._socket = socket.socket(fileno=fd)
            except OSError:  # no socket
                os.close(fd)
        wake(self._arrival)

    async def write(self, data: bytes) -> bool:
        """Write a chunk, once the client has taken those of earlier turns. False: nothing is written any more, as the
        connection was not lent, or the client has left.
        """
        if not self._arrival.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrival, ARRIVAL_S)
            self._over()
        if self._unsent and not self.is_due:
            await self._taken()
        if self._socket is None:
            return False
        self._unsent += b"%x\r\n%b\r\n" % (len(data), data)
        if not self.is_due:
            self.is_due = True
            self._burst.add(self)
        return True

    async def finish(self) -> None:
        """Give it back once the client has taken all that was written."""
        self.send()
        await self._taken()
        self.close()

    def send(self) -> None:
        """Send as much as the client takes."""
        self.is_due = False
        if self._socket is None or not self._unsent:
            return
        try:
            sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:  # the client has left
            self._unfinished, self._unsent = False, b""
            self.close()
            return
        self._unsent = self._unsent[sent:]
        self._unfinished = bool(self._unsent)

    async def _taken(self) -> None:
        """Return once nothing is unsent."""
        loop = asyncio.get_running_loop()
        while self._unsent and (connection := self._socket) is not None:
            room = loop.create_future()
            loop.add_writer(connection, wake, room)
            try:
                await room
            finally:
                loop.remove_writer(connection)
            self.send()

    def close(self) -> None:
        """Give it back now. A part of a chunk ends it: what its owner wrote would be read as the chunk's rest."""
        self._over()
        self.send()
        connection, self._socket = self._socket, None
        if connection is not None:
            if self._unfinished:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            connection.close()
