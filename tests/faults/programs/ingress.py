"""HTTP in, one call to the service "worker" for each request. Run as `python -m tests.faults.programs.ingress`.

`GET /work?ms=10` -> the name of the replica that has done it.
"""

from __future__ import annotations

from aiohttp import web
from pierhead import handle, serve
from pierhead.echo.v1.echo_pb2 import EchoRequest
from pierhead.echo.v1.echo_pb2_grpc import EchoStub

from tests.faults.programs.life import end_with_the_test

worker = handle(EchoStub, "worker")


async def work(request: web.Request) -> web.Response:
    reply = await worker.Echo(EchoRequest(message=request.query["ms"]))
    return web.Response(text=reply.response)


if __name__ == "__main__":
    end_with_the_test()
    app = web.Application()
    app.router.add_get("/work", work)
    serve(app)
