"""The limits of one API key: requests and tokens per minute, and concurrent requests. Pure.

admit(estimate) --> None: the request runs --> settle(what it used)
    `--> Refused: which limit, and how long to wait
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pierhead.llm.gateway.keys.token_bucket import TokenBucket


@dataclass(frozen=True, slots=True)
class Refused:
    """A limit that is used up."""

    what: Literal["requests", "tokens"]
    limit: float
    """Per minute, or at a time: this gateway's share."""
    wait_s: float
    at_a_time: bool = False


class Limits:
    """One key's limits in this process. None = no limit."""

    def __init__(self, requests: float | None, tokens: float | None, now: float, concurrent: int | None = None) -> None:
        """`requests`, `tokens`: per minute, in this process; `concurrent`: requests at a time."""
        self._concurrent = concurrent
        self._ongoing = 0
        self._buckets: list[tuple[Literal["requests", "tokens"], float, TokenBucket]] = []
        self._tokens: TokenBucket | None = None
        if requests is not None:
            self._buckets.append(("requests", requests, TokenBucket(requests, now)))
        if tokens is not None:
            self._tokens = TokenBucket(tokens, now)
            self._buckets.append(("tokens", tokens, self._tokens))

    def admit(self, tokens: int, now: float) -> Refused | None:
        """Take one request and `tokens`, an estimate, from both buckets. If one is short, take nothing and return the
        reason. An admitted request ends with `correct`.
        """
        if self._concurrent is not None and self._ongoing >= self._concurrent:
            return Refused("requests", self._concurrent, 1.0, at_a_time=True)
        for what, per_minute, bucket in self._buckets:
            wait_s = bucket.wait_s(1 if what == "requests" else tokens, now)
            if wait_s > 0:
                return Refused(what, per_minute, wait_s)
        for what, _, bucket in self._buckets:
            bucket.spend(1 if what == "requests" else tokens, now)
        self._ongoing += 1
        return None

    def correct(self, estimate: int, used: int, now: float) -> None:
        """An admitted request has ended: replace the estimate with the tokens used."""
        self._ongoing -= 1
        if self._tokens is not None:
            self._tokens.spend(used - estimate, now)

    def headers(self, now: float) -> dict[str, str]:
        """OpenAI's headers: the limit, the rest, and the time until all of it is available again."""
        values: dict[str, str] = {}
        for what, per_minute, bucket in self._buckets:
            values[f"x-ratelimit-limit-{what}"] = f"{per_minute:.0f}"
            values[f"x-ratelimit-remaining-{what}"] = str(max(0, int(bucket.level(now))))
            values[f"x-ratelimit-reset-{what}"] = duration(bucket.full_in_s(now))
        return values


Clock = Callable[[], float]


def duration(seconds: float) -> str:
    """As OpenAI's headers spell it: "0s", "17ms", "1.5s", "6m0s"."""
    milliseconds = round(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    minutes, rest = divmod(-(-milliseconds // 1000), 60)
    return f"{minutes}m{rest}s"
