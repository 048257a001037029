"""The directory of Unix sockets by which replicas of one machine are reached.

    <root>/.listen/<service>/    where its replicas make their sockets: nobody else can write there
    <root>/<service>/            the same sockets for HAProxy and callers, once the controller has seen what they are

What a replica makes may be a symbolic link to the socket of another service, or of the Docker Engine, and HAProxy or a
caller would follow it. So nobody connects to a path that a replica can change: the controller makes a hard link, which
does not follow anything, in the second directory, and removes it if it is no socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pierhead.edge.unix_sockets import LANE_SUFFIX

from ..model.spec import ADMIN_SUFFIX, SOCKETS, SOCKETS_VOLUME, unix_address

_log = logging.getLogger(__name__)


class SocketDirectory:
    """The directory as the controller has it."""

    def __init__(self, root: Path = Path(SOCKETS)) -> None:
        self._root = root

    def prepare(self, mounts: Iterable[Mapping[str, Any]]) -> None:
        """Make the directories that a replica mounts: the engine makes none in a volume. Raises OSError."""
        for mount in mounts:
            part = (mount.get("VolumeOptions") or {}).get("Subpath")
            if part is None or not str(mount.get("Source")).endswith(f"_{SOCKETS_VOLUME}"):
                continue
            directory = self._root / part
            directory.mkdir(parents=True, exist_ok=True)
            if not mount.get("ReadOnly"):
                directory.chmod(0o1777)  # a replica runs as the user of its image

    def publish(self, path: Path) -> bool:
        """Link the socket that a replica has made to `path`, where others look for it; False if it has made none.

        That of its lanes, if it has one, is linked before that of its requests: callers look for both at once.
        """
        made, unchecked = self._root / ".listen" / path.parent.name / path.name, path.with_name(f".{path.name}")
        try:
            if os.path.lexists(path) and os.path.samestat(made.lstat(), path.lstat()):
                return True
            if not path.suffix:
                self.publish(path.with_name(path.name + LANE_SUFFIX))
            path.parent.mkdir(parents=True, exist_ok=True)
            unchecked.unlink(missing_ok=True)
            os.link(made, unchecked, follow_symlinks=False)
            is_socket = stat.S_ISSOCK(unchecked.lstat().st_mode)
            if is_socket:
                unchecked.replace(path)
            else:
                unchecked.unlink()
        except OSError as error:
            _log.debug("nothing is linked to %s: %s", path, error)
            return False
        return is_socket

    def forget(self, service: str, replica: str) -> None:
        """Remove the sockets of a container that is gone, if it was a replica that had some."""
        _, _, name = unix_address(service, replica).rpartition("/")
        for directory in (self._root / service, self._root / ".listen" / service) if name else ():
            for file in (directory / (name + suffix) for suffix in ("", LANE_SUFFIX, ADMIN_SUFFIX)):
                with contextlib.suppress(OSError):  # what else a replica has made there stays
                    file.unlink()
