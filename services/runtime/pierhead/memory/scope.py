"""The request that content in shared memory belongs to: as long as it is served, the content stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from pierhead.memory.link import Link

End = Callable[[], object]


class Scope:
    """One request that this process serves. Used under the lock of the process's memory."""

    __slots__ = ("_ends", "ended", "reply")

    def __init__(self, reply: Link | None = None) -> None:
        self.ended = False
        self.reply = reply
        """The link to the request's caller; None if they share no memory."""
        self._ends: dict[Any, End] = {}

    def keep(self, key: Any, end: End) -> None:
        """Call `end()` when the request ends, unless `key` is dropped first."""
        self._ends[key] = end

    def drop(self, key: Any) -> None:
        """Forget what was kept under `key`."""
        self._ends.pop(key, None)

    def end(self) -> None:
        """The request has ended."""
        self.ended = True
        ends, self._ends = self._ends, {}
        for end in ends.values():
            end()

    def parts(self) -> Sequence[Scope]:
        """The requests that have not ended."""
        return () if self.ended else (self,)


class JoinedScope:
    """The requests of one batch: content that is made while it runs belongs to all of them."""

    __slots__ = ("_scopes",)

    def __init__(self, scopes: Sequence[Scope | JoinedScope]) -> None:
        self._scopes = tuple(scopes)

    @property
    def ended(self) -> bool:
        """Whether every request has ended."""
        return all(scope.ended for scope in self._scopes)

    @property
    def reply(self) -> Link | None:
        """The first request's: the others' replies cost a copy if they have another caller."""
        return next((scope.reply for scope in self._scopes if not scope.ended), None)

    def parts(self) -> Sequence[Scope]:
        """The requests that have not ended."""
        return [part for scope in self._scopes for part in scope.parts()]


AnyScope = Scope | JoinedScope

SCOPE: ContextVar[AnyScope | None] = ContextVar("pierhead_shared_memory", default=None)
"""The running code's request; None outside of requests, and without shared memory."""


def join(scopes: Sequence[AnyScope | None]) -> AnyScope | None:
    """The scope of a batch of requests; None if one of them has none, as its end is not known."""
    if any(scope is None for scope in scopes):
        return None
    return JoinedScope([scope for scope in scopes if scope is not None])
