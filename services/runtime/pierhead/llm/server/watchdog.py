"""Detects an engine that generates no tokens. Pure: times, in seconds of any clock, and loads are arguments.

An engine may report healthy and generate nothing: a collective hangs, or a scheduler waits for blocks that no
request will free. Only missing tokens show that.
"""

from __future__ import annotations

from pierhead.llm.server.engine import EngineStats
from pierhead.llm.server.errors import EngineStalledError


class TokenWatchdog:
    """Records when the engine last made progress: it generated a token, or was idle."""

    def __init__(self, stall_timeout_s: float, now: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._tokens = -1
        self._since = now

    def began(self, now: float) -> None:
        """A request came to an idle engine: the time before it does not count as a stall."""
        self._since = now

    def check(self, load: EngineStats, now: float) -> None:
        """Raises EngineStalledError once the engine has had requests for `stall_timeout_s` without a token."""
        if load.tokens != self._tokens or load.running + load.waiting == 0:
            self._tokens, self._since = load.tokens, now
            return
        still_s = now - self._since
        if still_s >= self._stall_timeout_s:
            raise EngineStalledError(
                f"the engine has made no token for {still_s:.3g} s (x-serve.llm.stall_timeout_s = "
                f"{self._stall_timeout_s:g}) with {load.running} requests running and {load.waiting} waiting: it hangs "
                "and is to be replaced; where prompts take longer than that to read, raise stall_timeout_s"
            )
