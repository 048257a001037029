"""GET /web answers after WORK_S seconds. GET /web/eat takes memory, 512 MB at most. GET /web/batch waits for a batch
that is never full.
"""

from __future__ import annotations

import asyncio
import os

from aiohttp import web
from pierhead import batch, serve

WORK_S = float(os.environ.get("WORK_S", "0"))
EATEN: list[bytes] = []


async def answer(request: web.Request) -> web.Response:
    await asyncio.sleep(WORK_S)
    return web.Response(text="done")


async def eat(request: web.Request) -> web.Response:
    for _ in range(64):
        EATEN.append(b"x" * 8_000_000)
        await asyncio.sleep(0.01)
    return web.Response(text="eaten")


@batch(max_batch_size=1_000_000_000, batch_wait_timeout_s=86_400, max_concurrent_batches=1_000_000)
async def together(items: list[int]) -> list[int]:
    await asyncio.sleep(0.01)
    return items


async def batched(request: web.Request) -> web.Response:
    return web.Response(text=str(await together(1)))


app = web.Application()
app.add_routes([web.get("/web", answer), web.get("/web/eat", eat), web.get("/web/batch", batched)])
serve(app)
