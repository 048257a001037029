"""The pool of regions against random histories."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from pierhead.memory.pool import Region, RegionPool, capacity

LIMIT = 64 * 4096
LINKS = ("one", "two")
"""A link leads to the destination of its name."""

_WORDS = ["take", "send", "release", "end", "lose", "expire"]
STEPS = st.lists(st.tuples(st.sampled_from(_WORDS), st.integers(0, 9)), max_size=60)


@given(STEPS)
def test_no_region_is_filled_again_while_somebody_may_read_it(steps: list[tuple[str, int]]) -> None:  # noqa: C901
    names = itertools.count(1)
    pool = RegionPool(LIMIT, lambda: next(names).to_bytes(16))
    held: list[tuple[Region, int]] = []
    out: list[tuple[Region, int, str]] = []
    readers: dict[bytes, set[str]] = {}
    for now, (step, number) in enumerate(steps):
        link = LINKS[number % 2]
        if step == "take":
            region = pool.take((number + 1) * 4096, link if number < 8 else None)
            if region is not None:
                assert region not in [each[0] for each in (*held, *out)]
                assert readers.get(region.name, set()) <= {link}, "no other destination has ever read it"
                held.append((region, region.generation))
        elif step == "send" and held:
            region, generation = held[number % len(held)]
            if pool.bind(region, link):
                region.introduced.add(link)
                region.passed = True
                pool.sent(region, link)
                out.append((region, generation, link))
                readers.setdefault(region.name, set()).add(link)
        elif step == "release" and out:
            region, generation, at = out.pop(number % len(out))
            pool.released(region.name, generation, at, 1, now)
        elif step == "end" and held:
            region, generation = held.pop(number % len(held))
            pool.let_go(region.name, generation, now)
        elif step == "lose":
            pool.lost(link, link if number < 5 else None, now)
            out = [each for each in out if each[2] != link]
        elif step == "expire":
            pool.expire(now - number)
        assert pool.bytes == sum(region.size for region in pool) <= LIMIT
        assert all(len(seen) == 1 for seen in readers.values())
    for region, generation in held:
        pool.let_go(region.name, generation, len(steps))
    for region, links in pool.overdue(len(steps) + 9):
        for each in links:
            pool.released(region.name, region.generation, each, 2**63, len(steps))
    pool.expire(len(steps) + 1)
    assert (len(pool), pool.bytes) == (0, 0)


def test_a_region_that_is_filled_again_waits_for_no_call_of_its_former_content() -> None:
    pool = RegionPool(LIMIT, lambda: bytes(16))
    for _ in range(2):
        region = pool.take(4096, "one")
        assert region is not None
        assert region.calls == 0
        region.calls += 1  # its end is noticed later
        pool.let_go(region.name, region.generation, 0.0)


@given(st.integers(1, 2**40))
def test_a_region_wastes_at_most_a_quarter(length: int) -> None:
    size = capacity(length)
    assert length <= size <= max(4096, length * 1.25 + 4096)
    assert size % 4096 == 0
