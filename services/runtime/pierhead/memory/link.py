"""The Unix socket between two processes that share memory. Regions go over it, and what was read and released.

    sender of a message                          its receiver
      REGION (size, descriptor) ------------->     maps it                          once for each region and link
             <------------------------------- RELEASED (generation, messages)      nothing reads the content any more
      ASK (generation) ---------------------->     it was sent, and the request is over: do you still read it?
      GONE ---------------------------------->     unmaps it
      LEND (call, descriptor) --------------->     writes to the connection of a client: lending.py

Both sides send messages, and so are senders and receivers. The socket keeps the order of packets, and loses none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from contextlib import suppress
from typing import Protocol

from pierhead.errors import ContentGone
from pierhead.memory.lending import BorrowedConnection, Burst
from pierhead.memory.pool import Region
from pierhead.memory.regions import BadRegionError, Content, ContentReference, Mapping, receive

logger = logging.getLogger("pierhead")

REGION, RELEASED, ASK, GONE, LEND = b"R", b"F", b"A", b"G", b"L"

_ENTRY = struct.Struct("=16sQQ")
"""A region's name, and two numbers: REGION its size; RELEASED, ASK the generation; RELEASED the messages. LEND: the
call's number first, and no name."""

PACKET = 32 * 1024
"""Most bytes of a packet, of which Linux sends 200 KiB by default."""

MAX_RECEIVED = 1024
"""Most regions that one link may pass: four times what a process makes."""

_RECEIVE = socket.MSG_DONTWAIT | getattr(socket, "MSG_CMSG_CLOEXEC", 0)

ALL = 2**63
"""RELEASED in answer to ASK: every message."""


class LinkOwner(Protocol):
    """The memory of this process, as its links see it. They run under its lock."""

    received: dict[tuple[bytes, int], ContentReference]

    def released(self, link: Link, name: bytes, generation: int, count: int) -> None:
        """The other side has released messages."""
        ...

    def lost(self, link: Link) -> None:
        """The other side has gone, or broke a rule."""
        ...

    def gone(self, reading: ContentReference) -> None:
        """Nothing reads it any more; called in any thread."""
        ...


class Link:
    """One link, at either end. Created before its socket: calls are counted from the beginning."""

    def __init__(self, owner: LinkOwner, token: bytes, service: str = "") -> None:
        self.token = token
        """Names the link at both ends: 16 random bytes, chosen by the caller."""
        self.service = service
        """At the caller: the service that it calls. Empty at the replica."""
        self.open = False
        self._owner = owner
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._regions: dict[bytes, Mapping] = {}
        self._oldest: dict[bytes, int] = {}
        """By region: the first generation that may still be read; earlier ones were released or replaced."""
        self._queue: dict[bytes, list[bytes]] = {}
        """Entries to send, by kind."""
        self._calls: dict[int, None] = {}
        """Calls of this side in flight, oldest first: their replies may name content."""
        self._begun = 0
        self._asked: dict[tuple[bytes, int], int] = {}
        """Content that the sender has asked for and that no message here names yet, and the last call begun then."""
        self._expected: dict[int, BorrowedConnection] = {}
        """Calls of the other side, by number, for which it is to lend a client's connection."""
        self._burst = Burst()

    @property
    def destination(self) -> str | bytes:
        """What regions for this link are bound to: the service; at the replica, this one link."""
        return self.service or self.token

    # ---- its life

    def start(self, connection: socket.socket, loop: asyncio.AbstractEventLoop, readable: object) -> None:
        """Use a connected, non-blocking socket; `readable(link)` is called in the loop when there is something."""
        self._socket, self._loop, self.open = connection, loop, True
        loop.add_reader(connection, readable, self)  # type: ignore[arg-type]

    def close(self) -> None:
        """End it; the other side sees that."""
        connection, self._socket, self.open = self._socket, None, False
        if connection is not None and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(connection)
            connection.close()
        self._regions.clear()
        self._queue.clear()
        self._asked.clear()
        for expected in self._expected.values():
            expected.arrived(None)

    def _break(self, why: str) -> None:
        if self.open:
            logger.error("shared memory with %s is given up: %s", self.service or "a caller", why)
            self._owner.lost(self)

    # ---- calls of this side

    def begin(self) -> int:
        """A call begins whose reply may name content; returns its number."""
        self._begun += 1
        self._calls[self._begun] = None
        return self._begun

    def over(self, number: int) -> None:
        """The call can receive nothing any more. Takes no lock."""
        self._calls.pop(number, None)

    # ---- connections of clients

    def borrow(self, number: int) -> BorrowedConnection:
        """At the replica: what the caller lends to its call of that number, or says that it does not lend."""
        borrowed = BorrowedConnection(lambda: self._expected.pop(number, None), self._burst)
        self._expected[number] = borrowed
        return borrowed

    def lend(self, number: int, fd: int | None) -> None:
        """At the caller: lend a connection to the call of that number; None: none can be lent."""
        if self._socket is None:
            return
        if fd is not None:
            with suppress(OSError):  # full, or broken: reading it will tell
                socket.send_fds(self._socket, [LEND + _ENTRY.pack(b"", number, 0)], [fd])
                return
        self._add(LEND, b"", number, 0)
        self.flush()

    # ---- sending

    def introduce(self, region: Region) -> bool:
        """Pass a region, once; False if that is not possible now."""
        if self._socket is None:
            return False
        if self not in region.introduced:
            packet = REGION + _ENTRY.pack(region.name, region.size, 0)
            try:
                socket.send_fds(self._socket, [packet], [region.memory.fd])
            except OSError:  # full, or broken: reading it will tell
                return False
            region.introduced.add(self)
            region.passed = True
        return True

    def release(self, name: bytes, generation: int, count: int) -> None:
        """Nothing here reads the content of `count` messages any more."""
        self._add(RELEASED, name, generation, count)

    def ask(self, name: bytes, generation: int) -> None:
        """Ask for the release of content that no message names any more."""
        self._add(ASK, name, generation, 0)

    def forget(self, name: bytes) -> None:
        """The region is given back."""
        self._add(GONE, name, 0, 0)

    def _add(self, kind: bytes, name: bytes, first: int, second: int) -> None:
        if self.open:
            self._queue.setdefault(kind, []).append(_ENTRY.pack(name, first, second))

    def flush(self) -> None:
        """Send what is queued."""
        if self._asked:
            self._answer()
        most = (PACKET - 1) // _ENTRY.size
        try:
            while self._queue and self._socket is not None:
                kind, entries = next(iter(self._queue.items()))
                self._socket.send(kind + b"".join(entries[:most]))
                del entries[:most]
                if not entries:
                    del self._queue[kind]
        except BlockingIOError:
            return  # sent later
        except OSError:
            self._owner.lost(self)

    def _answer(self) -> None:
        """Release asked content that no call can still receive."""
        oldest = next(iter(list(self._calls)), self._begun + 1)
        for (name, generation), begun in list(self._asked.items()):
            if oldest > begun:
                del self._asked[name, generation]
                self._oldest[name] = max(self._oldest.get(name, 0), generation + 1)
                self.release(name, generation, ALL)

    # ---- receiving

    def claim(self, name: bytes, generation: int, length: int) -> Content:
        """The content that a message names. Raises ContentGone."""
        if name not in self._regions:
            self.drain()  # it was sent before the message
        mapping = self._regions.get(name)
        if mapping is None:
            raise ContentGone(_unread("this process was not given the region", name, generation))
        if generation < self._oldest.get(name, 0):
            raise ContentGone(_unread("it was released, and the region was filled again", name, generation))
        if not 0 <= length <= mapping.size:
            why = f"its {length} bytes do not fit into the region's {mapping.size}"
            self.release(name, generation, 1)
            raise ContentGone(_unread(why, name, generation))
        self._oldest[name] = generation
        self._asked.pop((name, generation), None)
        key = (name, generation)
        reading = self._owner.received.get(key)
        content = None if reading is None else reading()
        if reading is None or content is None:
            content = Content(key, mapping, length)
            reading = self._owner.received[key] = ContentReference(content, self._owner.gone)
        reading.debts[self] = reading.debts.get(self, 0) + 1
        return content

    def drain(self) -> None:
        """Take in everything that has arrived."""
        while self._socket is not None:
            try:
                packet, fds, flags, _ = socket.recv_fds(self._socket, PACKET, 1, _RECEIVE)
            except BlockingIOError:
                return
            except OSError:
                packet, fds, flags = b"", [], 0
            if not packet:
                self._owner.lost(self)
                return
            try:
                self._take(packet[:1], packet[1:], fds, lost=bool(flags & socket.MSG_CTRUNC))
            except (BadRegionError, OSError, struct.error) as error:
                self._break(str(error))

    def _take(self, kind: bytes, entries: bytes, fds: list[int], *, lost: bool) -> None:
        if lost:
            raise BadRegionError("a descriptor was lost: are too many files open here?")
        if kind == REGION and fds:
            name, size, _ = _ENTRY.unpack(entries)
            self._map(name, size, fds)
            return
        if kind == LEND and fds:
            _, number, _ = _ENTRY.unpack(entries)
            self._lent(number, fds[0])
            return
        for fd in fds:
            os.close(fd)
        for name, first, second in _ENTRY.iter_unpack(entries):
            self._take_entry(kind, name, first, second)

    def _take_entry(self, kind: bytes, name: bytes, first: int, second: int) -> None:
        if kind == RELEASED:
            self._owner.released(self, name, first, second)
        elif kind == ASK:
            reading = self._owner.received.get((name, first))
            if reading is None or self not in reading.debts:  # else it is released when nothing reads it any more
                self._asked.setdefault((name, first), self._begun)
        elif kind == GONE:
            self._regions.pop(name, None)
            self._oldest.pop(name, None)
        elif kind == LEND:
            self._lent(first, None)
        else:
            raise BadRegionError(f"a packet of kind {kind!r}")

    def _lent(self, number: int, fd: int | None) -> None:
        borrowed = self._expected.get(number)
        if borrowed is not None:
            borrowed.arrived(fd)
        elif fd is not None:  # the call has ended
            os.close(fd)

    def _map(self, name: bytes, size: int, fds: list[int]) -> None:
        if len(self._regions) >= MAX_RECEIVED:
            os.close(fds[0])
            raise BadRegionError(f"more than {MAX_RECEIVED} regions")
        self._regions[name] = receive(fds[0], size)


def _unread(why: str, name: bytes, generation: int) -> str:
    return f"the content of a tensor in shared memory cannot be read: {why} (region {name.hex()}, {generation})"
