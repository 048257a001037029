"""A radix tree of the texts that replicas were sent: finds how much of a text each replica has read. Pure.

A node is a piece of text; the path to it is a prefix. It has the holders (replicas) that were sent that prefix, each
with the time of its last use there, by a clock that counts insertions. Two invariants hold: a holder of a node holds
all nodes above it, and has used them at least as recently.

Each holder has a limit of characters and of nodes. Beyond it, the least recently used text is evicted, its end before
its beginning, as in an engine's prefix cache.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

_Entry = tuple[int, int, int, "_TreeNode"]
"""(last use when the entry was written, minus the node's end, a number that makes it unique, the node). A holder's
least entry is evicted first; of equally old nodes, the longest prefix."""


@dataclass(slots=True, eq=False)
class _TreeNode:
    label: str
    end: int
    """Characters of the prefix that ends with this node; never changes."""
    parent: _TreeNode | None
    children: dict[str, _TreeNode] = field(default_factory=dict)
    """By the first `grain` characters of their labels."""
    used: dict[str, int] = field(default_factory=dict)
    """Each holder's last use."""


@dataclass(slots=True)
class _Holder:
    """A replica. It has exactly one entry for each node that it holds; entries may be older than the node's use."""

    chars: int = 0
    entries: list[_Entry] = field(default_factory=list)


class PrefixTree:
    """Texts by their prefixes, and the replicas that they were sent to.

    - max_chars: characters that a holder may have; shared text counts for each holder.
    - target_chars: the size that eviction leaves. A little less than `max_chars`, so that not every insertion evicts,
      and not so little that one eviction takes long.
    - grain: texts branch at multiples of this many characters; the rest beyond the last multiple is left out. It bounds
      the depth of the tree, and so the cost of the worst text.
    - max_nodes: nodes that a holder may have, cut down in proportion; None = any number. A node takes some 700 bytes
      however short its text is, so this bounds the memory that many short texts take.
    """

    def __init__(
        self, max_chars: int, target_chars: int | None = None, grain: int = 1, max_nodes: int | None = None
    ) -> None:
        target_chars = max_chars if target_chars is None else target_chars
        self._max = max_chars
        self._target = target_chars
        self._max_nodes = sys.maxsize if max_nodes is None else max_nodes
        self._target_nodes = max(1, self._max_nodes * target_chars // max_chars)
        self._grain = grain
        self._root = _TreeNode("", 0, None)
        self._holders: dict[str, _Holder] = {}
        self._clock = 0
        self._number = 0

    def match(self, text: str) -> Mapping[str, int]:
        """Each holder's longest prefix of `text`, in characters; holders of none are left out."""
        path, length = self._walk(text)
        found: dict[str, int] = {}
        # Upwards: a holder of a node holds all above it, so a node with no more holders than were found adds none.
        for node in reversed(path):
            if len(node.used) > len(found):
                end = min(length, node.end)
                for name in node.used:
                    if name not in found:
                        found[name] = end
        return found

    def insert(self, text: str, name: str) -> None:
        """`name` was sent `text` now."""
        text = text[: len(text) - len(text) % self._grain]
        if not text:
            return
        self._clock = now = self._clock + 1
        holder = self._holders.get(name)
        if holder is None:
            holder = self._holders[name] = _Holder()
        path, length = self._walk(text)
        if path and path[-1].end > length:
            path[-1] = self._split(path[-1], length)
        if length < len(text):
            above = path[-1] if path else self._root
            leaf = _TreeNode(text[length:], len(text), above)
            above.children[leaf.label[: self._grain]] = leaf
            path.append(leaf)
        for node in path:
            if name not in node.used:
                holder.chars += len(node.label)
                self._enter(holder, now, node)
            node.used[name] = now
        if holder.chars > self._max or len(holder.entries) > self._max_nodes:
            self._evict(name, holder)

    def remove(self, name: str) -> None:
        """Forget a holder."""
        holder = self._holders.pop(name, None)
        if holder is not None:
            for _, _, _, node in holder.entries:
                self._drop(name, node)

    def chars(self, name: str) -> int:
        """Characters that a holder has."""
        holder = self._holders.get(name)
        return holder.chars if holder is not None else 0

    def nodes(self, name: str) -> int:
        """Nodes that a holder has."""
        holder = self._holders.get(name)
        return len(holder.entries) if holder is not None else 0

    def _walk(self, text: str) -> tuple[list[_TreeNode], int]:
        """The nodes along `text`, and how many of its characters they match; the last node may match only in part."""
        grain = self._grain
        node, position = self._root, 0
        path: list[_TreeNode] = []
        while True:
            child = node.children.get(text[position : position + grain])
            if child is None:
                return path, position
            path.append(child)
            if not text.startswith(child.label, position):
                same = _common(child.label, text, position)
                return path, position + same - same % grain
            node, position = child, child.end

    def _split(self, node: _TreeNode, end: int) -> _TreeNode:
        """Cut a node in two; returns the upper one, which ends at `end` and has the same holders."""
        grain, parent = self._grain, node.parent
        assert parent is not None  # noqa: S101 - the root is never on a path
        cut = len(node.label) - (node.end - end)
        upper = _TreeNode(node.label[:cut], end, parent)
        parent.children[upper.label[:grain]] = upper
        node.label, node.parent = node.label[cut:], upper
        upper.children[node.label[:grain]] = node
        upper.used = dict(node.used)
        for name, used in upper.used.items():
            self._enter(self._holders[name], used, upper)
        return upper

    def _enter(self, holder: _Holder, used: int, node: _TreeNode) -> None:
        self._number += 1
        heappush(holder.entries, (used, -node.end, self._number, node))

    def _evict(self, name: str, holder: _Holder) -> None:
        """Evict a holder's least recently used nodes. An entry whose node was used since is put back with that time."""
        entries = holder.entries
        most_nodes = self._target_nodes if len(entries) > self._max_nodes else self._max_nodes
        most_chars = self._target if holder.chars > self._max else self._max
        while holder.chars > most_chars or len(entries) > most_nodes:
            used, end, number, node = heappop(entries)
            last = node.used[name]
            if last != used:
                heappush(entries, (last, end, number, node))
                continue
            holder.chars -= len(node.label)
            self._drop(name, node)

    def _drop(self, name: str, node: _TreeNode) -> None:
        """Take a holder off a node, and the node, with all below, off the tree when no other holds it."""
        del node.used[name]
        if not node.used and node.parent is not None:
            del node.parent.children[node.label[: self._grain]]
            node.parent = None


def _common(label: str, text: str, start: int) -> int:
    """How many characters of `label` match the text from `start` on. Bisects: slices compare at the speed of C."""
    low, high = 0, min(len(label), len(text) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(label[low:middle], start + low):
            low = middle
        else:
            high = middle - 1
    return low
