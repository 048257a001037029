"""Who was sent the longest prefix, against a model that keeps every text."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pierhead.policies.prefix_tree import PrefixTree

PLENTY = 10**9

texts = st.text("ab", max_size=12)
names = st.sampled_from(["r0", "r1", "r2"])
sent = st.lists(st.tuples(texts, names), max_size=25)


def longest(inserted: list[tuple[str, str]], text: str, grain: int = 1) -> dict[str, int]:
    """What the tree should say: of each name, the longest common prefix, in whole grains."""
    found: dict[str, int] = {}
    for other, name in inserted:
        other = other[: len(other) - len(other) % grain]
        same = next((at for at, pair in enumerate(zip(other, text, strict=False)) if len(set(pair)) > 1), None)
        same = min(len(other), len(text)) if same is None else same
        found[name] = max(found.get(name, 0), same - same % grain)
    return {name: length for name, length in found.items() if length}


@given(sent, texts, st.integers(1, 4))
def test_the_longest_prefix_of_each_holder(inserted: list[tuple[str, str]], text: str, grain: int) -> None:
    tree = PrefixTree(PLENTY, grain=grain)
    for other, name in inserted:
        tree.insert(other, name)
    assert tree.match(text) == longest(inserted, text, grain)


@given(sent, names, texts)
def test_one_that_is_removed_leaves_the_others_alone(inserted: list[tuple[str, str]], gone: str, text: str) -> None:
    tree = PrefixTree(PLENTY)
    for other, name in inserted:
        tree.insert(other, name)
    tree.remove(gone)
    assert tree.match(text) == longest([pair for pair in inserted if pair[1] != gone], text)
    assert tree.chars(gone) == 0
    for name in {name for _, name in inserted}:
        tree.remove(name)
    assert not tree._root.children, "what nobody holds is not kept"


class Bounded(RuleBasedStateMachine):
    """One holder with room for MOST characters, against every prefix with the time of its last use."""

    MOST, TARGET = 20, 14

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(self.MOST, self.TARGET)
        self.used: dict[str, dict[str, int]] = {}
        self.now = 0

    @rule(text=texts, name=names)
    def insert(self, text: str, name: str) -> None:
        self.tree.insert(text, name)
        self.now += 1
        used = self.used.setdefault(name, {})
        used.update({text[:end]: self.now for end in range(1, len(text) + 1)})

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.tree.remove(name)
        self.used.pop(name, None)

    @invariant()
    def what_is_kept_was_used_last_and_is_whole(self) -> None:
        for name, used in self.used.items():
            kept = {prefix for prefix in used if self.tree.match(prefix).get(name) == len(prefix)}
            assert len(kept) == self.tree.chars(name) <= self.MOST
            lost = set(used) - kept
            assert not any(other.startswith(prefix) for prefix in lost for other in kept), "ends go before beginnings"
            if lost and kept:
                assert max(used[prefix] for prefix in lost) <= max(used[prefix] for prefix in kept)
            for prefix in lost:
                # Whatever is kept of older use is a beginning of something that is at least as new.
                older = [other for other in kept if used[other] < used[prefix]]
                assert not older, "the oldest goes first"
            for prefix in lost:
                del used[prefix]


TestBounded = Bounded.TestCase


def test_when_it_is_full_it_is_cut_down_to_the_target() -> None:
    tree = PrefixTree(100, 50)
    for number in range(10):
        tree.insert(f"{number}" * 10, "r0")
    assert tree.chars("r0") == 100
    tree.insert("x" * 10, "r0")
    assert tree.chars("r0") == 50
    assert [tree.match(f"{number}" * 10).get("r0", 0) for number in range(10)] == [0] * 6 + [10] * 4


def test_texts_that_are_short_are_bounded_by_their_number() -> None:
    """Each is a node of some 700 bytes: two million characters in texts of 16 would be 90 MB for each holder."""
    rng = Random(1)
    tree = PrefixTree(2_000_000, 1_960_000, 16, 1000)
    for number in range(20_000):
        tree.insert(f"{rng.getrandbits(64):016x}" * rng.randint(1, 3), f"r{number % 2}")
        assert tree.nodes(f"r{number % 2}") <= 1000
    assert all(980 <= tree.nodes(name) <= 1000 for name in ("r0", "r1"))
    last = f"{rng.getrandbits(64):016x}"
    tree.insert(last, "r0")
    assert tree.match(last) == {"r0": 16}, "what was used last is kept"


def test_one_text_through_more_nodes_than_there_may_be_loses_its_end() -> None:
    tree, text = PrefixTree(10_000, 10_000, 1, 10), "a" * 40
    for end in range(1, 40):
        tree.insert(text[:end] + "b", f"r{end % 5}")
    tree.insert(text, "r9")
    assert tree.nodes("r9") == 10
    assert tree.match(text)["r9"] == 10
