"""Unix sockets that a replica listens at: for its requests, for its lanes, and for its admin pages."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pierhead.errors import SettingsError

LANE_SUFFIX = ".lane"
"""What the path of the lanes' socket has after that of the requests' socket."""


def bound(path: str) -> socket.socket:
    """A socket that is bound to a path and does not listen yet. Raises SettingsError where it cannot be."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        clear(path)
        made.bind(path)
        admit(path)
    except OSError as error:
        made.close()
        raise cannot_listen_at(path, error) from error
    return made


def clear(path: str) -> None:
    """Remove the file that a process which has ended left there: nothing could be bound to it."""
    Path(path).unlink(missing_ok=True)


def admit(path: str) -> None:
    """Let every user connect: who may is decided by which containers see the directory."""
    os.chmod(path, 0o666)  # noqa: S103


def cannot_listen_at(path: str, error: Exception) -> SettingsError:
    """The error to raise when a socket cannot be opened."""
    return SettingsError(
        f"PIERHEAD_SOCKET, PIERHEAD_ADMIN_SOCKET: cannot listen at {path}: {error}; the controller mounts its "
        "directory, writable for every user"
    )
