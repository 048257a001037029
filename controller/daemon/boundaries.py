"""What the daemon needs: the engine, the router, the state and the compose files, as `one_machine.py` and
swarm/boundaries.py open them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from docker import APIClient

from ..engines.base import ClusterEngine
from ..engines.docker import HTTP_TIMEOUT_S, open_client
from ..errors import EngineSocketGone, EngineUnreachable
from ..files.acme import AcmeWatch
from ..files.pem import PemWatch
from ..files.watch import SpecSource
from ..routing.base import Router
from ..storage.store import StateStore
from .callers import Gatekeeper
from .nodes import NodeCommands, NodeParts, NoNodes

logger = logging.getLogger("controller")

ENGINE_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class Boundaries:
    """What the controller acts on and reads, and who may ask it."""

    engine: ClusterEngine
    router: Router
    source: SpecSource
    store: StateStore
    clock: Callable[[], float]
    """It never jumps (controller/storage/clock.py)."""
    gatekeeper: Gatekeeper
    api_socket: socket.socket | None = None
    """At which the API answers users of this machine, too."""
    publish: Callable[[Path], bool] = lambda path: False
    """Shows others the socket of a replica (controller/engines/sockets.py)."""
    policy_dir: Path | None = None
    """Where autoscaling functions are looked for."""
    acts: Callable[[], bool] = lambda: True
    """Whether this controller may act now."""
    node_commands: Callable[[NodeParts], NodeCommands] = NoNodes
    """Makes the commands on nodes."""
    certificate_ends_at: float | None = None
    """Until when controller and edges reach each other over TLS (unix time); None = they do not use it."""
    certificates: PemWatch | None = None
    """Of HAProxy, for clients; None = they come without TLS."""
    acme: AcmeWatch | None = None
    """Of the certificate that an ACME server gives; None = none is asked."""
    public_keys: PemWatch | None = None
    """By which HAProxy checks tokens of clients; None = it cannot."""


async def connected(stop: asyncio.Event, timeout_s: int = HTTP_TIMEOUT_S) -> APIClient | None:
    """Connect to the engine, without a limit of time; None if `stop` is set first. Raises EngineSocketGone."""
    while not stop.is_set():
        try:
            return await asyncio.to_thread(open_client, timeout_s=timeout_s)
        except EngineSocketGone:  # the next engine listens at another file
            raise
        except EngineUnreachable as error:
            logger.warning("waiting for the Docker Engine: %s", error)
        with contextlib.suppress(TimeoutError):  # try again
            async with asyncio.timeout(ENGINE_RETRY_S):
                await stop.wait()
    return None
