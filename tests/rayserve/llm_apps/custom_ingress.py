"""The seed's custom ingress: an API of its own over handles of servers."""

from typing import List

from custom_engine import config_of
from fastapi import FastAPI
from pierhead import rayserve as serve
from pierhead.rayserve.handle import DeploymentHandle
from pierhead.rayserve.llm import build_llm_deployment
from pierhead.rayserve.llm.openai_api_models import ChatCompletionRequest
from pydantic import BaseModel

app = FastAPI()


class CustomRequest(BaseModel):
    text: str


@serve.deployment
@serve.ingress(app)
class CustomIngress:
    """Custom ingress with non-OpenAI API."""

    def __init__(self, server_handles: List[DeploymentHandle]):
        self.handles = server_handles

    @app.post("/custom/endpoint")
    async def custom_endpoint(self, request: CustomRequest):
        chat = ChatCompletionRequest(model="small", messages=[{"role": "user", "content": request.text}])
        async for answer in self.handles[0].options(stream=True).chat.remote(chat):
            return {"answer": answer.choices[0].message.content}


app = CustomIngress.bind([build_llm_deployment(config_of("small"))])
