"""A chat over a WebSocket that keeps the conversation."""

from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from ray import serve
from ray.serve.handle import DeploymentHandle

fastapi_app = FastAPI()


@serve.deployment
class Bot:
    async def reply(self, conversation: str):
        for number, word in enumerate(reversed(conversation.split())):
            if number < 2:
                yield word + " "


@serve.deployment
@serve.ingress(fastapi_app)
class Chatbot:
    def __init__(self, bot: DeploymentHandle):
        self.bot = bot.options(stream=True, method_name="reply")

    @fastapi_app.websocket("/")
    async def handle_request(self, ws: WebSocket) -> None:
        await ws.accept()
        conversation = ""
        try:
            while True:
                conversation += await ws.receive_text() + " "
                async for text in self.bot.remote(conversation):
                    await ws.send_text(text)
                await ws.send_text("<<Response Finished>>")
        except WebSocketDisconnect:
            print("Client disconnected.")


app = Chatbot.bind(Bot.bind())
REQUESTS = [
    {"websocket": "/", "send": ["hello there", "friend"], "receive": 6},
    {"websocket": "/nowhere", "send": [], "receive": 1},
]
