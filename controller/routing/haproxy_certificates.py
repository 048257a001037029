"""The certificates that HAProxy has: copies of checked files, on the volume that it shares with the controller.

HAProxy never reads the user's files, so a wrong one cannot keep it from starting, or from taking other routes. Each set
of files has a directory of its own, which the configuration names: another set is another configuration. HAProxy gets
files of the same names by its runtime API; files that are added or removed take a reload.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

from ..errors import RoutingError
from . import haproxy_text as config
from .haproxy_file import write
from .haproxy_socket import RuntimeSocket, command

_log = logging.getLogger(__name__)

_NAMED = re.compile(r" crt /run/haproxy/tls/([0-9a-f]{16}) ")
_LISTED = re.compile(r"^(/run/haproxy/tls/.*/(.*))$", re.MULTILINE)
NONE = "none"
"""A directory that there never is: HAProxy refuses a configuration that names it."""


class PublishedCertificates:
    """The directories in `run_dir`/tls. Files and directories are root's alone, as HAProxy's master is root."""

    def __init__(self, run_dir: Path, runtime: RuntimeSocket) -> None:
        self._place = run_dir / "tls"
        self._runtime = runtime
        self._latest = NONE
        self._changing = threading.Lock()

    def in_config(self, text: str) -> str:
        """The directory that a configuration names; NONE where it names none."""
        found = _NAMED.search(text)
        return found.group(1) if found else NONE

    def publish(self, files: Mapping[str, str]) -> str:
        """Write the files, by name, into a directory of their own; its name."""
        name = hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()[:16]
        with self._changing:
            for directory in (self._place, self._place / name):
                directory.mkdir(mode=0o700, exist_ok=True)
            for file, text in files.items():
                write(self._place / name / file, text)
            self._latest = name
        return name

    async def swap(self, before: str, after: str) -> bool:
        """Give HAProxy, which runs the first configuration, the certificates of the second one. False where the two
        differ in more, where files were added or removed, and where HAProxy does not take them: a reload says why.
        """
        new = self.in_config(after)
        if NONE in (self.in_config(before), new) or _without_certificates(before) != _without_certificates(after):
            return False
        files = await asyncio.to_thread(lambda: {path.name: path.read_text() for path in (self._place / new).iterdir()})
        try:
            # It lists them by the directory that they had when the worker started.
            listed = {file: path for path, file in _LISTED.findall(await self._runtime.ask("show ssl cert"))}
            if listed.keys() != files.keys():
                return False
            for file, path in listed.items():
                await self._runtime.ask(command("set", "ssl", "cert", path), payload=files[file])
                await self._runtime.ask(command("commit", "ssl", "cert", path))
        except RoutingError as error:
            _log.warning("HAProxy is reloaded, as it did not take the certificates: %s", error)
            return False
        return True

    def keep_only(self, name: str) -> None:
        """Remove the directories, with the keys in them, but for this one and the latest."""
        with self._changing:
            for directory in self._place.glob("*"):
                if directory.name not in (name, self._latest):
                    shutil.rmtree(directory, ignore_errors=True)


def _without_certificates(text: str) -> str:
    """A configuration without its servers, its hash and the name of its certificates."""
    return _NAMED.sub("", config.HASH_LINE.sub("", config.with_servers(text, ())))
