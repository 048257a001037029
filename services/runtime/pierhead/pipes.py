"""Passes bytes on between two connections, unread."""

from __future__ import annotations

import asyncio
from typing import Final

PIECE_BYTES: Final = 64 * 1024
"""Read at a time."""


async def join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    inner_reader: asyncio.StreamReader,
    inner_writer: asyncio.StreamWriter,
) -> None:
    """Pass bytes on in both directions until one side closes. Raises OSError when a connection breaks."""
    pipes = {
        asyncio.create_task(_pass_on(reader, inner_writer)),
        asyncio.create_task(_pass_on(inner_reader, writer)),
    }
    try:
        await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        for pipe in pipes:
            if pipe.done():
                pipe.result()
    finally:
        # Cut off, not closed: where the client has left, the service sees it at once.
        inner_writer.transport.abort()
        for pipe in pipes:
            pipe.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
