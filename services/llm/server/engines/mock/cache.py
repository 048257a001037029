"""The mock engine's key-value cache: blocks, shared by requests that begin alike, as in vLLM's prefix caching. Pure.

A block that is full has a hash of its tokens and of the block before it, so equal hashes mean equal beginnings. Blocks
that no request uses stay until room is needed: an LRU cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Chain = tuple[int, ...]
"""The hashes of a text's full blocks, first to last."""


def chain_of(tokens: Sequence[bytes], block_size: int, salt: object, before: Chain = ()) -> Chain:
    """The chain of `tokens`; with `before`, the chain of a text that begins with that one, without its hashes."""
    hashes: list[int] = []
    last = before[-1] if before else hash(salt)
    for start in range(len(before) * block_size, len(tokens) - block_size + 1, block_size):
        last = hash((last, b"".join(tokens[start : start + block_size])))
        hashes.append(last)
    return tuple(hashes)


@dataclass(slots=True)
class Lease:
    """Blocks of one request."""

    chain: Chain
    own: int
    """Blocks without a hash: the prompt's last one, and those that the answer will fill."""
    hits: int
    """How many blocks of the chain were cached."""


class BlockCache:
    """`blocks` in all. A request takes as many as it may ever need, so none of its blocks is evicted before its end."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._used: dict[int, int] = {}
        """Hash -> requests that use the block."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks in use by no request, least recently used first."""
        self._own = 0
        self.salt = 0
        """Part of each hash; another one makes everything new."""

    @property
    def use(self) -> float:
        """Share of the blocks that requests use, 0 to 1."""
        return (len(self._used) + self._own) / self.blocks

    def take(self, chain: Chain, total: int) -> Lease | None:
        """`total` blocks, of which the first are the chain's; None when there is no room now."""
        there = 0
        waking = 0
        for block in chain:
            if block in self._idle:
                waking += 1
            elif block not in self._used:
                break
            there += 1
        new = total - there
        room = self.blocks - len(self._used) - self._own - waking
        if new > room:
            return None
        for block in chain[:there]:
            self._idle.pop(block, None)
            self._used[block] = self._used.get(block, 0) + 1
        self._make_room(new)
        for block in chain[there:]:
            # Behind a gap there may be blocks of a chain whose beginning was evicted.
            self._idle.pop(block, None)
            self._used[block] = self._used.get(block, 0) + 1
        own = total - len(chain)
        self._own += own
        return Lease(chain, own, there)

    def give(self, lease: Lease, grown: Chain = ()) -> None:
        """Free a request's blocks. `grown`: hashes of its own blocks that its answer has filled."""
        self._own -= lease.own
        for block in reversed(grown[: lease.own]):
            if block not in self._used:
                self._idle[block] = None
                self._idle.move_to_end(block)
        for block in reversed(lease.chain):  # the end of a text is of use to fewest
            users = self._used[block] - 1
            if users:
                self._used[block] = users
            else:
                del self._used[block]
                self._idle[block] = None
                self._idle.move_to_end(block)

    def reset(self) -> None:
        """Forget what was read; blocks in use stay."""
        self._idle.clear()
        self.salt += 1

    def _make_room(self, new: int) -> None:
        while self.blocks - len(self._used) - self._own - len(self._idle) < new and self._idle:
            self._idle.popitem(last=False)
