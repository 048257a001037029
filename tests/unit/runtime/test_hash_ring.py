from __future__ import annotations

import subprocess
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from pierhead.policies.hash_ring import BITS, HashRing, position

names = st.sets(st.text("abcdef0123456789-", min_size=1, max_size=8), min_size=1, max_size=8)
keys = st.lists(st.text(max_size=12), min_size=1, max_size=30)


def ring_of(names: set[str]) -> HashRing:
    ring = HashRing(points=20)
    ring.add(names)
    return ring


def owner(ring: HashRing, key: str) -> str:
    return next(ring.walk(position(key)))


@given(names, keys)
def test_who_goes_leaves_only_its_own_keys(names: set[str], keys: list[str]) -> None:
    ring = ring_of(names)
    gone = min(names)
    before = {key: owner(ring, key) for key in keys}
    ring.remove(gone)
    if len(names) > 1:
        for key in keys:
            assert (owner(ring, key) == before[key]) is (before[key] != gone)


@given(names, keys)
def test_the_ring_is_the_same_however_it_came_about(names: set[str], keys: list[str]) -> None:
    step_by_step = HashRing(points=20)
    for name in sorted(names, reverse=True):
        step_by_step.add([name])
        step_by_step.add(["passer-by"])
        step_by_step.remove("passer-by")
    assert step_by_step.names == names
    at_once = ring_of(names)
    assert [owner(step_by_step, key) for key in keys] == [owner(at_once, key) for key in keys]


@given(names, st.integers(0, 2**BITS - 1))
def test_a_walk_passes_every_point_once(names: set[str], start: int) -> None:
    ring = ring_of(names)
    assert Counter(ring.walk(start)) == dict.fromkeys(names, 20)


def test_shares_are_about_equal() -> None:
    ring = HashRing()
    ring.add(f"shop-ranker-1-{number}" for number in range(8))
    shares = Counter(owner(ring, f"session-{number}") for number in range(8000))
    assert all(650 < share < 1400 for share in shares.values()), shares


def test_another_process_puts_a_key_at_the_same_place() -> None:
    source = "from pierhead.policies.hash_ring import position; print(position('session-7'))"
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert int(run.stdout) == position("session-7")
