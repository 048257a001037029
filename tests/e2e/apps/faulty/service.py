"""Answers GET /faulty with its NAME, after WORK_S seconds. FAULTS is the share of answers that are errors; BREAK=crash
and BREAK=unready make versions that never get ready; SLEEPS=1 makes one that can sleep.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

from aiohttp import web
from pierhead import serve

NAME = os.environ["NAME"]
WORK_S = float(os.environ.get("WORK_S", "0"))
FAULTS = float(os.environ.get("FAULTS", "0"))
BREAK = os.environ.get("BREAK", "")


async def answer(request: web.Request) -> web.Response:
    if random.random() < FAULTS:
        raise RuntimeError("as FAULTS says")
    await asyncio.sleep(WORK_S)
    return web.Response(text=NAME)


class Check:
    """What readiness asks."""

    async def check_health(self) -> None:
        if BREAK == "unready":
            raise RuntimeError("as BREAK says")


class Sleeper(Check):
    """It is told to sleep and to wake up."""

    async def sleep(self) -> None:
        print("falling asleep", flush=True)

    async def wake(self) -> None:
        print("waking up", flush=True)


if BREAK == "crash":
    sys.exit("as BREAK says")
app = web.Application()
app.add_routes([web.get("/faulty", answer)])
serve(app, Sleeper() if os.environ.get("SLEEPS") else Check())
