"""Starlette's responses with background tasks, cookies, files."""

import asyncio
import os
import tempfile

from ray import serve
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response


@serve.deployment
class Responses:
    def __init__(self):
        self.done = asyncio.Event()
        descriptor, self.path = tempfile.mkstemp(suffix=".txt")
        os.write(descriptor, b"file content")
        os.close(descriptor)

    async def finish(self):
        await asyncio.sleep(0.05)
        self.done.set()

    async def __call__(self, request: Request):
        path = request.url.path
        if path == "/begin":
            return JSONResponse({"begun": True}, background=BackgroundTask(self.finish), headers={"x-begun": "1"})
        if path == "/wait":
            await asyncio.wait_for(self.done.wait(), 10)
            return "finished"
        if path == "/cookie":
            response = Response("c", media_type="text/plain")
            response.set_cookie("a", "1", max_age=5, httponly=True)
            return response
        return FileResponse(self.path, media_type="text/plain", filename="f.txt")


app = Responses.bind()
REQUESTS = [
    {"path": "/begin"},
    {"path": "/wait"},
    {"path": "/cookie"},
    {"path": "/file"},
    {"method": "HEAD", "path": "/file"},
]
