"""When the mock engine makes which token: continuous batching as a fluid. Pure: time is an argument.

    add --> waiting --(a slot, and blocks)--> prefill, one after another --> ttft_s --> decoding --> done

All that decode do so at one rate, the replica's divided by their number, so one number says how far everybody is:
`_level`, the tokens that a sequence has made which was there from the beginning. Times of events are computed, not
added up from ticks: a late look finds what a punctual one would have, and nothing drifts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from services.llm.server.engines.mock.cache import BlockCache, Chain, Lease

NEARLY = 1e-6
"""Of a token: what rounding may take away."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast it is."""

    tokens_per_s: float
    """Of the replica, over all that decode."""
    request_tokens_per_s: float
    """The most that one of them gets."""
    ttft_s: float
    """From the end of the prefill to the first token."""
    prefill_tokens_per_s: float
    """Tokens of prompts that are read in a second, without those in the cache; inf = no time."""
    max_num_seqs: int
    block_size: int


class Stage(Enum):
    """Where a sequence is."""

    WAITING = 0
    PREFILL = 1
    STARTING = 2
    DECODING = 3
    DONE = 4


class Sequence:
    """One answer in the making. `owner` is whoever is to be told of its tokens."""

    __slots__ = ("begun", "cached", "chain", "given", "grown", "lease", "owner", "prompt", "slot", "stage", "total")

    def __init__(
        self,
        owner: Any,
        prompt: int,
        chain: Chain,
        total: int,
        *,
        read: bool = False,
        grown: Callable[[], Chain] = tuple,
    ) -> None:
        self.owner = owner
        self.grown = grown
        """Tells, when all is made, the hashes of the blocks that the answer has filled."""
        self.prompt = prompt
        """Tokens."""
        self.chain = chain
        self.total = total
        """Tokens to be made, at least 1."""
        self.given = 0
        """Tokens that were told of."""
        self.cached = prompt if read else 0
        """Tokens of the prompt that need not be read. `read`: all, because another replica has."""
        self.stage = Stage.WAITING
        self.lease: Lease | None = None
        self.begun = 0.0
        """The level at its first token."""
        self.slot = True


class _Event(NamedTuple):
    at: float
    kind: Stage
    """Which stage ends."""


class Schedule:
    """All sequences of one engine. Whoever holds it calls `advance` when `next_at` says so, or later."""

    def __init__(self, pace: Pace, cache: BlockCache, now: float) -> None:
        self._pace = pace
        self._cache = cache
        self._at = now
        self._level = 0.0
        self._decoding = 0
        self._slots = 0
        self._order = itertools.count()
        self._waiting: deque[Sequence] = deque()
        self._prefill: deque[Sequence] = deque()
        self._prefill_ends = math.inf
        self._starting: list[tuple[float, int, Sequence]] = []
        """By the time of the first token. In the heaps, those that were dropped stay until they come up."""
        self._due: list[tuple[float, int, Sequence]] = []
        """By the level of the next token."""
        self._ending: list[tuple[float, int, Sequence]] = []
        """By the level of the last token."""
        self._paused = False
        self.tokens = 0
        """Read and made since the start."""
        self.made = 0
        """Of those: made."""

    @property
    def running(self) -> int:
        """Sequences that have a slot."""
        return self._slots

    @property
    def waiting(self) -> int:
        """Sequences that wait for one."""
        return len(self._waiting)

    def add(self, sequence: Sequence, now: float, *, at_once: bool = False) -> None:
        """Take a sequence in. `at_once`: past the line, and without a slot."""
        self._move(now)
        if at_once:
            sequence.slot = False
            self._start(sequence)
            return
        self._waiting.append(sequence)
        self._admit()

    def drop(self, sequence: Sequence, now: float) -> None:
        """Forget a sequence, whatever its stage."""
        if sequence.stage is Stage.DONE:
            return
        self._move(now)
        if sequence.stage is Stage.WAITING:
            self._waiting.remove(sequence)
        elif sequence.stage is Stage.PREFILL:
            first = self._prefill[0] is sequence
            self._prefill.remove(sequence)
            if first:
                self._read_next()
        self._end(sequence)
        sequence.stage = Stage.DONE

    def advance(self, now: float) -> list[tuple[Sequence, int]]:
        """What has happened up to `now`: who got how many tokens. Those that have all of them are DONE."""
        if self._paused:
            return []
        while (event := self._next_event()).at <= now:
            self._move(event.at)
            self._do(event.kind)
        self._move(now)
        return self._deliver()

    def next_at(self) -> tuple[float, float]:
        """Times of the next change, and of the next token; inf = never."""
        if self._paused:
            return math.inf, math.inf
        while self._due and self._due[0][2].stage is Stage.DONE:
            heapq.heappop(self._due)
        return self._next_event().at, self._time_of(self._due[0][0]) if self._due else math.inf

    def pause(self, now: float) -> None:
        """Stand still until `resume`."""
        self._move(now)
        self._paused = True

    def resume(self, now: float) -> None:
        """Go on as if no time had passed since `pause`."""
        if not self._paused:
            return
        gone = now - self._at
        self._paused, self._at = False, now
        self._prefill_ends += gone
        self._starting = [(at + gone, number, sequence) for at, number, sequence in self._starting]

    # ---- inside

    def _rate(self) -> float:
        """Tokens that each of those that decode gets in a second."""
        if not self._decoding:
            return 0.0
        return min(self._pace.request_tokens_per_s, self._pace.tokens_per_s / self._decoding)

    def _time_of(self, level: float) -> float:
        rate = self._rate()
        return self._at + max(0.0, level - self._level) / rate if rate else math.inf

    def _move(self, now: float) -> None:
        if self._paused or now <= self._at:
            return
        self._level += self._rate() * (now - self._at)
        self._at = now

    def _next_event(self) -> _Event:
        """Those that free something come first."""
        for heap in (self._starting, self._ending):
            while heap and heap[0][2].stage is Stage.DONE:
                heapq.heappop(heap)
        event = _Event(math.inf, Stage.DONE)
        if self._ending:
            event = _Event(self._time_of(self._ending[0][0]), Stage.DECODING)
        if self._starting and self._starting[0][0] < event.at:
            event = _Event(self._starting[0][0], Stage.STARTING)
        if self._prefill_ends < event.at:
            event = _Event(self._prefill_ends, Stage.PREFILL)
        return event

    def _do(self, kind: Stage) -> None:
        """What ends the stage `kind` of the sequence whose turn it is."""
        if kind is Stage.DECODING:
            level, _, sequence = heapq.heappop(self._ending)
            self._level = max(self._level, level)
            self._end(sequence)
            # It is DONE once its last tokens are told of.
            sequence.begun = -math.inf
            heapq.heappush(self._due, (-math.inf, next(self._order), sequence))
        elif kind is Stage.STARTING:
            self._first(heapq.heappop(self._starting)[2])
        else:
            sequence = self._prefill.popleft()
            self.tokens += sequence.prompt
            self._start(sequence)
            self._read_next()

    def _start(self, sequence: Sequence) -> None:
        sequence.stage = Stage.STARTING
        heapq.heappush(self._starting, (self._at + self._pace.ttft_s, next(self._order), sequence))

    def _first(self, sequence: Sequence) -> None:
        if not self._decoding and not self._due:
            self._level = 0.0  # nobody stands on it: keep it small, and so exact
        sequence.stage = Stage.DECODING
        sequence.begun = self._level
        self._decoding += 1
        heapq.heappush(self._due, (self._level, next(self._order), sequence))
        heapq.heappush(self._ending, (self._level + sequence.total - 1, next(self._order), sequence))

    def _admit(self) -> None:
        size = self._pace.block_size
        while self._waiting and self._slots < self._pace.max_num_seqs:
            sequence = self._waiting[0]
            lease = self._cache.take(sequence.chain, math.ceil((sequence.prompt + sequence.total) / size))
            if lease is None:
                return
            self._waiting.popleft()
            self._slots += 1
            sequence.lease = lease
            # The last token is always computed: its result is the first one of the answer.
            sequence.cached = max(sequence.cached, min(lease.hits, (sequence.prompt - 1) // size) * size)
            sequence.stage = Stage.PREFILL
            self._prefill.append(sequence)
            if len(self._prefill) == 1:
                self._read_next()

    def _read_next(self) -> None:
        if not self._prefill:
            self._prefill_ends = math.inf
            return
        first = self._prefill[0]
        self._prefill_ends = self._at + (first.prompt - first.cached) / self._pace.prefill_tokens_per_s

    def _end(self, sequence: Sequence) -> None:
        """It needs its place no more: it has made all its tokens, or is dropped."""
        if sequence.stage is Stage.DECODING:
            self._decoding -= 1
        if sequence.slot and sequence.stage is not Stage.WAITING:
            self._slots -= 1
        if sequence.lease is not None:
            whole = self._level - sequence.begun > sequence.total - 1 - NEARLY and sequence.stage is Stage.DECODING
            self._cache.give(sequence.lease, sequence.grown() if whole else ())
            sequence.lease = None
        self._admit()

    def _deliver(self) -> list[tuple[Sequence, int]]:
        told: list[tuple[Sequence, int]] = []
        due, before = self._due, self.made
        while due and due[0][0] <= self._level + NEARLY:
            sequence = due[0][2]
            if sequence.stage is Stage.DONE:
                heapq.heappop(due)
                continue
            if sequence.begun == -math.inf:
                made, sequence.stage = sequence.total, Stage.DONE
                heapq.heappop(due)
            elif (made := 1 + math.floor(self._level - sequence.begun + NEARLY)) < sequence.total:
                heapq.heapreplace(due, (sequence.begun + made, next(self._order), sequence))
            else:  # but for rounding it has ended: the last one is told of with the end
                made = sequence.total - 1
                heapq.heappop(due)
            if made > sequence.given:
                told.append((sequence, made - sequence.given))
                self.made += made - sequence.given
                sequence.given = made
        self.tokens += self.made - before
        return told
