"""The paths of OpenAI's API, and which call of LLMServer each is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One kind of request."""

    rpc: str
    """Of LLMServer."""
    path: str
    """LLMRequest.path; "" = the client's own."""
    messages: bool = False
    """Whether its body has to have `messages`."""
    generates: bool = False
    """Whether it makes tokens after a prompt, which prefill may read."""


CHAT: Final = Endpoint("Chat", "/v1/chat/completions", messages=True, generates=True)
COMPLETIONS: Final = Endpoint("Completions", "/v1/completions", generates=True)
EMBEDDINGS: Final = Endpoint("Embeddings", "/v1/embeddings")
SCORE: Final = Endpoint("Score", "/v1/score")
TOKENIZE: Final = Endpoint("Tokenize", "/tokenize")
DETOKENIZE: Final = Endpoint("Detokenize", "/detokenize")
PASS_THROUGH: Final = Endpoint("PassThrough", "")

POSTS: Final = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/score": SCORE,
    "/score": SCORE,
    "/tokenize": TOKENIZE,
    "/v1/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/v1/detokenize": DETOKENIZE,
    "/v1/{path:.+}": PASS_THROUGH,
}

_PATH = re.compile(r"/v1(/[A-Za-z0-9_~:@-][A-Za-z0-9._~:@-]*)+")


def is_path(path: str) -> bool:
    """Whether a path may be passed on: without `..`, which leads out of /v1 to what is for operators alone, without
    anything that ends a path, and spelt in the one way.
    """
    return _PATH.fullmatch(path) is not None
