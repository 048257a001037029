"""How edges share a service's limit: never more than it in all, and no edge starves another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.swarm.edges.shares import Use, fair, next_shares

EDGES = st.integers(1, 6).map(lambda count: [f"n{number}" for number in range(count)])
NEEDS = EDGES.flatmap(lambda edges: st.fixed_dictionaries({edge: st.integers(0, 60) for edge in edges}))


def test_examples() -> None:
    assert fair(10, {"a": 0, "b": 0, "c": 0}) == {"a": 4, "b": 3, "c": 3}
    assert fair(8, {"a": 20, "b": 1, "c": 1}) == {"a": 6, "b": 1, "c": 1}, "one address in front of the edges"
    assert fair(12, {"a": 100, "b": 4, "c": 3}) == {"a": 5, "b": 4, "c": 3}, "a slow edge piles requests up"
    assert fair(2, {"a": 9, "b": 9, "c": 9}) == {"a": 1, "b": 1, "c": 1}


@given(st.integers(1, 100), NEEDS)
def test_a_fair_share(limit: int, needs: dict[str, int]) -> None:
    shares, total = fair(limit, needs), max(limit, len(needs))
    assert shares.keys() == needs.keys()
    assert sum(shares.values()) == total
    for edge, share in shares.items():
        assert share >= max(1, min(needs[edge], total // len(needs))), "what an equal share gives is safe"
        if share > max(1, needs[edge]):
            assert all(shares[other] >= needs[other] for other in needs), (
                "no edge has more than it needs while another lacks places"
            )


@given(st.integers(1, 40), EDGES, st.data())
def test_shares_move_safely_and_arrive(limit: int, edges: list[str], data: st.DataObject) -> None:
    """Demand changes, edges are away and come back; requests that have begun end only slowly."""
    most = max(limit, len(edges))
    shares = fair(limit, dict.fromkeys(edges, 0))
    busy = dict.fromkeys(edges, 0)
    for _ in range(8):
        waiting = {edge: data.draw(st.integers(0, 50)) for edge in edges}
        away = data.draw(st.sampled_from([None, *edges]))
        for edge in edges:
            floor = max(0, busy[edge] - data.draw(st.integers(0, 5)))
            busy[edge] = max(floor, min(shares[edge], waiting[edge]))
        shares |= next_shares(limit, uses(shares, busy, waiting, away))
        assert sum(shares.values()) <= most
        assert sum(max(shares[edge], busy[edge]) for edge in edges) <= most
        assert min(shares.values()) >= 1
    waiting = {edge: data.draw(st.integers(1, 50)) for edge in edges}
    for _ in range(3):
        shares |= next_shares(limit, uses(shares, dict.fromkeys(edges, 0), waiting, None))
    assert shares == fair(limit, {edge: waiting[edge] + 1 for edge in edges})
    assert shares == next_shares(limit, uses(shares, dict.fromkeys(edges, 0), dict.fromkeys(edges, 0), None))


def uses(shares: dict[str, int], busy: dict[str, int], waiting: dict[str, int], away: str | None) -> dict[str, Use]:
    return {
        edge: Use(shares[edge], busy[edge], busy[edge] + waiting[edge], 1, waiting[edge] > 0, is_away=edge == away)
        for edge in shares
    }


def test_an_edge_that_comes_gets_one_place_at_once_and_the_rest_when_it_is_free() -> None:
    before = {"a": Use(5, busiest=5, wanted=5, servers=1), "b": Use(5, busiest=5, wanted=5, servers=1), "c": Use(0)}
    first = next_shares(10, before)
    assert first["c"] == 1
    assert first["a"] + first["b"] < 10
