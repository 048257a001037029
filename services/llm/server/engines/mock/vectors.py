"""The mock engine's embeddings and scores: unit vectors that depend on the text alone. Pure."""

from __future__ import annotations

import base64
import json
import math
import random
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from services.llm.server import bodies
from services.llm.server.errors import LLMRequestError

Tokens = list[bytes]


SIZE = 64
"""Dimensions of an embedding, where the request does not ask for fewer."""


def embeddings(body: bodies.Body, inputs: list[Tokens]) -> dict[str, Any]:
    """The answer of /v1/embeddings. Raises LLMRequestError."""
    size = bodies.integer(body, "dimensions", SIZE, 1, SIZE) or SIZE
    encoding = body.get("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise LLMRequestError(
            f"encoding_format: expected float or base64, found {json.dumps(encoding)}", param="encoding_format"
        )
    found = [_vector(tokens, size) for tokens in inputs]
    data = [
        {"object": "embedding", "index": index, "embedding": _as_base64(each) if encoding == "base64" else each}
        for index, each in enumerate(found)
    ]
    return _list_of(data, body, inputs)


def scores(body: bodies.Body, ones: list[Tokens], others: list[Tokens]) -> dict[str, Any]:
    """The answer of /v1/score: 1 for texts of the same direction, 0 for opposite ones. Raises LLMRequestError."""
    if len(ones) not in (1, len(others)):
        raise LLMRequestError(
            f"text_1: expected one text, or as many as text_2, {len(others)}, found {len(ones)}", param="text_1"
        )
    pairs = zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True)
    data = [
        {"object": "score", "index": index, "score": _likeness(_vector(one, SIZE), _vector(other, SIZE))}
        for index, (one, other) in enumerate(pairs)
    ]
    return _list_of(data, body, ones + others)


def _vector(tokens: Tokens, size: int) -> list[float]:
    """A direction for each token, added up: texts that share tokens lie closer together."""
    total = [0.0] * size
    for token in tokens or [b""]:
        draw = random.Random(zlib.crc32(token)).random  # noqa: S311 - it is to be the same each time
        total = [each + draw() - 0.5 for each in total]
    length = math.sqrt(sum(each * each for each in total)) or 1.0
    return [each / length for each in total]


def _as_base64(values: Sequence[float]) -> str:
    """Little-endian float32, as OpenAI's clients ask for it."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _likeness(one: Sequence[float], other: Sequence[float]) -> float:
    return (1 + sum(a * b for a, b in zip(one, other, strict=True))) / 2


def _list_of(data: list[Any], body: bodies.Body, inputs: list[Tokens]) -> dict[str, Any]:
    tokens = sum(map(len, inputs))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body["model"], "usage": usage}
