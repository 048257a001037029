"""A WebSocket through FastAPI."""

from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from ray import serve

web = FastAPI()


@serve.deployment
@serve.ingress(web)
class Echo:
    @web.websocket("/ws")
    async def ws(self, socket: WebSocket):
        await socket.accept()
        try:
            while True:
                text = await socket.receive_text()
                if text == "close":
                    await socket.close(code=4001)
                    return
                await socket.send_text(f"echo {text}")
        except WebSocketDisconnect:
            pass

    @web.websocket("/json/{room}")
    async def room(self, socket: WebSocket, room: str):
        await socket.accept()
        got = await socket.receive_json()
        await socket.send_json({"room": room, "got": got})
        await socket.send_bytes(b"bye")
        await socket.close()


app = Echo.bind()
REQUESTS = [
    {"websocket": "/ws", "send": ["one", "two"], "receive": 2},
    {"websocket": "/ws", "send": ["close"], "receive": 1},
    {"websocket": "/json/blue", "send": ['{"a": 1}'], "receive": 3},
]
