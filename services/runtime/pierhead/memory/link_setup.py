"""How two processes that share memory find each other: the replica listens on a Unix socket, the caller connects to it.

The caller asks for a socket over the connection that it calls by. The replica makes one for it, whose name
no other process learns. The caller has the file in its own PIERHEAD_SHARED_MEMORY_DIR if both run on one machine. Its
first packet names the link.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from pierhead.errors import SettingsError
from pierhead.lane.v1.lane_pb2 import MemoryQuestion
from pierhead.lane.v1.lane_pb2_grpc import LaneStub
from pierhead.memory import process
from pierhead.memory.link import Link
from pierhead.memory.process import Memory
from pierhead.metrics import RuntimeMetrics
from pierhead.settings import Settings

logger = logging.getLogger("pierhead")

HELLO = b"H"
TOKEN_BYTES = 16

MEETING_S = 5.0
"""How long a replica, and a caller, may take until their link is open."""

MAX_WAITING = 64
"""Most callers that have asked for a socket, or connected, and not sent their hello; the oldest ones are dropped."""

_NAME = re.compile(r"[0-9a-f]{16}\.sock")


class SharedMemory:
    """This process's shared memory, from start to end, and the sockets by which callers find it.

    Each caller that asks gets a socket of its own, until it connects: only that caller is given its name. Processes of
    the same user may remove and replace each other's files, but not find one: nobody may list the directory.
    """

    def __init__(self, memory: Memory) -> None:
        """Raises SettingsError where no socket can be made."""
        self._memory = memory
        self._directory = Path(memory.directory)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[socket.socket, Path] = {}
        """Sockets without a caller, and connections without a hello, oldest first; each with the socket's file."""
        self.keep = memory.keep
        try:
            self._drop(self._listen())
        except OSError as error:
            raise SettingsError(
                f"PIERHEAD_SHARED_MEMORY_DIR: expected a directory in which this user may make sockets, with a path of "
                f'at most 80 characters, found "{memory.directory}": {error}'
            ) from error
        memory.invite = self._invite
        process.use(memory)

    def close(self) -> None:
        """Give all of it back."""
        process.use(None)
        for one in list(self._waiting):
            self._drop(one)
        self._memory.close()

    def _invite(self) -> str:
        """The name of a new socket, for one caller; "" = none can be made."""
        try:
            return self._waiting[self._listen()].name
        except OSError as error:
            logger.warning("no shared memory for a caller: no socket in %s: %s", self._directory, error)
            return ""

    def _listen(self) -> socket.socket:
        path, listening = self._directory / f"{os.urandom(8).hex()}.sock", _new_socket()
        try:
            listening.bind(str(path))
            path.chmod(0o666)  # replicas run as different users
            listening.listen(1)
        except OSError:
            listening.close()
            raise
        self._wait(listening, path, self._accept)
        return listening

    def _wait(self, one: socket.socket, path: Path, found: Callable[[socket.socket], None]) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._drop(next(iter(self._waiting)))
        self._waiting[one] = path
        self._loop.add_reader(one, found, one)
        self._loop.call_later(MEETING_S, self._drop, one)

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            connection, _ = listening.accept()
            connection.setblocking(False)
            self._wait(connection, self._waiting[listening], self._greet)
        self._drop(listening)

    def _greet(self, connection: socket.socket) -> None:
        try:
            packet = connection.recv(64)
        except OSError:
            packet = b""
        self._loop.remove_reader(connection)
        del self._waiting[connection]
        token = packet[len(HELLO) :]
        link = Link(self._memory, token)
        if packet[: len(HELLO)] != HELLO or len(token) != TOKEN_BYTES or not self._memory.opened(link):
            connection.close()
            return
        link.start(connection, self._loop, self._memory.readable)
        with suppress(OSError):  # the caller has gone: reading it tells
            connection.send(HELLO)

    def _drop(self, one: socket.socket) -> None:
        path = self._waiting.pop(one, None)
        if path is None:
            return
        self._loop.remove_reader(one)
        one.close()
        with suppress(OSError):
            path.unlink()


class LinkSetup:
    """A caller's link to the replica behind one connection, from the connection's beginning to its end."""

    def __init__(self, memory: Memory, service: str, token: bytes, channel: grpc.aio.Channel) -> None:
        self.link = Link(memory, token, service)
        self._memory = memory
        # Owned by this object: `end` cancels it.
        self._task = asyncio.get_running_loop().create_task(self._meet(channel), name=f"shared memory with {service}")

    def end(self) -> None:
        """The connection is lost."""
        self._task.cancel()
        self._memory.lost(self.link)

    async def _meet(self, channel: grpc.aio.Channel) -> None:
        stub: Any = LaneStub(channel)
        connection = _new_socket()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(MEETING_S):
                name = (await stub.FindMemory(MemoryQuestion(), timeout=MEETING_S)).name
                if _NAME.fullmatch(name):
                    await loop.sock_connect(connection, f"{self._memory.directory}/{name}")
                    await loop.sock_sendall(connection, HELLO + self.link.token)
                    if await loop.sock_recv(connection, 1) == HELLO and self._memory.opened(self.link):
                        self.link.start(connection, loop, self._memory.readable)
                        return
            logger.debug("no shared memory with %s at %r", self.link.service, name)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                logger.debug("no shared memory with %s: %s", self.link.service, error.details())
        except (OSError, TimeoutError) as error:  # another machine, or another mount
            logger.debug("no shared memory with %s: %r", self.link.service, error)
        except BaseException:
            connection.close()
            raise
        connection.close()


def meet(service: str, channel: grpc.aio.Channel, token: bytes = b"") -> LinkSetup | None:
    """Share memory with the replica behind a new connection, by a link of that name; None if there is none here."""
    memory = process.MEMORY
    if memory is None or not service:
        return None
    return LinkSetup(memory, service, token or os.urandom(TOKEN_BYTES), channel)


def _new_socket() -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.setblocking(False)
    return found


def share_memory(settings: Settings, metrics: RuntimeMetrics) -> SharedMemory | None:
    """Share memory if the settings say so. Raises SettingsError."""
    if not settings.shared_memory_bytes or process.MEMORY is not None:
        return None
    if not settings.shared_memory_dir:
        raise SettingsError(
            "PIERHEAD_SHARED_MEMORY_DIR: expected a directory that the replicas of this machine have in common, as "
            "PIERHEAD_SHARED_MEMORY_BYTES is set; found none"
        )
    limit, threshold = settings.shared_memory_bytes, settings.shared_memory_threshold
    return SharedMemory(Memory(limit, threshold, settings.shared_memory_dir, metrics))
