from __future__ import annotations

import pytest

from tests.bench.how import noise_of
from tests.bench.load.generator import new_histogram
from tests.bench.report import markdown
from tests.bench.samples import Footprint
from tests.bench.statistics import Samples
from tests.unit.bench.worlds import results, sample


def encoded(*milliseconds: float) -> str:
    histogram = new_histogram()
    for value in milliseconds:
        histogram.record_value(round(value * 1000))
    return str(histogram.encode().decode())


def rows(text: str, beginning: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(f"| {beginning}")
    ]


def test_a_side_by_side_row() -> None:
    text = markdown(
        results(sample("ours", rate=1500.0), sample("peer", rate=100.0, latency_ms={"p50": 9.0, "p99": 24.0}))
    )
    assert rows(text, "echo | 64") == [
        ["echo", "64", "1,500", "100", "15.0 x", "1.00", "9.00", "2.00", "24.0", "1/12.0", "none"]
    ]
    assert "| echo, 64 connections: rate | >= 15 x Ray Serve's | 15.0 x | **met** |" in text


def test_errors_are_shown_on_the_side_that_had_them() -> None:
    text = markdown(results(sample("ours"), sample("peer", errors={"status": 3, "timeout": 1})))
    assert rows(text, "echo | 64")[0][-1] == "none; Ray's: 3 status, 1 timeout"


def test_open_loops_are_one_histogram() -> None:
    # Percentiles of two rounds cannot be averaged: 1 ms for the one half and 100 ms for the other give p50 1, p90 100.
    slow = sample("ours", load="open", level=0, round=1, offered_rate=10.0, histogram=encoded(*[1.0] * 50))
    fast = sample("ours", load="open", level=0, round=2, offered_rate=10.0, histogram=encoded(*[100.0] * 50))
    row = rows(markdown(results(slow, fast)), "echo | Pierhead")[0]
    assert [float(cell) for cell in row[4:7]] == pytest.approx([1.0, 100.0, 100.0], rel=0.01)


def test_costs_leave_the_generator_out_of_the_sum() -> None:
    costs = {"ingress": 60.0, "child": 30.0, "haproxy": 10.0, "generator": 5.0}
    prints = (Footprint(1, "ours", "echo", "idle", {"child": {"pss_mb": 40.0, "largest_rss_mb": 50.0}}),)
    text = markdown(results(sample(cpu_ms_per_1000=costs), footprints=prints))
    assert rows(text, "echo | Pierhead")[0] == [
        "echo",
        "Pierhead",
        "0.10",
        "0.06",
        "0.03",
        "0.01",
        "",
        "0.01",
        "40",
        "0",
    ]
    assert "Resident set of one idle echo replica: Pierhead: child 50 MB." in text


def test_the_report_says_how_noisy_the_machine_was() -> None:
    quiet, loud = sample(cores={"elsewhere": 0.01}), sample(cores={"elsewhere": 0.9}, stolen_cores=0.2)
    assert noise_of(Samples([quiet])) == (
        "Everything else on the machine used 0.01 cores (most in one measurement: 0.01); the hypervisor took 0.00 "
        "(most: 0.00)."
    )
    assert noise_of(Samples([quiet, loud])).endswith("In 1 of 2 measurements it was more than 0.05.")
