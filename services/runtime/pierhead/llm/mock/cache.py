"""The mock engine's key-value cache: blocks, shared by requests that begin alike, as in vLLM's prefix caching. Pure.

A block that is full has a hash of its tokens and of the block before it, so equal hashes mean equal beginnings. Blocks
that no request uses stay until room is needed: an LRU cache.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

Chain = tuple[int, ...]
"""The hashes of a text's full blocks, first to last."""


def chain_of(tokens: Sequence[str], block_size: int, salt: object) -> Chain:
    """The chain of a text."""
    hashes: list[int] = []
    last = hash(salt)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        last = hash((last, *tokens[start : start + block_size]))
        hashes.append(last)
    return tuple(hashes)


class BlockCache:
    """`blocks` in all. A request takes as many as it may ever need, so none of its blocks is evicted before its end."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._used: Counter[int] = Counter()
        """Hash -> requests that use the block."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks in use by no request, least recently used first."""
        self._own = 0
        """Blocks without a hash: the ends of prompts, and those that answers will fill."""
        self.salt = 0
        """Part of each hash; another one makes everything new."""

    @property
    def use(self) -> float:
        """Share of the blocks that requests use, 0 to 1."""
        return (len(self._used) + self._own) / self.blocks

    def reserve(self, chain: Chain, total: int) -> int | None:
        """Reserve `total` blocks, of which the first are the chain's. Returns how many of these were cached; None when
        there is no room now.
        """
        hits = next((place for place, block in enumerate(chain) if not self._has(block)), len(chain))
        waking = sum(block in self._idle for block in chain[:hits])
        new = total - hits
        if new > self.blocks - len(self._used) - self._own - waking:
            return None
        self._use(chain[:hits])
        while self.blocks - len(self._used) - self._own - len(self._idle) < new and self._idle:
            self._idle.popitem(last=False)
        self._use(chain[hits:])  # behind a gap there may be blocks of a chain whose beginning was evicted
        self._own += total - len(chain)
        return hits

    def give(self, chain: Chain, total: int, grown: Chain = ()) -> None:
        """Free what `reserve` gave. `grown`: the hashes of the blocks that the answer has filled."""
        self._own -= total - len(chain)
        self._used.subtract(chain)
        for block in reversed(chain + grown):  # the end of a text is of use to fewest
            if self._used[block] == 0:
                del self._used[block]
                self._idle[block] = None
                self._idle.move_to_end(block)

    def reset(self) -> None:
        """Forget what was read; blocks in use stay."""
        self._idle.clear()
        self.salt += 1

    def _has(self, block: int) -> bool:
        return block in self._used or block in self._idle

    def _use(self, blocks: Chain) -> None:
        for block in blocks:
            self._idle.pop(block, None)
            self._used[block] += 1
