from __future__ import annotations

import pytest

from tests.bench.cases import Visit, schedule
from tests.bench.options import read


def visits(*words: str) -> list[Visit]:
    return schedule(read(words))


def test_the_sides_take_turns_the_other_way_round_in_the_next_round() -> None:
    plan = [(visit.round, visit.subject.key) for visit in visits("ONLY=echo", "ROUNDS=3") if visit.app == "echo"]
    assert plan == [(1, "peer"), (1, "ours"), (2, "ours"), (2, "peer"), (3, "peer"), (3, "ours")]


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
