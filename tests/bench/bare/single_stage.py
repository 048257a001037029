"""The echo's limit: one aiohttp process that answers by itself. Run as `python -m tests.bench.bare.single_stage`."""

from __future__ import annotations

import os

from aiohttp import web


async def echo(request: web.Request) -> web.Response:
    """`GET /echo?message=hi` -> `{"response": "Echo: hi"}`."""
    return web.json_response({"response": f"Echo: {request.query['message']}"})


async def readyz(request: web.Request) -> web.Response:
    """For HAProxy's checks."""
    return web.Response()


def main() -> None:
    """Serve on PIERHEAD_HOST:PIERHEAD_PORT."""
    app = web.Application()
    app.router.add_get("/echo", echo)
    app.router.add_get("/readyz", readyz)
    host, port = os.environ["PIERHEAD_HOST"], int(os.environ["PIERHEAD_PORT"])
    web.run_app(app, host=host, port=port, access_log=None, print=None, keepalive_timeout=3600)


if __name__ == "__main__":
    main()
