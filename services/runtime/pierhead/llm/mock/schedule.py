"""Schedules the mock engine's tokens: continuous batching in steps, as in real engines. Pure: time is an argument.

    add --> waiting --(a slot, and blocks)--> prefill, one prompt after another --> ttft_s --> running --> done

All running sequences share `tokens_per_s`; what is due in a step comes at its end.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from pierhead.llm.mock.arguments import MockArguments
from pierhead.llm.mock.cache import BlockCache, Chain

NEARLY = 1e-6
"""Tolerance for rounding, as a share of a token or of a step."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the making."""

    owner: Any
    """What the caller knows the sequence by."""
    prompt: int
    """Tokens to be read."""
    chain: Chain
    """Of the prompt."""
    total: int
    """Tokens to be made, at least 1."""
    grown: Chain = ()
    """The hashes of the blocks that the answer fills."""
    cached: int = 0
    """Tokens of the prompt that were in the cache."""
    given: int = 0
    """Tokens that `advance` has returned."""
    progress: float = 0.0
    """Tokens made, with the part of the next one."""
    unread: float = 0.0
    wait_s: float = 0.0
    """Until the first token, once the prompt is read."""
    blocks: int = 0
    """Blocks that it holds; 0 = it has no slot."""

    @property
    def done(self) -> bool:
        """Whether all of its tokens were returned."""
        return self.given == self.total


class Schedule:
    """All sequences of one engine. Its owner calls `advance` when `next_at` says so, or later."""

    def __init__(self, pace: MockArguments, cache: BlockCache) -> None:
        self._pace = pace
        self._cache = cache
        self._at = 0.0
        """End of the last step."""
        self._waiting: deque[Sequence] = deque()
        self._prefill: deque[Sequence] = deque()
        self._running: dict[Sequence, None] = {}
        self.running = 0
        """Sequences that have a slot."""
        self.read = 0
        """Tokens of prompts, since the start."""
        self.made = 0
        """Tokens of answers, since the start."""

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot or for blocks."""
        return len(self._waiting)

    def add(self, sequence: Sequence, now: float, *, at_once: bool = False) -> None:
        """Add a sequence. `at_once`: ahead of all waiting ones, without a slot and blocks."""
        if self.next_at() == math.inf:
            self._at = now
        if at_once:
            self._start(sequence)
        else:
            self._waiting.append(sequence)
            self._admit()

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence, whatever its state."""
        for queue in (self._waiting, self._prefill):
            if sequence in queue:
                queue.remove(sequence)
        self._release(sequence)

    def next_at(self) -> float:
        """End of the next step; inf where there is nothing to do."""
        return self._at + self._pace.step_s if self._prefill or self._running else math.inf

    def resume(self, now: float) -> None:
        """Continue at `now` as if no time had passed since the last step."""
        self._at = now

    def advance(self, now: float) -> dict[Sequence, int]:
        """Do the steps up to `now`. Returns how many tokens each sequence got."""
        new_tokens: dict[Sequence, int] = {}
        while self.next_at() <= now + NEARLY * self._pace.step_s:
            self._at += self._pace.step_s
            self._read()
            self._make(new_tokens)
            self._admit()
        return new_tokens

    def _admit(self) -> None:
        size = self._pace.block_size
        while self._waiting and self.running < self._pace.max_num_seqs:
            sequence = self._waiting[0]
            blocks = math.ceil((sequence.prompt + sequence.total) / size)
            hits = self._cache.reserve(sequence.chain, blocks)
            if hits is None:
                return
            self._waiting.popleft()
            self.running += 1
            sequence.blocks = blocks
            # The last token is always computed: its result is the first one of the answer.
            sequence.cached = min(hits, (sequence.prompt - 1) // size) * size
            sequence.unread = sequence.prompt - sequence.cached
            self._prefill.append(sequence)

    def _read(self) -> None:
        budget = self._pace.prefill_tokens_per_s * self._pace.step_s
        while self._prefill:
            sequence = self._prefill[0]
            read = min(budget, sequence.unread)
            budget -= read
            sequence.unread -= read
            if sequence.unread > NEARLY:
                return
            self._prefill.popleft()
            self.read += sequence.prompt
            self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        sequence.wait_s = self._pace.ttft_s
        self._running[sequence] = None

    def _make(self, new_tokens: dict[Sequence, int]) -> None:
        """One step of all running sequences. The first token of each takes ttft_s and no share."""
        pace = self._pace
        begun = sum(1 for each in self._running if each.progress)
        share = min(pace.request_tokens_per_s, pace.tokens_per_s / max(begun, 1)) * pace.step_s
        for sequence in list(self._running):
            if sequence.progress:
                sequence.progress = min(sequence.progress + share, sequence.total)
            elif sequence.wait_s > NEARLY * pace.step_s:
                sequence.wait_s -= pace.step_s
                continue
            else:
                sequence.progress = 1.0
            new = math.floor(sequence.progress + NEARLY) - sequence.given
            if new:
                sequence.given += new
                new_tokens[sequence] = new_tokens.get(sequence, 0) + new
                self.made += new
            if sequence.done:
                self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """The sequence no longer needs its slot and its blocks."""
        self._running.pop(sequence, None)
        if sequence.blocks:
            self._cache.give(sequence.chain, sequence.blocks, sequence.grown if sequence.done else ())
            sequence.blocks = 0
            self.running -= 1
        self._admit()
