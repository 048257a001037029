"""The daemon on one machine: its Docker Engine, one HAProxy on a shared volume, the state in a file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from ..desired.revisions import latest_time
from ..engines.docker import SOCKET, DockerEngine
from ..engines.gpu_discovery import GpuSources
from ..engines.sockets import SocketDirectory
from ..files import acme
from ..files.acme import AcmeWatch
from ..files.certificates import CERTIFICATES
from ..files.compose import ComposeProject
from ..files.pem import PemKind, PemWatch
from ..files.public_keys import public_keys
from ..routing.haproxy import HAProxyRouter
from ..settings import Settings
from ..storage.clock import SteadyClock
from ..storage.file import StateFile
from ..storage.lock import state_lock
from ..storage.store import StateStore
from .api_socket import socket_of_users
from .boundaries import Boundaries, connected
from .callers import Gatekeeper


@contextlib.asynccontextmanager
async def boundaries(settings: Settings, stop: asyncio.Event) -> AsyncIterator[Boundaries | None]:
    """Have the project alone; None if `stop` is set before. Raises AnotherController, StoreError, EngineSocketGone."""
    async with state_lock(settings.state_dir, settings.project):
        with (
            contextlib.closing(StateStore(StateFile(settings.state_dir))) as store,
            socket_of_users(settings.api_socket, settings.project_dir, SOCKET) as api_socket,
        ):
            client = await connected(stop)
            if client is None:
                yield None
                return
            gpus = GpuSources(settings.gpu_cdi_kind, settings.cdi_dirs, settings.controller_image)
            sockets = SocketDirectory()
            engine = DockerEngine(client, gpus, sockets)
            of_acme, thumbprint = await _acme(settings)
            router = HAProxyRouter(
                settings.haproxy_run,
                settings.edge,
                https_port=settings.https_port if settings.has_tls else None,
                acme=thumbprint,
                token_rules=settings.tokens,
            )
            of_tokens = public_keys(settings.tokens.algorithm)
            try:
                yield Boundaries(
                    engine=engine,
                    router=router,
                    source=ComposeProject.from_environment(os.environ),
                    store=store,
                    clock=SteadyClock(max(store.latest_at, latest_time(store.rollouts.values()))),
                    gatekeeper=Gatekeeper(settings.api_tokens, hosts=settings.api_hosts),
                    api_socket=api_socket,
                    publish=sockets.publish,
                    policy_dir=settings.project_dir,
                    certificates=await _certificates(settings, router),
                    acme=of_acme,
                    public_keys=await _watch(of_tokens, settings.project_dir, settings.jwt_dir, router.use_public_keys),
                )
            finally:
                await engine.close()


async def _acme(settings: Settings) -> tuple[AcmeWatch | None, str]:
    """With the thumbprint of the account."""
    if not settings.acme_domains:
        return None, ""
    thumbprint = await asyncio.to_thread(acme.prepare, acme.PLACE, settings.acme_domains, time.time())
    return acme.AcmeWatch(acme.PLACE, settings.acme_domains, settings.project, time.time), thumbprint


async def _certificates(settings: Settings, router: HAProxyRouter) -> PemWatch | None:
    if settings.acme_domains:
        return await _watch(acme.ACME_CERTIFICATES, acme.PLACE, acme.DIRECTORY, router.use_certificates)
    return await _watch(CERTIFICATES, settings.project_dir, settings.tls_dir, router.use_certificates)


async def _watch(
    kind: PemKind, root: Path | None, directory: str | None, use: Callable[[Mapping[str, str]], None]
) -> PemWatch | None:
    """The files have been read once, so that the first routes are written with them."""
    if directory is None or root is None:
        return None
    watch = PemWatch(kind, root, directory, use, time.time)
    await asyncio.to_thread(watch.look)
    return watch
