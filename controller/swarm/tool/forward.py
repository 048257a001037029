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
                    # One address for each manager; one that was lost does not answer.
                    inner = await asyncio.open_connection(*target, happy_eyeballs_delay=0.5)
                await join(reader, writer, *inner)
            finally:
                writer.close()

    return await asyncio.start_server(connected, host, port)


async def main(shown_port: str) -> None:
    """Forward until it is cancelled. `shown_port`: of the machine."""
    await listen("0.0.0.0", FORWARDED_PORT, CONTROLLER)  # Docker publishes the port on the loopback alone
    sys.stdout.write(f"http://127.0.0.1:{shown_port}/ until Ctrl-C\n")
    sys.stdout.flush()
    await asyncio.Event().wait()  # the server's own wait would last as long as a page is open


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
