from __future__ import annotations

import pytest

from tests.bench.cases import Visit, schedule
from tests.bench.options import OptionsError, read


def visits(*words: str) -> list[Visit]:
    return schedule(read(words))


def test_the_sides_take_turns_the_other_way_round_in_the_next_round() -> None:
    plan = [(visit.round, visit.subject.key) for visit in visits("ONLY=echo", "ROUNDS=3")]
    assert plan == [(1, "peer"), (1, "ours"), (2, "ours"), (2, "peer"), (3, "peer"), (3, "ours")]


@pytest.mark.parametrize("app", ["echo", "stream", "dlrm"])
@pytest.mark.parametrize("mode", ["containers", "processes"])
def test_both_sides_get_the_same_loads(app: str, mode: str) -> None:
    loads = {
        key: [
            (step.load, step.level, step.seconds)
            for visit in visits(f"MODE={mode}")
            if visit.subject.key == key
            for step in visit.steps
            if step.app == app and step.load != "address"  # the peer runs in no container
        ]
        for key in ("ours", "peer")
    }
    assert loads["ours"] == loads["peer"]
    assert loads["ours"]
    assert (("remote", 64, 5.0) in loads["ours"]) is (app == "echo" and mode == "containers")


def test_eight_replicas_are_measured_once_and_bare_processes_have_no_variants_of_containers() -> None:
    eight = [(visit.round, visit.subject.key) for visit in visits("ONLY=eight,echo") if visit.subject.replicas == 8]
    assert eight == [(1, "ours:eight"), (1, "peer:eight"), (1, "peer:eight-default")]
    variants = {
        mode: {visit.subject.key for visit in visits("ONLY=ablation", f"MODE={mode}")}
        for mode in ("containers", "processes")
    }
    assert variants["containers"] - variants["processes"] == {
        *("ours:processes", "ours:all-lines", "ours:untraced", "ours:sampled", "ours:tcp", "ours:key", "ours:tls-key")
    }


def test_triton_is_measured_where_it_is_named_with_the_ranker() -> None:
    assert "ours:triton" not in {visit.subject.key for visit in visits()}
    found = [(visit.subject.key, visit.steps) for visit in visits("ONLY=dlrm,triton", "PEER=0", "ROUNDS=1")]
    assert [key for key, _ in found] == ["ours", "ours:triton"]
    assert set(found[1][1]) < set(found[0][1])
    with pytest.raises(OptionsError, match="triton needs MODE=containers"):
        visits("ONLY=triton", "MODE=processes")
