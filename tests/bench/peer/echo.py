"""The peer's echo: FastAPI ingress, one call to a child. The same answer as services/echo gives."""

from __future__ import annotations

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

api = FastAPI()


@serve.deployment(max_ongoing_requests=100_000)
class Child:
    """Says what it is told."""

    async def echo(self, message: str) -> str:
        return f"Echo: {message}"


@serve.deployment(max_ongoing_requests=100_000)
@serve.ingress(api)
class Ingress:
    """One route, one call."""

    def __init__(self, child: DeploymentHandle) -> None:
        self._child = child

    @api.get("/echo")
    async def echo(self, message: str) -> dict[str, str]:
        return {"response": await self._child.echo.remote(message)}


application = Ingress.bind(Child.bind())  # type: ignore[attr-defined]  # what the decorators add
