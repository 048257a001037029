"""Server-sent events through FastAPI from another deployment's stream."""

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle

web = FastAPI()


@serve.deployment
class Tokens:
    async def generate(self, prompt: str, most: int):
        for number, word in enumerate(prompt.split()):
            if number == most:
                return
            yield word.upper()


@serve.deployment
@serve.ingress(web)
class Chat:
    def __init__(self, tokens: DeploymentHandle):
        self.tokens = tokens.options(stream=True)

    @web.get("/chat")
    async def chat(self, prompt: str, most: int = 3):
        async def events():
            async for token in self.tokens.generate.remote(prompt, most):
                yield f"data: {token}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


app = Chat.bind(Tokens.bind())
REQUESTS = [{"path": "/chat?prompt=a+b+c+d"}, {"path": "/chat?prompt=a&most=1"}, {"path": "/chat"}]
