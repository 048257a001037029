"""The daemon on a Swarm: a manager's services, an HAProxy on every node, the state in Swarm's configs.

It acts while it holds the lease of the state. Without it another controller may act, so it ends, and Swarm restarts
it. The networks of replicas reach its API, so a change needs the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..daemon.boundaries import Boundaries, connected
from ..daemon.callers import Gatekeeper
from ..files.certificates import CERTIFICATES_IN_FORCE
from ..files.pem import REPLACE, PemKind, PemWatch
from ..files.public_keys import public_keys
from ..routing.haproxy_config import Tls
from ..routing.haproxy_text import SECRETS
from ..routing.haproxy_tokens import Tokens
from ..settings import Settings
from ..storage.store import StateStore
from . import certificates
from .edges.offer import PORT
from .edges.router import EdgesRouter, over_tls
from .edges.routes import PublishedRoutes
from .engine.engine import SwarmEngine
from .files.kept import KeptProject
from .node_commands import SwarmNodeCommands
from .state.configs import SwarmConfigs, compose_files_of, state_of
from .state.holder import StateHolder, state_lease
from .state.text import KeptText

STATE_TIMEOUT_S = 5
"""Longest wait for an answer about the state: the lease does not hold longer without a renewal."""


@contextlib.asynccontextmanager
async def boundaries(settings: Settings, stop: asyncio.Event) -> AsyncIterator[Boundaries | None]:
    """Have the project alone; None if `stop` is set before. Raises AnotherController, StoreError, EngineSocketGone."""
    tls = _Tls.of(settings.secrets_dir)
    async with contextlib.AsyncExitStack() as ends:
        state_client, client = await connected(stop, STATE_TIMEOUT_S), await connected(stop)
        for each in (state_client, client):
            if each is not None:
                ends.callback(each.close)
        if state_client is None or client is None:
            yield None
            return
        configs, engine = SwarmConfigs(state_client), SwarmEngine(client)
        ends.callback(configs.close)
        ends.push_async_callback(engine.close)
        holder = StateHolder(state_of(configs, settings.project))
        if not await holder.take(stop):
            yield None
            return
        await ends.enter_async_context(state_lease(holder))
        certificates_of_clients = await _watch(settings, CERTIFICATES_IN_FORCE, "tls") if settings.has_tls else None
        public_keys_of_tokens = await _watch(settings, public_keys(settings.tokens.algorithm), "jwt")
        key_files = tuple(sorted(public_keys_of_tokens.files()))
        yield Boundaries(
            engine=engine,
            router=await _router(settings, engine, tls, holder.epoch, key_files, ends),
            source=KeptProject(settings.project, KeptText(compose_files_of(configs, settings.project))),
            store=StateStore(holder.rows),
            clock=holder.controller_clock,
            gatekeeper=Gatekeeper(settings.api_tokens, hosts=settings.api_hosts),
            acts=holder.acts,
            node_commands=SwarmNodeCommands,
            certificate_ends_at=tls.ends_at,
            certificates=certificates_of_clients,
            public_keys=public_keys_of_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Tls:
    """The controller's certificate, which is read once: with another one Swarm restarts the controller."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    ends_at: float
    """The edges' certificate was made with it, and ends with it."""

    @classmethod
    def of(cls, secrets: Path) -> _Tls:
        own, authorities = secrets / "controller.pem", secrets / "ca.pem"
        server, client = (certificates.context(own, authorities, is_server=is_server) for is_server in (True, False))
        return cls(server, client, certificates.ends_at(own.read_text()))


async def _watch(settings: Settings, kind: PemKind, directory: str) -> PemWatch:
    """Of files that the edges have, too (controller/swarm/up/). Swarm replaces the controller when they change."""
    of_swarm = replace(
        kind,
        remedy="`pierhead up` puts those of the project there",
        renewal=f"{REPLACE} in the project, and type `pierhead up`",
    )
    watch = PemWatch(of_swarm, settings.secrets_dir, directory, lambda _: None, time.time)
    await asyncio.to_thread(watch.look)
    return watch


async def _router(
    settings: Settings,
    engine: SwarmEngine,
    tls: _Tls,
    epoch: int,
    key_files: tuple[str, ...],
    ends: contextlib.AsyncExitStack,
) -> EdgesRouter:
    """Serve the edges their routes, and return the router over them."""
    routes = PublishedRoutes(epoch)
    await ends.enter_async_context(routes.serving(settings.api_host, PORT, tls.server))
    router = EdgesRouter(
        lambda: engine.edges(settings.project),
        over_tls(tls.client, epoch),
        routes,
        settings.edge,
        Tls(f"{SECRETS}/tls", settings.https_port) if settings.has_tls else None,
        Tokens(settings.tokens, f"{SECRETS}/jwt", key_files),
    )
    ends.push_async_callback(router.close)
    return router
