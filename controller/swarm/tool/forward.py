"""`python -m controller.swarm.tool.forward PORT`: next to the controller, passes connections on to it.

The API has no port on the nodes of a Swarm. `pierhead console` runs this in a container that has one, on the loopback
of the machine at which it is typed.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from pierhead.interrupt import INTERRUPTED
from pierhead.pipes import join

FORWARDED_PORT = 8100
CONTROLLER = ("controller", 8100)
CONNECT_S = 5.0


async def listen(host: str, port: int, target: tuple[str, int]) -> asyncio.Server:
    """Pass each connection on to `target`; one for which it cannot be reached is closed."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # TimeoutError as well
            try:
                async with asyncio.timeout(CONNECT_S):
                    inner = await asyncio.open_connection(*target)
                await join(reader, writer, *inner)
            finally:
                writer.close()

    return await asyncio.start_server(connected, host, port)


async def main(shown_port: str) -> None:
    """Forward until it is cancelled. `shown_port`: of the machine."""
    server = await listen("0.0.0.0", FORWARDED_PORT, CONTROLLER)
    sys.stdout.write(
        f"http://127.0.0.1:{shown_port}/ until Ctrl-C. The page asks for a token: PIERHEAD_API_TOKEN of .env, or one "
        "that `pierhead token` has made.\n"
    )
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
