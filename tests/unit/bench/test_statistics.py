from __future__ import annotations

import pytest

from tests.bench.samples import Footprint
from tests.bench.statistics import Samples, Spread, latency, limit_on, rate, resident
from tests.unit.bench.worlds import sample


def test_ratios_are_taken_within_a_round_that_both_sides_have() -> None:
    # The machine was half as fast in round 2: each side's own rates vary, their ratio does not.
    rates = [("ours", 1, 1000.0), ("peer", 1, 100.0), ("ours", 2, 500.0), ("peer", 2, 50.0), ("ours", 3, 7.0)]
    samples = Samples([sample(subject, round=number, rate=each) for subject, number, each in rates])
    assert samples.ratio(rate, "ours", "peer", "echo", "closed", 64) == Spread(10.0, 10.0, 10.0, 2)
    assert samples.ratio(rate, "ours", "peer", "dlrm", "closed", 100) is None


def test_only_what_was_measured_is_counted() -> None:
    samples = Samples([sample(level=1, rate=5.0), sample(rate=7.0, latency_ms={}), sample(load="open", rate=9.0)])
    assert samples.by_round(rate, "ours", "echo", "closed", 64) == {1: 7.0}
    assert samples.spread(latency("p99"), "ours", "echo", "closed", 64) is None, "not zero"


def test_an_open_loop_at_another_rate_does_not_count() -> None:
    # In the first round the peer is measured before our peak is known.
    rates = [("peer", 1, 700.0), ("ours", 1, 350.0), ("peer", 2, 350.0)]
    samples = Samples(
        [sample(subject, load="open", level=0, round=number, offered_rate=each) for subject, number, each in rates]
    )
    assert [s.round for s in samples.of("peer", "echo", "open")] == [2]
    assert [s.round for s in samples.of("ours", "echo", "open")] == [1]


def test_errors_add_up_over_rounds_and_costs_and_memory_are_medians() -> None:
    samples = Samples(
        [
            sample(round=1, errors={"status": 2}, cpu_ms_per_1000={"ingress": 50.0, "haproxy": 10.0}),
            sample(round=2, errors={"status": 1, "timeout": 4}, cpu_ms_per_1000={"ingress": 70.0}),
            sample(round=3, cpu_ms_per_1000={"ingress": 60.0}),
        ]
    )
    assert samples.errors("ours", "echo", "closed", 64) == {"status": 3, "timeout": 4}
    # A role that a round lacks counts as nothing.
    assert samples.costs("ours", "echo", "closed", 64) == {"haproxy": 0.0, "ingress": 60.0}
    prints = [
        Footprint(number, "ours", "echo", when, {"child": {"rss_mb": size}})
        for number, when, size in ((1, "idle", 40.0), (2, "idle", 44.0), (2, "loaded", 90.0))
    ]
    assert resident(prints, "ours", "echo", "idle", "rss_mb") == {"child": 42.0}


@pytest.mark.parametrize(("cores", "expected"), [(0.5, 1000.0), (1.0, 2000.0), (1.5, 2750.0), (9.0, 3500.0)])
def test_a_limit_on_a_part_of_the_machine(cores: float, expected: float) -> None:
    assert limit_on(cores, one_core=2000.0, all_cores=3500.0, machine_cores=2) == expected
