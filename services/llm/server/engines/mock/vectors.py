"""The mock engine's embeddings: unit vectors that depend on the text alone. Pure."""

from __future__ import annotations

import base64
import math
import random
import struct
import zlib
from collections.abc import Sequence


def vector(tokens: Sequence[bytes], size: int) -> list[float]:
    """A direction for each token, added up: texts that share tokens lie closer together."""
    total = [0.0] * size
    for token in tokens or [b""]:
        draw = random.Random(zlib.crc32(token)).random  # noqa: S311 - it is to be the same each time
        total = [each + draw() - 0.5 for each in total]
    length = math.sqrt(sum(each * each for each in total)) or 1.0
    return [each / length for each in total]


def as_base64(values: Sequence[float]) -> str:
    """Little-endian float32, as OpenAI's clients ask for it."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def likeness(one: Sequence[float], other: Sequence[float]) -> float:
    """From 0 to 1; 1 = the same direction."""
    return (1 + sum(a * b for a, b in zip(one, other, strict=True))) / 2
