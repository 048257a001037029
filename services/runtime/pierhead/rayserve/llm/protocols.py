"""What deployments of Ray Serve LLM have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

from pierhead.llm import objects


@dataclass
class RawRequestInfo:
    """The headers of the client's request, as a server's second argument."""

    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_starlette_request(cls, request: Any) -> Self:
        """Those of Starlette's request."""
        return cls(dict(request.headers))

    def to_starlette_request(self) -> Any:
        """A request with these headers and nothing else."""
        from starlette.requests import Request

        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        return Request({"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""})


@runtime_checkable
class DeploymentProtocol(Protocol):
    """A class that knows its options for `@serve.deployment`."""

    @classmethod
    def get_deployment_options(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The options."""
        ...


class LLMServerProtocol(DeploymentProtocol, Protocol):
    """What ingresses call. `raw_request`: see RawRequestInfo."""

    def chat(self, request: objects.ChatCompletionRequest, raw_request: Any = None) -> AsyncIterator[Any]:
        """Yields texts of events, or one answer, or one ErrorResponse; as the following do."""
        ...

    def completions(self, request: objects.CompletionRequest, raw_request: Any = None) -> AsyncIterator[Any]:
        """See `chat`."""
        ...

    def embeddings(self, request: objects.EmbeddingRequest, raw_request: Any = None) -> AsyncIterator[Any]:
        """See `chat`."""
        ...
