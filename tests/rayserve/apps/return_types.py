"""What a plain handler may return."""

from dataclasses import dataclass

from ray import serve
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response


@dataclass
class Point:
    x: int
    y: float


@serve.deployment
class Returns:
    async def __call__(self, request: Request):
        kind = request.url.path.strip("/")
        return {
            "str": "text ünïcode",
            "bytes": b"\x00\x01raw",
            "none": None,
            "int": 7,
            "float": 1.5,
            "bool": True,
            "list": [1, "two", None, {"three": 3}],
            "tuple": (1, 2),
            "set": {5},
            "dict": {"a": {"b": [1, 2]}},
            "dataclass": Point(1, 2.0),
            "response": Response("teapot", status_code=418, headers={"x-kind": "tea"}, media_type="text/tea"),
            "json": JSONResponse({"j": 1}, status_code=201),
            "html": HTMLResponse("<b>hi</b>"),
            "plain": PlainTextResponse("plain"),
            "redirect": RedirectResponse("/plain"),
            "empty": Response(status_code=204),
            "bad": object(),
        }[kind]


app = Returns.bind()
REQUESTS = [
    {"path": f"/{kind}"}
    for kind in (
        "str bytes none int float bool list tuple set dict dataclass response json html plain redirect empty bad missing"
    ).split()
]
