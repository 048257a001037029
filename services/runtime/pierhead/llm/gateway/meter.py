"""Measures one request: the tokens used and the time taken, read from its replies and counted at its end. Pure."""

from __future__ import annotations

from typing import NamedTuple

from pierhead.llm.gateway.body.body import RequestParts
from pierhead.llm.gateway.metrics import GatewayMetrics, finish_label
from pierhead.llm.gateway.models.model_map import ModelRoute
from pierhead.llm.v1.llm_pb2 import LLMReply
from pierhead.trace import RequestTrace


class Used(NamedTuple):
    """Tokens."""

    prompt: int
    completion: int
    cached: int = 0
    """Of the prompt."""

    @property
    def charged(self) -> int:
        """Those that the key is charged."""
        return self.prompt + self.completion


class Meter:
    """One request's accounts."""

    __slots__ = (
        "_counted",
        "_first_at",
        "_first_tokens",
        "_last",
        "_last_at",
        "_started",
        "asked",
        "begun",
        "streamed",
    )

    def __init__(self, started: float) -> None:
        self._started = self.asked = started
        """When the request came, and when its service was called."""
        self.begun = False
        """Whether a service has begun to answer, not with an error."""
        self.streamed = False
        self._counted = 0
        self._first_tokens = 0
        self._first_at = 0.0
        self._last_at = 0.0
        self._last: LLMReply | None = None

    def note(self, reply: LLMReply, now: float) -> None:
        """A reply came."""
        self._last = reply
        tokens = reply.tokens
        if tokens:
            if not self._counted:
                self._first_at, self._first_tokens = now, tokens
            self._counted += tokens
            self._last_at = now

    def used(self, asked: RequestParts | None, *, gave_up: bool = False) -> Used:
        """The tokens used: the engine's count, else an estimate of the prompt. `asked`: None = it costs nothing.
        `gave_up`: the client left before the end. Its prompt counts nevertheless: else clients that leave at once would
        use nothing of their limits.
        """
        estimate = 0 if asked is None or not (self.begun or gave_up) else asked.prompt.tokens
        last = self._last
        if last is not None and last.HasField("usage"):
            usage = last.usage
            made = usage.completion_tokens or self._counted
            return Used(usage.prompt_tokens or estimate, made, usage.cached_tokens)
        return Used(estimate, self._counted)

    def add_to(self, trace: RequestTrace, used: Used) -> None:
        """Add the engine's work on a streamed answer to its request's trace, as seen from here: from the call to the
        first token, which has the wait for a place in it, and from there to the last one.
        """
        if self.streamed and self._counted:
            trace.span("engine", "prefill", self.asked).end(
                self._first_at, prompt_tokens=used.prompt, cached_tokens=used.cached
            )
            trace.span("engine", "decode", self._first_at).end(self._last_at, tokens=used.completion)

    def count(
        self, metrics: GatewayMetrics, route: ModelRoute | None, key: str, code: str, used: Used, now: float
    ) -> None:
        """Count the request. `code`: the HTTP status that it ended with."""
        reason = finish_label("" if self._last is None else self._last.usage.finish_reason)
        if route is None:
            metrics.requests.inc(("", "", key, code, reason))
            return
        labels = (metrics.model_label(route.model, route.base, known=self.begun), route.service)
        metrics.requests.inc((*labels, key, code, reason))
        metrics.request.observe(labels, now - self._started)
        for kind, tokens in used._asdict().items():
            if tokens:
                metrics.tokens.inc((*labels, kind, key), tokens)
        if self.streamed and self._counted:
            metrics.first_token.observe(labels, self._first_at - self._started)
            after = self._counted - self._first_tokens
            if after > 0:
                metrics.per_token.observe(labels, (self._last_at - self._first_at) / after)
