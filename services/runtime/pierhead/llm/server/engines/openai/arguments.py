"""The openai engine's `engine_kwargs`."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError('expected the address of a server, such as "http://sglang:30000/v1"')
    if parts.username is not None or parts.password is not None:  # it stands in logs, events and errors
        raise ValueError("expected an address without a name and a password; a key belongs into api_key_env")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _check_path(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError('expected a path on that server, such as "/health"')
    return path


Path = Annotated[str, AfterValidator(_check_path)]


PATHS = frozenset(
    (
        "/classify",
        "/detokenize",
        "/pooling",
        "/tokenize",
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/classify",
        "/v1/embeddings",
        "/v1/images/generations",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/moderations",
        "/v1/pooling",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
    )
)
"""Paths that the engine passes on, in addition to chat and completions. Requests carry the operator's key: other paths
of OpenAI's API (files, batches, fine-tuning, stored responses) would show and change what belongs to the operator.
"""


class OpenAIArguments(BaseModel):
    """Unknown ones are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    base_url: Annotated[str, AfterValidator(_check_url)]
    """Of the server, with or without the /v1 at its end."""
    api_key: str | None = None
    api_key_env: str | None = None
    """The environment variable that holds the key: compose files are no place for secrets."""
    model: Annotated[str, Field(min_length=1)] | None = None
    """The server's name of the model; None: model_loading.model_id."""
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Tokens of prompt and answer together; None: what the server says, where it does."""
    health_path: Path = "/v1/models"
    """A GET there answers with 200 while the server is well."""
    metrics_path: Path | None = "/metrics"
    """Its metrics in Prometheus' text format; None: it has none."""
    one_token: Literal["chat", "completions", "embeddings"] = "chat"  # noqa: S105 - no secret
    """What the server is asked for to prove that it generates."""
    more_paths: list[Path] = []
    """Paths that are passed on in addition to PATHS, unchanged."""
    start_timeout_s: Seconds = 1800.0
    """The longest wait for the server."""
    connect_timeout_s: Seconds = 5.0
    read_timeout_s: Seconds = 600.0
    """The longest silence while it works on a request."""
    health_timeout_s: Seconds = 5.0
