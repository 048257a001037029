"""The paths of OpenAI's API, and the LLMServer method for each."""

from __future__ import annotations

import re
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


SCORE: Final = RequestKind("Score", "/v1/score")
TOKENIZE: Final = RequestKind("Tokenize", "/tokenize")
DETOKENIZE: Final = RequestKind("Detokenize", "/detokenize")

POSTS: Final = {
    "/v1/chat/completions": RequestKind("Chat", "/v1/chat/completions", messages=True, generates=True),
    "/v1/completions": RequestKind("Completions", "/v1/completions", generates=True),
    "/v1/embeddings": RequestKind("Embeddings", "/v1/embeddings"),
    "/v1/score": SCORE,
    "/score": SCORE,
    "/tokenize": TOKENIZE,
    "/v1/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/v1/detokenize": DETOKENIZE,
    "/v1/{path:.+}": RequestKind("PassThrough", ""),
}

_PATH = re.compile(r"/v1(/[A-Za-z0-9_~:@-][A-Za-z0-9._~:@-]*)+")


def is_path(path: str) -> bool:
    """Whether a path may be passed on: without `..`, which leads out of /v1 to the operator's paths, without a mark
    that ends a path, and in its one spelling.
    """
    return _PATH.fullmatch(path) is not None
