"""The paths of OpenAI's API and of Anthropic's, as vLLM's server has them, and the LLMServer method for each."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class RequestKind:
    """One kind of request."""

    rpc: str
    """Of LLMServer."""
    path: str
    """LLMRequest.path; "" = the client's own."""
    messages: bool = False
    """Whether its body must have `messages`."""
    generates: bool = False
    """Whether it generates tokens after a prompt, which a prefill service may read."""
    streams: bool = False
    """Whether it is answered with events where the body's `stream` is true, else with one JSON object."""
    anthropic: bool = False
    """Whether it belongs to Anthropic's API, whose errors have another form."""
    is_free: bool = False
    """Whether its prompt costs no tokens, as no model reads it."""


def _passed(path: str) -> RequestKind:
    return RequestKind("PassThrough", path)


CHAT: Final = RequestKind("Chat", "/v1/chat/completions", messages=True, generates=True, streams=True)
COMPLETIONS: Final = RequestKind("Completions", "/v1/completions", generates=True, streams=True)
EMBEDDINGS: Final = RequestKind("Embeddings", "/v1/embeddings")
SCORE: Final = RequestKind("Score", "/v1/score")
TOKENIZE: Final = RequestKind("Tokenize", "/tokenize", is_free=True)
DETOKENIZE: Final = RequestKind("Detokenize", "/detokenize", is_free=True)
RERANK: Final = _passed("/v1/rerank")
CLASSIFY: Final = _passed("/classify")
POOLING: Final = _passed("/pooling")
RESPONSES: Final = RequestKind("PassThrough", "/v1/responses", streams=True)
MESSAGES: Final = RequestKind("PassThrough", "/v1/messages", messages=True, streams=True, anthropic=True)
COUNT_TOKENS: Final = RequestKind(
    "PassThrough", "/v1/messages/count_tokens", messages=True, anthropic=True, is_free=True
)
INVOCATION: Final = _passed("/invocations")
OTHER: Final = _passed("")
STORED: Final = _passed("")
"""A stored response: its path names it, and no body is read."""

POSTS: Final = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/invocations": INVOCATION,
    "/rerank": RERANK,
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/classify": CLASSIFY,
    "/v1/classify": CLASSIFY,
    "/pooling": POOLING,
    "/v1/pooling": POOLING,
    "/v1/score": SCORE,
    "/score": SCORE,
    "/tokenize": TOKENIZE,
    "/v1/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/v1/detokenize": DETOKENIZE,
}
"""The others below /v1 are `OTHER`."""

KNOWN: Final = (*POSTS, "/v1/models", "/health", "/ping", "/version", "/load")

ABSENT: Final = "/v1/{path:(?:files|batches)(?:/.*)?}"
"""What OpenAI stores for an account: no engine has it, and no model is named there."""

RESPONSE: Final = "/v1/responses/{id}"

_INVOKED: Final = {
    "messages": CHAT, "prompt": COMPLETIONS, "input": EMBEDDINGS, "text_1": SCORE, "queries": SCORE, "query": RERANK,
}  # fmt: skip


def invoked(members: Collection[str]) -> RequestKind | None:
    """The kind of a request to SageMaker's one path, by the members of its body; None = of no kind."""
    return next((kind for member, kind in _INVOKED.items() if member in members), None)


_PATH = re.compile(r"/v1(/[A-Za-z0-9_~:@-][A-Za-z0-9._~:@-]*)+")


def is_path(path: str) -> bool:
    """Whether a path may be passed on: without `..`, which leads out of /v1 to the operator's paths, without a mark
    that ends a path, and in its one spelling.
    """
    return _PATH.fullmatch(path) is not None
