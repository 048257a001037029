"""Answers GET /sleeper after WORK_S seconds, however many ask: a load without a cost."""

from __future__ import annotations

import asyncio
import os

from aiohttp import web
from pierhead import serve

WORK_S = float(os.environ["WORK_S"])


async def answer(request: web.Request) -> web.Response:
    await asyncio.sleep(WORK_S)
    return web.Response(text="slept")


app = web.Application()
app.add_routes([web.get("/sleeper", answer)])
serve(app)
