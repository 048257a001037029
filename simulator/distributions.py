"""Durations as written on a command line: "0.2", "uniform:1:3", "exp:0.1", "lognormal:0.1:0.5"."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from controller.errors import InvalidRequest

_Z99 = 2.3263478740408408
"""A normal variable stays below this many standard deviations 99 times out of 100."""
FORMS = 'seconds ("0.2"), "uniform:LOW:HIGH", "exp:MEAN" or "lognormal:MEDIAN:P99", each number from 0 to 86400'


@dataclass(frozen=True, slots=True)
class Distribution:
    """Durations in seconds."""

    text: str
    mean: float
    sample: Callable[[Random], float]


def parse_distribution(option: str, text: str) -> Distribution:
    """Read what was written for `option`. Raises InvalidRequest."""
    kind, *words = text.split(":") if ":" in text else ("constant", text)
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if all(0 <= number <= 86_400 for number in numbers):
        match kind, numbers:
            case "constant", [seconds]:
                return Distribution(text, seconds, lambda rng: seconds)
            case "uniform", [low, high] if low <= high:
                return Distribution(text, (low + high) / 2, lambda rng: rng.uniform(low, high))
            case "exp", [mean] if mean > 0:
                return Distribution(text, mean, lambda rng: rng.expovariate(1 / mean))
            case "lognormal", [median, p99] if 0 < median < p99:
                sigma = math.log(p99 / median) / _Z99
                mean = median * math.exp(sigma**2 / 2)
                return Distribution(text, mean, lambda rng: rng.lognormvariate(math.log(median), sigma))
            case _:
                pass
    raise InvalidRequest(f'{option}: expected {FORMS}, found "{text}"')
