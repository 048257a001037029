"""The Unix socket of the API, for users of this machine.

The kernel lets in users who have root's power over the stack without it, and tells the controller their uid.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("iII")
_WRITABLE_FOR_GROUP = 0o020
_NOT_THERE = (
    "no API at %s, so users of this machine ask at the port, where keys, backups and marks need PIERHEAD_API_TOKEN: %s"
)


@contextlib.contextmanager
def socket_of_users(path: Path, project: Path | None, engine: Path) -> Iterator[socket.socket | None]:
    """A socket that lets in the owner of the project's directory, and the group that may use the engine's socket; it
    does not listen yet. None where it cannot be made. At the end its file goes; one controller at a time calls this.
    """
    try:
        found = engine.stat()
        group = found.st_gid if found.st_mode & _WRITABLE_FOR_GROUP else 0
        made = bound(path, project.stat().st_uid if project else 0, group)
    except OSError as error:
        logger.warning(_NOT_THERE, path, error)
        yield None
        return
    with made:
        try:
            yield made
        finally:
            path.unlink(missing_ok=True)


def bound(path: Path, owner: int, group: int) -> socket.socket:
    """A socket for root, this user and the members of this group. One that was left at the path is replaced. Raises
    OSError.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        made.bind(str(path))
        os.chown(path, owner, group)
        path.chmod(0o660)
    except OSError:
        made.close()
        raise
    return made


def user_of(transport: asyncio.BaseTransport | None) -> int | None:
    """The uid of who has connected to the socket; None for another connection."""
    connection = transport.get_extra_info("socket") if transport is not None else None
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(told)[1]
    return uid
