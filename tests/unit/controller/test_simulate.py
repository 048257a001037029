"""The autoscaler against traces, by the simulator; and the simulator itself."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.daemon import loop
from controller.errors import InvalidRequest
from controller.model.spec import AutoscaleSpec, FunctionPolicy, GpuRequest, PrometheusPolicy, ServiceSpec
from simulator import simulation
from simulator.__main__ import main
from simulator.distributions import parse_distribution
from simulator.report import Summary, percentile, step_words, summarise, table
from simulator.simulation import Result, Setting, seeded, simulate
from simulator.traces import Step, Trace, read_trace
from tests.unit.controller.worlds import service

FIVE_EACH = AutoscaleSpec(min=1, max=8, target_ongoing_requests=5)


def setting(**changes: Any) -> Setting:
    fields = {
        "service_time": parse_distribution("", "exp:0.2"),
        "start_time": parse_distribution("", "uniform:10:20"),
        **changes,
    }
    return Setting(**fields)


def run(
    trace: str | Trace, autoscale: AutoscaleSpec = FIVE_EACH, *, seed: int = 0, spec: Any = None, **changes: Any
) -> tuple[Result, Summary]:
    read = read_trace(trace, seeded(seed, "arrivals")) if isinstance(trace, str) else trace
    served: ServiceSpec = replace(spec or service("model"), autoscale=autoscale)
    result = simulate(served, read, setting(seed=seed, **changes))
    return result, summarise(result)


def targets(result: Result) -> list[int]:
    """The targets, each once in a row."""
    return [target for target, _ in itertools.groupby(sample.target for sample in result.samples)]


def test_the_simulated_loop_looks_as_often_as_the_real_one() -> None:
    assert (simulation.LOOK_S, simulation.NEWS_S) == (loop.LOOK_S, loop.DEBOUNCE_S)


# ---------------------------------------------------------------------------------------- what the autoscaler promises


@pytest.mark.parametrize("seed", range(3))
def test_ten_times_the_load_is_answered_at_once_and_served_when_the_replicas_have_started(seed: int) -> None:
    (step,) = run("step:10x,rate=10,at=120,duration=300", seed=seed)[1].steps
    assert step.needed == 4
    assert step.decided_after_s is not None
    assert step.ready_after_s is not None
    assert step.decided_after_s <= FIVE_EACH.panic_window_s + 3
    assert step.ready_after_s <= step.decided_after_s + 20 + 1


@pytest.mark.parametrize("rate", [45, 60, 110])
def test_a_steady_noisy_load_hardly_ever_changes_the_target_in_an_hour(rate: int) -> None:
    _, found = run(f"noise:rate={rate},amplitude=0.4,duration=3600", begin=rate // 25 + 1)
    assert found.target_changes <= 3
    assert found.refused == found.lost == 0
    assert rate * 0.2 / 5 <= found.target_last <= rate * 0.2 / 5 + 2


def test_a_service_at_zero_wakes_and_sleeps_again() -> None:
    sleepy = replace(FIVE_EACH, min=0, downscale_delay_s=20.0, downscale_to_zero_delay_s=60.0)
    result, found = run(Trace("one", [100.0, 100.5], 400.0, [0.2, 0.2]), sleepy)
    assert targets(result) == [0, 1, 0]
    assert (found.served, found.refused) == (2, 0)
    assert found.wait_s.most is not None
    assert 10 <= found.wait_s.most <= 20 + 2 * simulation.LOOK_S
    assert result.samples[-1].present == 0


def test_requests_between_two_looks_keep_a_service_awake() -> None:
    """As on a stack, where each replica counts what it has done."""
    sleepy = replace(FIVE_EACH, min=0, downscale_delay_s=20.0, downscale_to_zero_delay_s=60.0)
    times = [10.4 + 30 * number for number in range(10)]
    result, _ = run(Trace("short", times, 340.0, [0.01] * len(times)), sleepy, begin=1)
    assert targets(result) == [1]
    assert all(sample.in_work == 0 for sample in result.samples), "no look has seen one"


def test_failing_starts_are_tried_again() -> None:
    _, found = run("step:10x,rate=10,at=30,duration=300", failing_starts=0.5, start_time=parse_distribution("", "2"))
    assert found.failed_starts > 0
    assert found.steps[0].ready_after_s is not None


def test_replicas_without_a_gpu_are_not_started() -> None:
    for gpus, most in ((6, 3), (None, 8)):
        result, found = run(
            "step:10x,rate=20,at=30,duration=120", spec=service("model", gpu=GpuRequest(count=2)), gpus=gpus
        )
        assert found.target_most == 8
        assert max(sample.present for sample in result.samples) == most


def test_a_function_decides_and_one_that_fails_holds(tmp_path: Path) -> None:
    (tmp_path / "simulate_test_policy.py").write_text(
        "def wanted(situation, high):\n"
        "    if situation.now > 100:\n"
        "        raise RuntimeError('late')\n"
        "    return high if situation.now > 50 else 1\n"
    )
    by_clock = replace(
        FIVE_EACH, upscale_delay_s=10.0, policy=FunctionPolicy("simulate_test_policy:wanted", {"high": 3})
    )
    result, found = run("noise:rate=5,duration=200", by_clock, policy_dir=tmp_path)
    assert targets(result) == [1, 3]
    (failed,) = [event for event in result.events if event.kind == "policy_failed"]
    assert "3 replicas are held: simulate_test_policy:wanted raised RuntimeError: late" in failed.message
    assert failed.message in table(result, found)


def test_a_query_is_answered_with_the_utilisation() -> None:
    busy = replace(FIVE_EACH, panic_threshold=1e9, policy=PrometheusPolicy("avg(gpu)", 50.0))
    result, found = run("step:4x,rate=10,at=60,duration=900", busy, places=5)
    # 40/s of 0.2 s each keep 8 places busy; at 50 percent of 5 places a replica, that is 3.2 replicas.
    assert found.target_last == 4
    assert "avg(gpu) = " in next(event.message for event in result.events if event.kind == "autoscale")


# ------------------------------------------------------------------------------------------------ the simulator itself


def test_the_same_arguments_give_the_same_result() -> None:
    first, again, other = (run("spike:5x,at=30,length=20,duration=120", seed=seed)[0] for seed in (1, 1, 2))
    assert (first.samples, first.events, first.requests) == (again.samples, again.events, again.requests)
    assert first.requests != other.requests
    few = run("spike:5x,at=30,length=20,duration=120", replace(FIVE_EACH, max=1), seed=1)[0].requests
    assert (few.arrived, few.needs) == (first.requests.arrived, first.requests.needs), "whatever is decided"


def test_requests_wait_inside_a_replica_and_in_a_queue_with_a_bound_and_a_time_limit() -> None:
    one = replace(FIVE_EACH, max=1)
    _, found = run(Trace("five", [1.0] * 5, 10.0, [1.0] * 5), one, places=2)
    assert (found.served, found.most_waiting) == (5, 0)
    assert (found.wait_s.p50, found.wait_s.most) == (1.0, 2.0)
    spec = service("model", max_ongoing_requests=1, max_queued_requests=3, request_timeout_s=5.0)
    result, found = run(Trace("ten", [1.0] * 10, 20.0, [4.0] * 10), one, spec=spec)
    # The first one is worked on at 1 s, the second at 5 s; the third would have waited until 9 s.
    assert (found.served, found.refused, found.timed_out) == (2, 8, 2)
    assert sorted(result.requests.refused_at) == [1.0] * 6 + [6.0] * 2


@settings(max_examples=25, deadline=None)
@given(
    least=st.integers(0, 3),
    more=st.integers(1, 6),
    shape=st.sampled_from(["spike:10x,at=10,length=10", "noise:rate=30", "step:8x,at=10", "step:0.1x,rate=60,at=20"]),
    bounds=st.fixed_dictionaries(
        {
            "max_ongoing_requests": st.integers(1, 20),
            "max_queued_requests": st.integers(-1, 20),
            "request_timeout_s": st.floats(0.5, 10),
            "route": st.sampled_from(["/model", None]),
        }
    ),
    chance=st.fixed_dictionaries({"seed": st.integers(0, 1000), "failing_starts": st.sampled_from([0.0, 0.3])}),
)
def test_every_request_has_one_end_and_replicas_stay_within_bounds(
    least: int, more: int, shape: str, bounds: dict[str, Any], chance: dict[str, Any]
) -> None:
    delays: dict[str, Any] = {"upscale_delay_s": 2, "downscale_delay_s": 3, "look_back_period_s": 5}
    hasty = AutoscaleSpec(min=least, max=least + more, target_ongoing_requests=3, **delays)
    spec, start_time = service("model", **bounds), parse_distribution("", "uniform:0.5:4")
    result, found = run(f"{shape},duration=40", hasty, spec=spec, start_time=start_time, **chance)
    requests = result.requests
    assert found.served + found.refused + found.lost + found.unfinished == found.requests == len(result.trace.times)
    assert found.lost == 0
    last = result.samples[-1]
    assert 0 <= found.unfinished <= last.in_work + last.waiting + sum(at > last.at_s for at in requests.arrived)
    # Requests do not wait inside a replica here, so request_timeout_s bounds each wait.
    assert all(-1e-6 <= waited <= spec.request_timeout_s + 1e-6 for waited in requests.waited)
    for sample in result.samples:
        assert least <= sample.target <= least + more
        assert sample.ready <= sample.present <= 2 * (least + more)
        assert spec.max_queued_requests < 0 or sample.waiting <= spec.max_queued_requests


# --------------------------------------------------------------------------------------------------- traces and options


def test_shapes() -> None:
    rng = Random(1)
    step = read_trace("step:10x,rate=20,at=100,duration=200", rng)
    assert (step.duration_s, step.steps) == (200.0, (Step(100.0, 20.0, 200.0),))
    before = sum(at < 100 for at in step.times)
    assert before == pytest.approx(2000, rel=0.1)
    assert len(step.times) - before == pytest.approx(20_000, rel=0.05)
    spike = read_trace("spike:4x,rate=5,at=50,length=10,duration=100", rng)
    assert spike.steps == (Step(50.0, 5.0, 20.0), Step(60.0, 20.0, 5.0))
    ramp = read_trace("ramp:9x,rate=10,at=100,length=100,duration=300", rng)
    assert ramp.steps == ()
    assert sum(140 <= at < 160 for at in ramp.times) == pytest.approx(20 * 50, rel=0.15)
    assert sum(at >= 200 for at in ramp.times) == pytest.approx(100 * 90, rel=0.05)
    day = read_trace("diurnal:9x,rate=10,length=200,duration=200", rng)
    assert sum(90 <= at < 110 for at in day.times) == pytest.approx(20 * 90, rel=0.1)
    noise = read_trace("noise:rate=50,amplitude=0.2,duration=400", rng)
    assert len(noise.times) == pytest.approx(20_000, rel=0.05)
    assert noise.steps == ()
    for trace in (step, spike, ramp, day, noise):
        assert list(trace.times) == sorted(trace.times)
        assert all(0 <= at < trace.duration_s for at in trace.times)


def test_files(tmp_path: Path) -> None:
    requests, rates = tmp_path / "requests.csv", tmp_path / "rates.csv"
    requests.write_text("t_s,service_time_s\n0.5,0.1\n\n2,0.3\n")
    trace = read_trace(str(requests), Random(1))
    assert (list(trace.times), list(trace.service_times or ()), trace.duration_s) == ([0.5, 2.0], [0.1, 0.3], 3.0)
    requests.write_text("t_s\n0.5\n")
    assert read_trace(str(requests), Random(1)).service_times is None
    rates.write_text("t_s,rate_per_s\n0,10\n100,50\n")
    trace = read_trace(str(rates), Random(1))
    assert (trace.duration_s, trace.steps) == (200.0, (Step(100.0, 10.0, 50.0),))
    assert sum(at >= 100 for at in trace.times) == pytest.approx(5000, rel=0.1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("t_s,rate\n0,1\n", 'FILE:1: expected "t_s", "t_s,service_time_s" or "t_s,rate_per_s", found "t_s,rate"'),
        ("t_s\n1\nx\n", 'FILE:3: expected 1 number(s) >= 0, found "x"'),
        ("t_s\n2\n1\n", "FILE:3: 1 s comes after 2 s; sort the lines by t_s"),
        ("t_s\n", "FILE has no line after its header"),
        ("t_s,rate_per_s\n0,1\n9,1e6\n50,1e6\n", "FILE has about 82,000,009 requests; the simulator takes 10,000,000"),
        ("t_s\n0\n1e8\n", "FILE: last t_s: the simulator takes 604,800 s (a week) at most, found 100,000,000"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(InvalidRequest) as failed:
        read_trace(str(file), Random(1))
    assert str(failed.value) == f"TRACE: {problem}".replace("FILE", str(file))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("stepp", "TRACE: expected a shape (step, spike, ramp, diurnal, noise) such as step:10x, or a file *.csv"),
        ("nowhere.csv", "TRACE: nowhere.csv cannot be read: No such file or directory"),
        ("noise:10x", 'TRACE: noise has no "factor"; it has rate, amplitude, length, duration'),
        ("step:ten", 'TRACE: step: factor: expected a number > 0, found "ten"'),
        ("ramp:duration=9e8,rate=0", "TRACE: ramp: duration: the simulator takes 604,800 s (a week) at most"),
        ("noise:length=1e-6,duration=60", "TRACE: noise: length: expected at least 6e-05 s for a duration of 60 s"),
        ("step --service-time exp:0", '--service-time: expected seconds ("0.2"), "uniform:LOW:HIGH", "exp:MEAN" or "l'),
        ("step --failing-starts 2", "--failing-starts: expected a number from 0 to 1, found 2"),
        ("step --plot a.gif", '--plot: expected a file that ends in .png, .svg, .pdf, found "a.gif"'),
        ("step --plot nowhere/a.png", "--plot: nowhere is not a directory"),
        ("step --x-serve {", "--x-serve: expected YAML such as {autoscale: {min: 1, max: 8}}: "),
        ("step --x-serve {rout:}", "services.simulated.x-serve.rout: unknown key"),
        ("step --x-serve {}", "--x-serve: has no autoscale block, so the number of replicas stays 1; write one (compo"),
        ("step model --x-serve {}", "expected a service or --x-serve, found both; edit the compose file, or leave one"),
    ],
)
def test_what_cannot_be_run(arguments: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    assert capsys.readouterr().err.startswith(problem)


def test_the_table_and_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["step:10x,rate=10,at=30,duration=60", "--x-serve", "{autoscale: {max: 4}}"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "simulated, step:10x,rate=10,at=30,duration=60, 60 s"
    assert lines[1].startswith("  requests")
    assert "10 -> 100/s at 30 s needs 5, more than max (4): max wanted after " in lines[-1]
    assert main([*arguments, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["summary", "assumed", "events"]
    summary = document["summary"]
    assert summary["requests"] == summary["served"] + summary["refused"] + summary["lost"] + summary["unfinished"]
    assert summary["target_most"] == 4
    assert document["assumed"]["service_time_s"] == "exp:0.1"
    assert document["events"][0]["message"].startswith("simulated: 1 -> ")
    _, found = run("step:10x,rate=100,at=10,duration=12", replace(FIVE_EACH, panic_threshold=1e9))
    assert (
        step_words(found.steps[0]) == "100 -> 1000/s at 10 s needs 40, more than max (8): max wanted never, ready never"
    )
    _, found = run("step:20x,rate=10,at=60,duration=120", replace(FIVE_EACH, target_ongoing_requests=4), places=4)
    assert (found.steps[0].needed, found.steps[0].allowed) == (10, 8)
    assert found.unfinished > 1000, "which is why it says so"


def test_distributions_and_percentiles() -> None:
    rng = Random(1)
    for text, mean in [("3", 3.0), ("uniform:1:3", 2.0), ("exp:0.5", 0.5), ("lognormal:0.1:0.5", 0.127)]:
        found = parse_distribution("", text)
        values = sorted(found.sample(rng) for _ in range(20_000))
        assert found.mean == pytest.approx(mean, rel=0.01)
        assert sum(values) / len(values) == pytest.approx(mean, rel=0.05)
    assert percentile(values, 0.5) == pytest.approx(0.1, rel=0.05)
    assert percentile(values, 0.99) == pytest.approx(0.5, rel=0.15)
    assert percentile([], 0.5) is None


@pytest.mark.parametrize("trace", ["spike:10x,at=10,length=5,duration=40", "step:2x,at=1,duration=2"])
def test_the_picture(trace: str, tmp_path: Path) -> None:
    file = tmp_path / "simulation.png"
    block = "{autoscale: {max: 2}, max_ongoing_requests: 2, max_queued_requests: 5}"
    assert main([trace, "--x-serve", block, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
