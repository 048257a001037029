"""Bodies of some megabytes, read at once and in pieces."""

import hashlib

from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse


@serve.deployment
class Large:
    async def __call__(self, request: Request):
        if request.url.path == "/pieces":
            size, digest = 0, hashlib.sha256()
            async for piece in request.stream():
                size += len(piece)
                digest.update(piece)
            return [size, digest.hexdigest()]
        if request.url.path == "/back":
            return StreamingResponse((b"y" * 1000 for _ in range(20)), media_type="application/octet-stream")
        body = await request.body()
        return [len(body), hashlib.sha256(body).hexdigest()]


app = Large.bind()
REQUESTS = [
    {"method": "POST", "path": "/whole", "body": "x" * 3_000_000},
    {"method": "POST", "path": "/pieces", "body": "ab" * 1_000_000},
    {"path": "/back"},
    {"method": "POST", "path": "/whole"},
]
