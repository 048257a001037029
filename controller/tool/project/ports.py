"""Which ports of this machine a new project gets: the stack's own where they are free, else the next free ones."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Collection, Mapping

from .direct import connects

PORTS: Mapping[str, int] = {
    "PIERHEAD_HTTP_PORT": 8000,
    "PIERHEAD_GRPC_PORT": 9000,
    "PIERHEAD_API_PORT": 8100,
    "PIERHEAD_STATS_PORT": 8404,
    "PIERHEAD_PROMETHEUS_PORT": 9090,
}
"""Those of compose/compose.yaml. Grafana's is not among them: no project starts it unasked."""

_LAST = 65535


def choose(
    wanted: Collection[str],
    taken: Collection[int],
    is_free: Callable[[int], bool],
    own: Collection[int] = (),
) -> dict[str, int]:
    """A port for each of the names in `wanted`.

    `taken`: ports that the project has already given to something; `own`: those at which its own stack listens.
    """
    chosen: dict[str, int] = {}
    for name in wanted:
        used = {*taken, *chosen.values()}
        chosen[name] = next(
            (port for port in range(PORTS[name], _LAST) if port not in used and (port in own or is_free(port))),
            PORTS[name],
        )
    return chosen


def is_free(port: int) -> bool:
    """Whether nothing of this machine listens at a port.

    A port that the engine publishes without a process of its own can be bound, and only a connection shows it.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return not connects("127.0.0.1", port)
