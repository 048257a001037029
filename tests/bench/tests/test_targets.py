from __future__ import annotations

import pytest

from tests.bench.results import Results
from tests.bench.samples import Footprint
from tests.bench.targets import Line, lines
from tests.bench.tests.worlds import results, sample


def line(found: Results, what: str, wanted: str) -> Line:
    (one,) = [each for each in lines(found) if each.what == what and wanted in each.wanted]
    return one


@pytest.mark.parametrize(("rate", "p99", "dockerd", "met"), [(1200.0, 10.0, 10.0, True), (1199.0, 10.1, 11.0, False)])
def test_a_figure_on_its_bound_is_met(rate: float, p99: float, dockerd: float, met: bool) -> None:
    ours = sample(rate=rate, latency_ms={"p50": 1.0, "p99": p99}, cpu_us={"child": 90.0, "dockerd": dockerd})
    found = results(ours, sample("peer", rate=100.0, latency_ms={"p99": 120.0}))
    assert line(found, "echo, 64 connections: rate", "Ray Serve").met is met
    assert line(found, "echo, 64 connections: p99", "1/12 of Ray Serve's").met is met
    assert line(found, "echo, 64 connections: CPU outside HAProxy, ingress and child", "10%").met is met


def test_the_larger_of_the_idle_replicas_decides() -> None:
    roles = {name: {"largest_rss_mb": size} for name, size in (("ingress", 61.0), ("child", 40.0), ("haproxy", 99.0))}
    found = results(footprints=(Footprint(1, "ours", "echo", "idle", roles),))
    one = line(found, "an idle echo replica's resident memory", "60 MB")
    assert (one.met, one.found) == (False, "child 40 MB, ingress 61 MB")
