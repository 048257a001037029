from __future__ import annotations

import pytest

from tests.bench.samples import Footprint
from tests.bench.statistics import Samples, Spread, latency, limit_on, rate, resident
from tests.unit.bench.worlds import sample


def test_ratios_are_taken_within_a_round() -> None:
    # The machine was half as fast in round 2: each side's own rates vary, their ratio does not.
    samples = Samples(
        [
            sample("ours", round=1, rate=1000.0),
            sample("peer", round=1, rate=100.0),
            sample("ours", round=2, rate=500.0),
            sample("peer", round=2, rate=50.0),
        ]
    )
    assert samples.ratio(rate, "ours", "peer", "echo", "closed", 64) == Spread(10.0, 10.0, 10.0, 2)


def test_a_round_that_only_one_side_has_gives_no_ratio() -> None:
    samples = Samples([sample("ours", round=1), sample("ours", round=2), sample("peer", round=2, rate=500.0)])
    assert samples.ratio(rate, "ours", "peer", "echo", "closed", 64) == Spread(2.0, 2.0, 2.0, 1)
    assert samples.ratio(rate, "ours", "peer", "dlrm", "closed", 100) is None


def test_only_what_was_asked_for_is_counted() -> None:
    samples = Samples([sample(level=1, rate=5.0), sample(level=64, rate=7.0), sample(load="open", level=0, rate=9.0)])
    assert samples.by_round(rate, "ours", "echo", "closed", 64) == {1: 7.0}
    assert samples.levels("echo", "closed") == [1, 64]


def test_a_latency_that_was_not_measured_is_none_not_zero() -> None:
    samples = Samples([sample("model", latency_ms={})])
    assert samples.spread(latency("p99"), "model", "echo", "closed", 64) is None


def test_an_open_loop_at_another_rate_does_not_count() -> None:
    # In the first round the peer is measured before our peak is known.
    samples = Samples(
        [
            sample("peer", load="open", level=0, round=1, offered_rate=700.0),
            sample("ours", load="open", level=0, round=1, offered_rate=350.0),
            sample("peer", load="open", level=0, round=2, offered_rate=350.0),
        ]
    )
    assert [s.round for s in samples.of("peer", "echo", "open")] == [2]
    assert [s.round for s in samples.of("ours", "echo", "open")] == [1]


def test_errors_add_up_over_rounds() -> None:
    samples = Samples([sample(round=1, errors={"status": 2}), sample(round=2, errors={"status": 1, "timeout": 4})])
    assert samples.errors("ours", "echo", "closed", 64) == {"status": 3, "timeout": 4}


def test_costs_are_medians_and_a_role_that_a_round_lacks_counts_as_nothing() -> None:
    samples = Samples(
        [
            sample(round=1, cpu_ms_per_1000={"ingress": 50.0, "haproxy": 10.0}),
            sample(round=2, cpu_ms_per_1000={"ingress": 70.0}),
            sample(round=3, cpu_ms_per_1000={"ingress": 60.0}),
        ]
    )
    assert samples.costs("ours", "echo", "closed", 64) == {"haproxy": 0.0, "ingress": 60.0}


def test_resident_memory_is_by_role() -> None:
    prints = [
        Footprint(1, "ours", "echo", "idle", {"child": {"rss_mb": 40.0}}),
        Footprint(2, "ours", "echo", "idle", {"child": {"rss_mb": 44.0}}),
        Footprint(2, "ours", "echo", "loaded", {"child": {"rss_mb": 90.0}}),
    ]
    assert resident(prints, "ours", "echo", "idle", "rss_mb") == {"child": 42.0}


@pytest.mark.parametrize(
    ("cores", "expected"), [(0.0, 0.0), (0.5, 1000.0), (1.0, 2000.0), (1.5, 2750.0), (2.0, 3500.0), (9.0, 3500.0)]
)
def test_a_limit_on_a_part_of_the_machine(cores: float, expected: float) -> None:
    assert limit_on(cores, one_core=2000.0, all_cores=3500.0, machine_cores=2) == expected
