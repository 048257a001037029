"""HTTP in, one call to the service "worker" for each request. Run as `python -m tests.faults.programs.ingress`.

`GET /work?ms=10` -> the name of the replica that has done it; `X-Others-Ended`: how many other calls the workers ended
between this one's beginning here and its answer (turns.py).
"""

from __future__ import annotations

import os

from aiohttp import web
from pierhead import handle, serve
from pierhead.echo.v1.echo_pb2 import EchoRequest
from pierhead.echo.v1.echo_pb2_grpc import EchoStub

from tests.faults.programs import turns
from tests.faults.programs.life import end_with_the_test

worker = handle(EchoStub, "worker")
workers = turns.of_all(os.environ["PIERHEAD_TURNS"])


def ended() -> int:
    """How many calls the workers have ended so far."""
    return sum(each[0] for each in workers)


async def work(request: web.Request) -> web.Response:
    before = ended()
    reply = await worker.Echo(EchoRequest(message=request.query["ms"]))
    others_ended = ended() - before - 1
    return web.Response(text=reply.response, headers={"X-Others-Ended": str(others_ended)})


if __name__ == "__main__":
    end_with_the_test()
    app = web.Application()
    app.router.add_get("/work", work)
    serve(app)
