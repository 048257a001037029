"""Dependencies, headers, a router in the class, a middleware class, sub-applications."""

from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.staticfiles import StaticFiles  # noqa: F401
from ray import serve

web = FastAPI(docs_url=None, redoc_url=None)
web.add_middleware(CORSMiddleware, allow_origins=["http://a.test"], allow_methods=["*"])
inner = FastAPI()


@inner.get("/deep")
def deep(request: Request):
    return [request.url.path, request.scope["root_path"]]


web.mount("/inner", inner)


async def user(authorization: Annotated[str | None, Header()] = None) -> str:
    if authorization != "Bearer key":
        raise HTTPException(401, "who are you?", headers={"x-auth": "bearer"})
    return "ada"


@serve.deployment
@serve.ingress(web)
class Api:
    def __init__(self):
        self.seen = []

    @web.get("/me")
    async def me(self, name: Annotated[str, Depends(user)]):
        self.seen.append(name)
        return {"me": name, "seen": len(self.seen)}

    @web.get("/sync/{value:path}")
    def path(self, value: str, request: Request, q: list[int] | None = None):
        return [value, q, str(request.query_params)]

    @web.api_route("/any", methods=["GET", "POST"], include_in_schema=False)
    async def any(self, request: Request):
        return request.method


app = Api.bind()
REQUESTS = [
    {"path": "/me"},
    {"path": "/me", "headers": {"authorization": "Bearer key"}},
    {"path": "/sync/a/b/c?x=1"},
    {"method": "POST", "path": "/any", "headers": {"origin": "http://a.test"}},
    {"path": "/inner/deep"},
    {"path": "/docs"},
    {
        "method": "OPTIONS",
        "path": "/any",
        "headers": {"origin": "http://a.test", "access-control-request-method": "POST"},
    },
]
