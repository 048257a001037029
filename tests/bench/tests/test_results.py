from __future__ import annotations

from tests.bench.tests.worlds import results, sample


def test_the_open_loops_rate_is_seventy_percent_of_the_smaller_peak_of_the_first_round() -> None:
    first = [sample("peer", level=level, rate=rate) for level, rate in ((1, 300.0), (64, 1000.0), (128, 900.0))]
    others = [sample("ours", rate=9000.0), sample("peer", rate=500.0, round=2), sample("bare", rate=10.0)]
    found = results(*first, *others)
    assert (found.open_rate("echo"), found.open_rate("dlrm")) == (700.0, 0.0)
