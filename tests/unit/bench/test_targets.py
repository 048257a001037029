from __future__ import annotations

import pytest

from tests.bench.results import Results
from tests.bench.samples import Footprint
from tests.bench.targets import Line, lines
from tests.unit.bench.worlds import results, sample


def line(found: Results, what: str, wanted: str) -> Line:
    (one,) = [each for each in lines(found) if each.what == what and wanted in each.wanted]
    return one


@pytest.mark.parametrize(("rate", "p99", "met"), [(1500.0, 10.0, True), (1499.0, 10.1, False)])
def test_a_ratio_on_its_bound_is_met(rate: float, p99: float, met: bool) -> None:
    ours = sample("ours", rate=rate, latency_ms={"p50": 1.0, "p99": p99})
    found = results(ours, sample("peer", rate=100.0, latency_ms={"p99": 120.0}))
    assert line(found, "echo, 64 connections: rate", "Ray Serve").met is met
    assert line(found, "echo, 64 connections: p99", "1/12 of Ray Serve's").met is met


def test_the_models_share_counts_the_cores_that_are_left() -> None:
    cores = {"ingress": 0.5, "haproxy": 0.1, "generator": 0.1, "child": 1.2, "elsewhere": 0.1}
    alone = [sample("model", "dlrm", "model", threads, rate=rate) for threads, rate in ((1, 2000.0), (0, 3500.0))]
    found = results(sample("ours", "dlrm", level=100, rate=1700.0, cores=cores), *alone)
    one = line(found, "DLRM, 100 users: rate", "model alone")
    # 2 - 0.7 = 1.3 cores: 2000 + 0.3 * 1500 = 2450 a second.
    assert (one.met, one.found) == (True, "0.69 of 2,450/s on the 1.30 cores left")


def test_the_larger_of_the_idle_replicas_decides() -> None:
    roles = {name: {"largest_rss_mb": size} for name, size in (("ingress", 61.0), ("child", 40.0), ("haproxy", 99.0))}
    found = results(footprints=(Footprint(1, "ours", "echo", "idle", roles),))
    one = line(found, "an idle echo replica's resident memory", "60 MB")
    assert (one.met, one.found) == (False, "child 40 MB, ingress 61 MB")
