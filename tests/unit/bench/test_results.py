from __future__ import annotations

from pathlib import Path

from tests.bench.results import Results
from tests.bench.samples import Footprint
from tests.unit.bench.worlds import results, sample


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    written = results(
        sample(errors={"status": 1}, cpu_ms_per_1000={"ingress": 3.0}, cores={"elsewhere": 0.0}),
        sample("model", "dlrm", "model", 0, latency_ms={}),
        footprints=(Footprint(1, "ours", "echo", "idle", {"child": {"rss_mb": 1.0}}),),
    )
    written.failures.append("round 1, echo, Ray Serve: it did not start")
    written.write(tmp_path / "new" / "results.json")
    assert Results.read(tmp_path / "new" / "results.json") == written


def test_the_open_loops_rate_is_seventy_percent_of_the_smaller_peak() -> None:
    found = results(
        sample("peer", level=1, rate=300.0),
        sample("peer", level=64, rate=1000.0),
        sample("peer", level=128, rate=900.0),
        sample("ours", level=64, rate=9000.0),
    )
    assert found.open_rate("echo") == 700.0
    assert found.open_rate("dlrm") == 0.0


def test_later_rounds_and_other_subjects_do_not_move_the_rate() -> None:
    found = results(sample("peer", rate=1000.0), sample("peer", rate=500.0, round=2), sample("bare", rate=10.0))
    assert found.open_rate("echo") == 700.0
