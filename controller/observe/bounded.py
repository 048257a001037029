"""Reads an answer that may be of any size."""

from __future__ import annotations

import aiohttp


async def read_at_most(response: aiohttp.ClientResponse, most: int) -> bytes | None:
    """The body; None for one of more than `most` bytes, of which little more is read. Raises aiohttp.ClientError."""
    body = bytearray()
    while chunk := await response.content.readany():
        body += chunk
        if len(body) > most:
            return None
    return bytes(body)
