"""A model in a thread that fills a queue, from which a coroutine streams."""

import asyncio
from queue import Empty, Queue

from fastapi import FastAPI
from ray import serve
from starlette.responses import StreamingResponse

fastapi_app = FastAPI()


class Streamer:
    def __init__(self):
        self.queue = Queue()

    def put(self, word):
        self.queue.put(word)

    def end(self):
        self.queue.put(None)


@serve.deployment
@serve.ingress(fastapi_app)
class Textbot:
    def __init__(self, model_id: str):
        self.loop = asyncio.get_running_loop()
        self.model_id = model_id

    @fastapi_app.post("/")
    def handle_request(self, prompt: str) -> StreamingResponse:
        streamer = Streamer()
        self.loop.run_in_executor(None, self.generate_text, prompt, streamer)
        return StreamingResponse(self.consume_streamer(streamer), media_type="text/plain")

    def generate_text(self, prompt: str, streamer: Streamer):
        for word in prompt.split():
            streamer.put(f"{self.model_id}:{word} ")
        streamer.end()

    async def consume_streamer(self, streamer: Streamer):
        while True:
            try:
                token = streamer.queue.get_nowait()
            except Empty:
                await asyncio.sleep(0.001)
                continue
            if token is None:
                return
            yield token


app = Textbot.bind("m")
REQUESTS = [{"method": "POST", "path": "/?prompt=tell+me+a+story"}, {"method": "POST", "path": "/"}]
