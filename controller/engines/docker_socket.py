"""The engine's socket file, as a container has it.

A mount stays with the file that it was made of. An engine that is restarted makes a new one of the same name, which
only a container that is started anew gets. (Where systemd holds the socket, it is the same file all along.)
"""

from __future__ import annotations

from pathlib import Path

from docker import APIClient

SOCKET = Path("/var/run/docker.sock")
"""Where docker-py finds the engine by itself."""


def is_orphaned(socket: Path | None) -> bool:
    """Whether that file has been deleted by whoever made it, so that nobody will ever answer there. None: no file."""
    try:
        return socket is not None and socket.stat().st_nlink == 0
    except OSError:  # there is none, for now: who looks at the real directory sees the new one when it is made
        return False


def socket_of(client: APIClient) -> Path | None:
    """The file that a client connects to; None for an address of another kind."""
    path = getattr(client.get_adapter(client.base_url), "socket_path", None)
    return None if path is None else Path(path)
