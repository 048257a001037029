"""HTTP in, calls to the child by its generated stub: `python -m services.echo_proto.ingress`."""

from __future__ import annotations

from aiohttp import WSMsgType, web
from pierhead import handle, serve
from pierhead.echo.v1.echo_pb2 import EchoRequest
from pierhead.echo.v1.echo_pb2_grpc import EchoStub

child = handle(EchoStub, "echo-child")

PING_S = 30.0
"""How often a silent WebSocket gets a ping."""


async def echo(request: web.Request) -> web.Response:
    """`GET /echo?message=hi` -> `{"response": "Echo: hi"}`."""
    reply = await child.Echo(EchoRequest(message=request.query.get("message", "")))
    return web.json_response({"response": reply.response})


async def socket(request: web.Request) -> web.WebSocketResponse:
    """`GET /echo/socket`, a WebSocket: "hi" -> "Echo: hi", message by message."""
    made = web.WebSocketResponse(heartbeat=PING_S)
    await made.prepare(request)
    async for message in made:
        if message.type is WSMsgType.TEXT:
            reply = await child.Echo(EchoRequest(message=message.data))
            await made.send_str(reply.response)
    return made


app = web.Application()
app.add_routes([web.get("/echo", echo), web.get("/echo/socket", socket, allow_head=False)])

if __name__ == "__main__":
    serve(app)
