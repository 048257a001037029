"""What an edge does before it is stopped: `python3 -m controller.swarm.edges.leave SECONDS`, by haproxy/entrypoint.sh.

HAProxy answers 503 at `/-/healthz` and serves everything else, so that keepalived, balancers and checks of DNS choose
other nodes before this one refuses connections. It needs nothing but Python's own library.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path

from ...errors import RoutingError
from ...routing.haproxy_socket import RuntimeSocket
from .agent import RUN_DIR

_log = logging.getLogger("edge")

AGAIN_S = 1.0
"""A reload during it makes a worker that does not know yet."""
SAY_SO = ("experimental-mode on", "set var proc.pierhead_leaving int(1)")


async def leave(run_dir: Path, seconds: float) -> None:
    """Make HAProxy say for `seconds` that it leaves."""
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        try:
            await RuntimeSocket(run_dir / "admin.sock").ask_all(SAY_SO, min(left_s, AGAIN_S))
        except RoutingError as error:
            _log.warning("HAProxy does not say that it leaves: %s", error)
        await asyncio.sleep(max(0.0, min(AGAIN_S, until - time.monotonic())))


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    asyncio.run(leave(RUN_DIR, float(sys.argv[1])))
