from __future__ import annotations

from tests.bench.samples import Footprint
from tests.bench.statistics import Spread
from tests.bench.targets import Line, lines, shown
from tests.unit.bench.worlds import results, sample


def line(found: list[Line], what: str, wanted: str) -> Line:
    (one,) = [each for each in found if each.what == what and wanted in each.wanted]
    return one


def test_a_ratio_on_its_bound_is_met_and_below_it_is_not() -> None:
    for ours, met in ((1500.0, True), (1499.0, False)):
        found = lines(results(sample("ours", rate=ours), sample("peer", rate=100.0)))
        assert line(found, "echo, 64 connections: rate", "Ray Serve").met is met


def test_latencies_are_bounded_from_above() -> None:
    for p99, met in ((10.0, True), (10.1, False)):
        found = lines(
            results(sample("ours", latency_ms={"p50": 1.0, "p99": p99}), sample("peer", latency_ms={"p99": 120.0}))
        )
        one = line(found, "echo, 64 connections: p99", "1/12 of Ray Serve's")
        assert one.met is met


def test_the_models_share_counts_the_cores_that_are_left() -> None:
    cores = {"ingress": 0.5, "haproxy": 0.1, "generator": 0.1, "child": 1.2, "elsewhere": 0.1}
    found = lines(
        results(
            sample("ours", "dlrm", level=100, rate=1700.0, cores=cores),
            sample("model", "dlrm", "model", 1, rate=2000.0),
            sample("model", "dlrm", "model", 0, rate=3500.0),
        )
    )
    # 2 - 0.7 = 1.3 cores: 2000 + 0.3 * 1500 = 2450 a second.
    one = line(found, "DLRM, 100 users: rate", "model alone")
    assert one.found == "0.69 of 2,450/s on the 1.30 cores left"
    assert one.met is True


def test_the_larger_of_the_idle_replicas_decides() -> None:
    roles = {
        "ingress": {"largest_rss_mb": 61.0},
        "child": {"largest_rss_mb": 40.0},
        "haproxy": {"largest_rss_mb": 99.0},
    }
    found = lines(results(footprints=(Footprint(1, "ours", "echo", "idle", roles),)))
    one = line(found, "an idle echo replica's resident memory", "60 MB")
    assert (one.met, one.found) == (False, "child 40 MB, ingress 61 MB")


def test_a_ratio_is_shown_with_its_spread() -> None:
    assert shown(None) == "not measured"
    assert shown(Spread(15.25, 15.25, 15.25, 1)) == "15.2 x"
    assert shown(Spread(15.25, 14.0, 16.0, 3)) == "15.2 x (14.0 x to 16.0 x)"
    assert shown(Spread(0.125, 0.1, 0.2, 3)) == "1/8.0 (1/10.0 to 1/5.0)"
