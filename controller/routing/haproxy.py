"""HAProxy as the router: servers change through its runtime API, routes through another configuration and a reload."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

from ..errors import RoutingError
from ..model.actions import WriteKeys, WriteRouting
from ..model.keys import KeySet
from ..model.spec import ServiceSpec
from ..model.world import RoutingState
from ..settings import DEFAULT_LIMITS, DEFAULT_TOKENS, EdgeLimits, TokenRules
from . import haproxy_config as config
from . import haproxy_keys, haproxy_tokens
from . import haproxy_text as text
from .base import RoutingAction
from .haproxy_certificates import PublishedCertificates
from .haproxy_file import ConfigFile, write
from .haproxy_process import HAProxyProcess
from .haproxy_published import PublishedFiles

HTTP_WAIT_S = 2.0
"""An HTTP port that sends nothing for this long is silent."""


class HAProxyRouter:
    """A `Router` over the sockets and the configuration file in `run_dir`, a volume shared with HAProxy's container."""

    def __init__(
        self,
        run_dir: Path,
        limits: EdgeLimits = DEFAULT_LIMITS,
        http: tuple[str, int] = ("haproxy", 8000),
        https_port: int | None = None,
        acme: str = "",
        token_rules: TokenRules = DEFAULT_TOKENS,
    ) -> None:
        """`http`: host and port at which HAProxy listens to HTTP clients. `https_port`: where clients reach HTTPS; None
        = nothing speaks TLS. `acme`: see `config.Tls`. Until `use_certificates` is called, HAProxy keeps the
        certificates that it has; so it does with the public keys of tokens.
        """
        self._keys_file = run_dir / haproxy_keys.FILE
        self._http, self._limits, self._token_rules = http, limits, token_rules
        self._https_port, self._acme = https_port, acme
        self._process = HAProxyProcess(run_dir / "admin.sock", run_dir / "master.sock", self._refresh_file)
        self._file = ConfigFile(run_dir, self._process.runtime, self._process.master)
        self._certificates = PublishedCertificates(run_dir, self._process.runtime)
        self._public_keys = PublishedFiles(run_dir, "jwt")
        loaded = self._file.read()
        self._named = {published: published.in_config(loaded) for published in (self._certificates, self._public_keys)}
        self._naming = threading.Lock()
        self._texts = self._rendered()

    async def observe(self) -> RoutingState:
        """See `Router.observe`."""
        return await self._process.observe()

    async def key_ages(self) -> Mapping[str, float]:
        """See `Router.key_ages`."""
        return await self._process.key_ages()

    async def http_is_silent(self) -> bool:
        """See `Router.http_is_silent`."""
        try:
            async with asyncio.timeout(HTTP_WAIT_S):
                reader, writer = await asyncio.open_connection(*self._http)
                try:
                    writer.write(b"GET /-/healthz HTTP/1.0\r\n\r\n")
                    await reader.read(1)
                finally:
                    writer.transport.abort()
        except TimeoutError:
            return True
        except OSError:  # refused, or no such name: there is no process
            return False
        return False

    async def perform(self, action: RoutingAction) -> None:
        """See `Router.perform`. Raises RoutingError (with the command and HAProxy's answer), RoutingUnreachable."""
        if isinstance(action, WriteRouting):
            wanted = self._texts.of(action.services)
            async with self._process.one_at_a_time(relist=True):
                await self._file.load(wanted, self._certificates.swap)
                for published in self._named:
                    await asyncio.to_thread(published.keep_only, published.in_config(wanted))
            return
        if isinstance(action, WriteKeys):
            await self._write_keys(action)
            return
        await self._process.perform(action)

    async def _write_keys(self, action: WriteKeys) -> None:
        """The file first: whatever happens then, a process that starts has no revoked key. A full disk does not keep a
        revoked key in force.
        """
        try:
            await asyncio.to_thread(self._write_keys_file, action.keys)
        except OSError as error:
            await self._process.perform(action)
            raise RoutingError(
                f"HAProxy has the keys of clients, but {self._keys_file} cannot be written ({error.strerror}): make "
                "room on its disk. An HAProxy that starts has the former keys until the controller changes them"
            ) from error
        await self._process.perform(action)

    def _write_keys_file(self, keys: KeySet) -> None:
        write(self._keys_file, haproxy_keys.file_text(haproxy_keys.entries(keys)))

    def routing_hash(self, services: Collection[ServiceSpec]) -> str:
        """See `Router.routing_hash`. Raises RoutingError when a value may not be put into a configuration."""
        return text.hash_of(self._texts.of(services))

    def use_certificates(self, files: Mapping[str, str]) -> None:
        """Have HAProxy use these PEM files, by name, with the next `WriteRouting`, which the hash then asks for."""
        self._use(self._certificates, files)

    def use_public_keys(self, files: Mapping[str, str]) -> None:
        """Have HAProxy check tokens by these public keys, likewise. Their files' names do not matter."""
        numbered = {f"{number}.pem": text for number, text in enumerate(sorted(set(files.values())), 1)}
        self._use(self._public_keys, numbered)

    def _use(self, published: PublishedFiles, files: Mapping[str, str]) -> None:
        """Called by several threads."""
        with self._naming:
            self._named[published] = published.publish(files)
            self._texts = self._rendered()

    def _rendered(self) -> config.Rendered:
        certificates, public_keys = self._named[self._certificates], self._named[self._public_keys]
        tls = None
        if self._https_port:
            tls = config.Tls(self._certificates.in_container(certificates), self._https_port, self._acme)
        directory, names = self._public_keys.in_container(public_keys), self._public_keys.names(public_keys)
        tokens = haproxy_tokens.Tokens(self._token_rules, directory, names)
        return config.Rendered(self._limits, tls=tls, tokens=tokens)

    async def _refresh_file(self) -> None:
        await self._file.refresh()
