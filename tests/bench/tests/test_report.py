from __future__ import annotations

import pytest

from tests.bench.how import noise_of
from tests.bench.report import markdown
from tests.bench.samples import Footprint
from tests.bench.statistics import Samples
from tests.bench.tests.worlds import histogram, results, sample


def row(text: str, beginning: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {beginning}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_side_by_side_row_has_the_errors_of_each_side() -> None:
    peer = sample("peer", rate=100.0, latency_ms={"p50": 9.0, "p99": 24.0}, errors={"status": 3, "timeout": 1})
    text = markdown(results(sample("ours", rate=1500.0), peer))
    figures = ["1,500", "100", "15.0 x", "1.00", "9.00", "2.00", "24.0", "", "", "1/12.0"]
    asked = ["echo", "64", "127.0.0.1, the published port"]
    assert row(text, "echo | 64") == [*asked, *figures, "none; Ray's: 3 status, 1 timeout"]
    assert "| echo, 64 connections: rate | >= 12 x Ray Serve's; aim 15 | 15.0 x | **met** |" in text


def test_open_loops_are_one_histogram() -> None:
    # Percentiles of two rounds cannot be averaged: 1 ms for the one half and 100 ms for the other give p50 1, p90 100.
    rounds = [
        sample(load="open", level=0, round=number, offered_rate=10.0, histogram=histogram(*[each] * 50))
        for number, each in enumerate((1.0, 100.0), 1)
    ]
    figures = row(markdown(results(*rounds)), "echo | Pierhead")[4:7]
    assert [float(cell) for cell in figures] == pytest.approx([1.0, 100.0, 100.0], rel=0.01)


def test_the_cpu_time_of_each_row_is_listed_by_process_group() -> None:
    costs = {"ingress": 60.0, "child": 20.0, "haproxy": 10.0, "dockerd": 8.0, "rest": 2.0, "generator": 5.0}
    prints = (Footprint(1, "ours", "echo", "idle", {"child": {"pss_mb": 40.0, "largest_rss_mb": 50.0}}),)
    bare = sample("bare", rate=1600.0, cpu_us={"child": 50.0})
    found = results(sample(cpu_us=costs), sample(load="remote", cpu_us={"child": 10.0}), bare, footprints=prints)
    text = markdown(found)
    assert row(text, "Pierhead | echo, 64 |")[2:] == ["100", "10%", "10", "60", "20", "8.0", "2.0", "5.0"]
    assert row(text, "Pierhead | echo, 64, remote")[2:6] == ["10.0", "0%", "", ""]
    assert row(text, "the same chain with nothing of ours | echo, 64")[2:5] == ["50.0", "0%", ""]
    assert row(text, "echo, 64 connections: the same chain")[-1] == "0.50 x", "of Pierhead's CPU time"
    assert row(text, "Pierhead | echo | 40") == ["Pierhead", "echo", "40", "0", "", "50"]


def test_the_report_says_how_noisy_the_machine_was() -> None:
    quiet, loud = sample(rest_cores=0.01), sample(rest_cores=0.9, stolen_cores=0.2)
    assert noise_of(Samples([quiet, loud])) == (
        "The rest of the machine used 0.46 cores (most in one measurement: 0.90); the hypervisor took 0.10 "
        "(most: 0.20). In 1 of 2 measurements it was more than 0.05."
    )
