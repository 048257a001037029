from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pierhead.metrics import SECONDS, Histogram, RuntimeMetrics
from prometheus_client.parser import text_string_to_metric_families

NAMES = {
    "pierhead_shared_memory_bytes",
    "pierhead_shared_memory_copied_bytes",
    "pierhead_shared_memory_limit_bytes",
    "pierhead_shared_memory_peers",
    "pierhead_shared_memory_regions",
    "pierhead_shared_memory_sent_bytes",
    "pierhead_shared_memory_tensors",
    "pierhead_log_lines_dropped",
    "pierhead_batch_duration_seconds",
    "pierhead_batch_rows",
    "pierhead_batch_size",
    "pierhead_batch_wait_seconds",
    "pierhead_event_loop_blocked_seconds",
    "pierhead_event_loop_lag_seconds",
    "pierhead_handle_duration_seconds",
    "pierhead_handle_ejections",
    "pierhead_handle_requests",
    "pierhead_handle_retries",
    "pierhead_multiplex_hits",
    "pierhead_multiplex_load_duration_seconds",
    "pierhead_multiplex_load_failures",
    "pierhead_multiplex_loads",
    "pierhead_multiplex_misses",
    "pierhead_multiplex_models",
    "pierhead_multiplex_unloads",
    "pierhead_ongoing_requests",
    "pierhead_queued_requests",
    "pierhead_refused_requests",
    "pierhead_replica_ready",
    "pierhead_request_duration_seconds",
    "pierhead_requests",
}


def test_names_are_what_dashboards_ask_for() -> None:
    families = text_string_to_metric_families(RuntimeMetrics().expose().decode())
    assert {family.name for family in families} == NAMES


@given(st.lists(st.floats(0, 1000), max_size=60))
def test_a_histogram_counts_as_prometheus_does(values: list[float]) -> None:
    histogram = Histogram("x_seconds", "x", ("target",), SECONDS)
    for value in values:
        histogram.observe(("t",), value)
    family = histogram.collect(("service",), ("s",))
    for sample in family.samples:
        assert sample.labels["service"] == "s"
        assert sample.labels["target"] == "t"
        if sample.name.endswith("_bucket"):
            assert sample.value == sum(value <= float(sample.labels["le"]) for value in values)
        elif sample.name.endswith("_count"):
            assert sample.value == len(values)
        elif sample.name.endswith("_sum"):
            assert abs(sample.value - sum(values)) < 1e-6


def test_labels_are_escaped() -> None:
    metrics = RuntimeMetrics()
    metrics.service = 'a"b\\c\n'
    metrics.requests.inc(("GET /", "200"))
    (family,) = [
        family
        for family in text_string_to_metric_families(metrics.expose().decode())
        if family.name == "pierhead_requests"
    ]
    assert family.samples[0].labels["service"] == 'a"b\\c\n'


def test_texts_stand_behind_the_runtimes_own() -> None:
    metrics = RuntimeMetrics()
    metrics.texts.append(lambda: b"# TYPE engine_steps gauge\nengine_steps 3.0\n")
    families = {family.name for family in text_string_to_metric_families(metrics.expose().decode())}
    assert families == NAMES | {"engine_steps"}
