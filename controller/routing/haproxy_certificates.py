"""The certificates that HAProxy has. It gets files of the same names by its runtime API; files that are added or
removed take a reload.
"""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

from ..errors import RoutingError
from . import haproxy_text as config
from .haproxy_published import PublishedFiles
from .haproxy_socket import RuntimeSocket, command

_log = logging.getLogger(__name__)

_LISTED = re.compile(r"^(/run/haproxy/tls/.*/(.*))$", re.MULTILINE)


class PublishedCertificates(PublishedFiles):
    """HAProxy refuses a configuration that names the directory "none"."""

    def __init__(self, run_dir: Path, runtime: RuntimeSocket) -> None:
        super().__init__(run_dir, "tls")
        self._runtime = runtime

    async def swap(self, before: str, after: str) -> bool:
        """Give HAProxy, which runs the first configuration, the certificates of the second one. False where the two
        differ in more, where files were added or removed, and where HAProxy does not take them: a reload says why.
        """
        new = self.in_config(after)
        if config.NONE in (self.in_config(before), new) or self._without(before) != self._without(after):
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

    def _without(self, text: str) -> str:
        """A configuration without its servers, its hash and the name of its certificates."""
        return self._named.sub("", config.HASH_LINE.sub("", config.with_servers(text, ())))
