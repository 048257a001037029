from __future__ import annotations

import pytest

from tests.unit.dashboards.promql import metrics_in


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        ("up", {"up"}),
        ('up{job="haproxy"} == 0', {"up"}),
        ("sum(rate(a_total[5m]))", {"a_total"}),
        ('sum by (service) (rate(a_total{x=~"$y"}[$__rate_interval])) / sum (b) by (service)', {"a_total", "b"}),
        ("histogram_quantile(0.99, sum by (le, service) (rate(h_bucket[1m])))", {"h_bucket"}),
        ("a and b or vector(0) unless on (x) c offset 5m > bool 1", {"a", "b", "c"}),
        ("a * on (service) group_left (version) b", {"a", "b"}),
        ("# words of a comment\na > 1e3", {"a"}),
    ],
)
def test_names_the_metrics_of_an_expression(expr: str, names: set[str]) -> None:
    assert metrics_in(expr) == names
