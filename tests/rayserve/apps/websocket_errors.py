"""WebSockets that are refused, fail, or are closed by either side."""

from fastapi import Depends, FastAPI, WebSocket, WebSocketException
from ray import serve

web = FastAPI()


async def known(token: str = ""):
    if token != "yes":
        raise WebSocketException(code=1008, reason="who?")
    return token


@serve.deployment
@serve.ingress(web)
class Sockets:
    @web.websocket("/refused")
    async def refused(self, socket: WebSocket):
        await socket.close(code=4003)

    @web.websocket("/fails")
    async def fails(self, socket: WebSocket):
        await socket.accept()
        await socket.send_text("one")
        raise ValueError("broken")

    @web.websocket("/guarded")
    async def guarded(self, socket: WebSocket, token: str = Depends(known)):
        await socket.accept()
        await socket.send_text(f"hello {token} {self.__class__.__name__}")
        await socket.close(code=1000)

    @web.websocket("/echo")
    async def echo(self, socket: WebSocket):
        await socket.accept(subprotocol=None)
        async for text in socket.iter_text():
            await socket.send_json({"got": text, "path": socket.url.path})


app = Sockets.bind()
REQUESTS = [
    {"websocket": "/refused", "send": [], "receive": 1},
    {"websocket": "/fails", "send": [], "receive": 2},
    {"websocket": "/guarded", "send": [], "receive": 1},
    {"websocket": "/guarded?token=yes", "send": [], "receive": 2},
    {"websocket": "/echo", "send": ["a", "b"], "receive": 2},
]
