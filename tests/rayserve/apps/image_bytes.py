"""Binary bodies in and out, and content types."""

import struct

from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request

web = FastAPI()


@serve.deployment
class Detector:
    def detect(self, raw: bytes):
        return [(index, value) for index, value in enumerate(raw) if value > 200]


@serve.deployment
@serve.ingress(web)
class Api:
    def __init__(self, detector):
        self.handle: DeploymentHandle = detector

    @web.get("/image", responses={200: {"content": {"image/bmp": {}}}}, response_class=Response)
    async def image(self, size: int = 2):
        return Response(content=struct.pack("<HH", size, size) + bytes(size), media_type="image/bmp")

    @web.post("/detect")
    async def detect(self, request: Request):
        return await self.handle.detect.remote(await request.body())

    @web.get("/chunks")
    async def chunks(self):
        return StreamingResponse(iter([b"\x01" * 3, b"\x02" * 3]), media_type="application/octet-stream")


app = Api.bind(Detector.bind())
REQUESTS = [
    {"path": "/image?size=3"},
    {"method": "POST", "path": "/detect", "body": "aÿþb"},
    {"path": "/chunks"},
]
