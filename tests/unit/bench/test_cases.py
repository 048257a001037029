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
