from __future__ import annotations

import pytest

from tests.bench.cases import VARIANTS, Visit, expected_seconds, schedule
from tests.bench.options import read
from tests.bench.progress import remaining


def visits(*words: str) -> list[Visit]:
    return schedule(read(words))


def order(app: str, plan: list[Visit]) -> list[tuple[int, str]]:
    return [(visit.round, visit.subject.key) for visit in plan if visit.app == app]


def test_the_sides_take_turns_the_other_way_round_in_the_next_round() -> None:
    plan = visits("ONLY=echo", "ROUNDS=3")
    assert order("echo", plan) == [
        (1, "peer"),
        (1, "ours"),
        (2, "ours"),
        (2, "peer"),
        (3, "peer"),
        (3, "ours"),
    ]


@pytest.mark.parametrize("app", ["echo", "stream", "dlrm"])
def test_both_sides_get_the_same_loads(app: str) -> None:
    loads = {
        key: [
            (step.load, step.level, step.seconds)
            for visit in visits()
            if visit.app == app and visit.subject.key == key
            for step in visit.steps
            if step.load != "grpc"  # the peer has nothing that a plain gRPC client could call
        ]
        for key in ("ours", "peer")
    }
    assert loads["ours"] == loads["peer"]
    assert loads["ours"]


def test_the_levels_are_those_of_the_targets() -> None:
    plan = visits()
    levels = {
        app: {s.level for v in plan if v.app == app and v.subject.key == "ours" for s in v.steps if s.load == "closed"}
        for app in ("echo", "stream", "dlrm")
    }
    assert levels == {"echo": {1, 16, 64, 128}, "stream": {1, 8, 32, 64}, "dlrm": {10, 50, 100, 200}}


def test_an_open_loop_comes_after_a_closed_one_of_the_same_application() -> None:
    for plan in (visits("ONLY=open"), visits("ONLY=open,dlrm", "QUICK=1"), visits()):
        seen: set[str] = set()
        opened = 0
        for visit in plan:
            for step in visit.steps:
                if step.load == "closed":
                    seen.add(visit.app)
                if step.load == "open":
                    opened += 1
                    assert visit.app in seen
        assert opened


def test_without_a_peer_nothing_of_it_is_visited() -> None:
    assert "peer" not in {visit.subject.kind for visit in visits("PEER=0")}


def test_a_variant_that_the_runtime_does_not_know_is_left_out() -> None:
    plan = schedule(read(["ONLY=ablation"]), VARIANTS[1:])
    assert VARIANTS[0] not in {visit.subject for visit in plan}
    assert VARIANTS[1] in {visit.subject for visit in plan}


def test_a_whole_run_stays_within_its_time() -> None:
    assert sum(map(expected_seconds, visits())) < 25 * 60
    assert sum(map(expected_seconds, visits("QUICK=1"))) < 4 * 60


def test_remaining_time_follows_how_long_things_took() -> None:
    plan = visits("ONLY=echo")
    expected = sum(map(expected_seconds, plan))
    assert remaining(plan, 0, 0.0) == expected
    first = expected_seconds(plan[0])
    assert remaining(plan, 1, 2 * first) == pytest.approx(2 * (expected - first))
    assert remaining(plan, len(plan), expected) == 0
