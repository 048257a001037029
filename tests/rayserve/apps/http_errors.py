"""What HTTP clients see of exceptions."""

from ray import serve
from starlette.exceptions import HTTPException
from starlette.requests import Request


@serve.deployment
class Faulty:
    async def __call__(self, request: Request):
        kind = request.url.path.strip("/")
        if kind == "value":
            raise ValueError("secret words")
        if kind == "http":
            raise HTTPException(404, "not here")
        if kind == "timeout":
            raise TimeoutError("late")
        if kind == "assert":
            raise AssertionError
        return "fine"


app = Faulty.bind()
REQUESTS = [{"path": f"/{kind}"} for kind in ("value", "http", "timeout", "assert", "other")]
