"""Decides for `@batch` which requests form the next batch, and when. Pure: no clock, I/O or event loop.

When a batch starts (`BatchWindow.take` is this list in code):

1. not while `max_concurrent_batches` run already;
2. at once when it is full: `max_batch_size` requests, or `max_batch_rows` rows;
3. at the end of the event loop's turn if nothing ran and nothing waited when its first request came, with all requests
   of that turn: on an idle replica no request waits;
4. when its oldest request has waited `batch_wait_timeout_s`.

While a batch runs, arrivals queue, so batches grow with the load.

The requests of a batch are for one model (`Member.model`): each model has a queue of its own, first come first served,
and the queue that has been due longest goes first. So a busy model fills its batches and cannot starve another model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, TypeVar

T = TypeVar("T")
M = TypeVar("M", bound="Member[Any]")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a batch; see `batch` for each. Raises ValueError that names an invalid limit."""

    max_batch_size: int = 10
    batch_wait_timeout_s: float = 0.01
    max_concurrent_batches: int = 1
    max_batch_rows: int | None = None
    batch_timeout_s: float | None = None
    max_buffered_results: int = 64
    eager: bool = True
    """Rule 3."""

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_concurrent_batches", "max_batch_rows", "max_buffered_results"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}: expected an integer >= 1, found {value!r}")
        if not self.batch_wait_timeout_s >= 0:
            raise ValueError(f"batch_wait_timeout_s: expected seconds >= 0, found {self.batch_wait_timeout_s!r}")
        if self.batch_timeout_s is not None and not self.batch_timeout_s > 0:
            raise ValueError(f"batch_timeout_s: expected seconds > 0, or None, found {self.batch_timeout_s!r}")


class Member(Generic[T]):
    """One request on its way through a batch. Compared by identity."""

    __slots__ = ("arrived_at", "deadline", "item", "model", "rows")

    def __init__(self, item: T, rows: int, arrived_at: float, deadline: float = inf, model: str | None = None) -> None:
        self.item = item
        self.rows = rows
        self.arrived_at = arrived_at
        self.deadline = deadline
        """When its caller stops waiting, by the clock of `arrived_at`."""
        self.model = model
        """Requests for different models are never in one batch."""


class _ModelQueue(Generic[M]):
    """The waiting requests for one model, oldest first. Any request can be removed in constant time."""

    __slots__ = ("members", "rows")

    def __init__(self) -> None:
        self.members: OrderedDict[M, None] = OrderedDict()
        self.rows = 0

    @property
    def oldest(self) -> M:
        return next(iter(self.members))

    def add(self, member: M) -> None:
        self.members[member] = None
        self.rows += member.rows

    def remove(self, member: M) -> None:
        del self.members[member]
        self.rows -= member.rows


class BatchWindow(Generic[M]):
    """Decides which requests form the next batch, and when. `now` is an argument, in seconds."""

    def __init__(self, limits: BatchLimits, rows_of_all: Callable[[Sequence[M]], float] | None = None) -> None:
        """`rows_of_all`: the rows of requests together, where these are not the sum of each one's."""
        self.limits = limits
        self._rows_of_all = rows_of_all
        self.running = 0
        """Batches returned by `start_batch` and not yet reported as `finished`."""
        self._queues: dict[str | None, _ModelQueue[M]] = {}
        self._eager = False

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(len(queue.members) for queue in self._queues.values())

    def add(self, member: M) -> None:
        """A request arrived."""
        if self.limits.eager and not self._queues and self.running == 0:
            self._eager = True
        queue = self._queues.get(member.model)
        if queue is None:
            queue = self._queues[member.model] = _ModelQueue()
        queue.add(member)

    def discard(self, member: M) -> None:
        """A request left; the others keep their places. Does nothing if it does not wait here."""
        queue = self._queues.get(member.model)
        if queue is not None and member in queue.members:
            self._remove(queue, member)

    def due_at(self) -> float | None:
        """When to call `start_batch` if nothing else happens; None when nothing waits or no batch may start."""
        queue = self._next()
        return None if queue is None else self._due(queue)

    def start_batch(self, now: float) -> tuple[list[M], list[M]]:
        """Start the next batch if one is due.

        Returns its members in order of arrival, and the requests of this batch whose deadline has passed, which are
        removed. Both are empty only when nothing is due. Without members no batch was started.
        A request with more rows than `max_batch_rows` forms a batch alone: the service may split it.
        """
        members: list[M] = []
        expired: list[M] = []
        queue = self._next()
        if queue is None or now < self._due(queue):
            return members, expired
        size, most_rows = self.limits.max_batch_size, self.limits.max_batch_rows
        rows = 0
        while queue.members and len(members) < size:
            member = queue.oldest
            if member.deadline <= now:
                expired.append(member)
            elif members and most_rows is not None and self._rows([*members, member], rows + member.rows) > most_rows:
                break
            else:
                members.append(member)
                rows += member.rows
            self._remove(queue, member)
        if members:
            self._eager = False
            self.running += 1
        return members, expired

    def finished(self) -> None:
        """A batch from `start_batch` has ended."""
        self.running -= 1

    def _next(self) -> _ModelQueue[M] | None:
        """The queue that is due first."""
        if not self._queues or self.running >= self.limits.max_concurrent_batches:
            return None
        if len(self._queues) == 1:
            return next(iter(self._queues.values()))
        return min(self._queues.values(), key=self._due)

    def _due(self, queue: _ModelQueue[M]) -> float:
        oldest, limits = queue.oldest.arrived_at, self.limits
        full = len(queue.members) >= limits.max_batch_size or (
            limits.max_batch_rows is not None and self._rows(queue.members, queue.rows) >= limits.max_batch_rows
        )
        return oldest if self._eager or full else oldest + limits.batch_wait_timeout_s

    def _rows(self, members: Iterable[M], together: int) -> float:
        return together if self._rows_of_all is None else self._rows_of_all(list(members))

    def _remove(self, queue: _ModelQueue[M], member: M) -> None:
        queue.remove(member)
        if not queue.members:
            del self._queues[member.model]
