from __future__ import annotations

import pytest

from tests.bench.measure import Meter, cost
from tests.bench.processes import MachineTime
from tests.bench.samples import Footprint
from tests.bench.statistics import Samples, Spread, cpu, latency, outside, rate, resident, tail
from tests.bench.tests.worlds import sample


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
            sample(round=1, errors={"status": 2}, cpu_us={"ingress": 50.0, "haproxy": 10.0}),
            sample(round=2, errors={"status": 1, "timeout": 4}, cpu_us={"ingress": 70.0}),
            sample(round=3, cpu_us={"ingress": 60.0}),
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


def test_what_no_process_used_is_the_rest_of_the_machine() -> None:
    before = Meter(10.0, {"haproxy": 5.0, "gone": 1.0}, 1.0, MachineTime(100.0, 0.0), bench=2.0)
    after = Meter(12.0, {"haproxy": 6.0, "dockerd": 0.2}, 1.5, MachineTime(102.5, 0.5), bench=2.1)
    found = cost(before, after, requests=1000)
    assert found.us == pytest.approx({"haproxy": 1000.0, "dockerd": 200.0, "generator": 500.0, "rest": 700.0})
    assert (found.rest_cores, found.stolen_cores) == pytest.approx((0.35, 0.25))


def test_overhead_is_what_a_request_costs_outside_its_own_way() -> None:
    used = {"haproxy": 10.0, "ingress": 50.0, "child": 20.0, "dockerd": 15.0, "rest": 5.0, "generator": 99.0}
    one = sample(cpu_us=used, latency_ms={"p50": 10.0, "p99": 18.0})
    assert (cpu(one), tail(one)) == (100.0, 1.8)
    assert outside(one) == pytest.approx(0.2)
    assert (cpu(sample()), outside(sample()), tail(sample(latency_ms={}))) == (None, None, None)
