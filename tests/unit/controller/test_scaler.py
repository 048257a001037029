"""Autoscaling by the whole controller, on fakes."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from controller.desired import scaler
from controller.desired.autoscale import Decided, PolicyAnswer, Situation, decide
from controller.errors import PolicyError
from controller.model.spec import AutoscaleSpec, FunctionPolicy, ProbeSpec, PrometheusPolicy, ServiceSpec
from controller.model.world import HeldRequests
from tests.unit.controller.control import Control, until

pytestmark = pytest.mark.virtual_time

QUICK = AutoscaleSpec(
    min=1,
    max=4,
    target_ongoing_requests=10,
    look_back_period_s=1.0,
    upscale_delay_s=0.3,
    downscale_delay_s=0.3,
    panic_threshold=1000,
)


def service(name: str, autoscale: AutoscaleSpec | None = QUICK, replicas: int = 1) -> ServiceSpec:
    probe = ProbeSpec(port=9100, path="/readyz", period_s=0.05)
    first = autoscale.first if autoscale else replicas
    return ServiceSpec(
        name, f"{name}:1", "grpc", 50051, first, probe, autoscale, definition_hash=name, graceful_shutdown_timeout_s=1.0
    )


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return Control.of(tmp_path, service("model"))


async def settled(control: Control, name: str, replicas: int) -> None:
    await control.settled(name, replicas, within_s=30)


async def looks_pass(control: Control, seconds: float) -> None:
    """Wait until the loop has looked at the world that much later."""
    begun = control.clock()
    await until(lambda: (control.controller.publisher.last_tick_at or 0.0) > begun + seconds, within_s=30)


def with_function(control: Control, source: str, spec: AutoscaleSpec = QUICK, **kwargs: float) -> FunctionPolicy:
    """Give the service `model` a function of the project's as its policy."""
    module = f"scaler_test_{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    (control.directory / f"{module}.py").write_text(source)
    policy = FunctionPolicy(f"{module}:wanted", kwargs)
    control.source.edit(*control.source.services.values(), service("model", replace(spec, policy=policy)))
    return policy


async def test_load_adds_replicas_and_its_end_removes_them(control: Control) -> None:
    async with control.running():
        await settled(control, "model", 1)
        control.work["model"] = 35
        await settled(control, "model", 4)
        control.work["model"] = 12
        await settled(control, "model", 2)
        told = control.said("autoscale")
        assert any("model: " in message and "35.0 requests (35.0 in work, 0.0 waiting)" in message for message in told)
        assert any(message.endswith("below for 0 s") for message in told)


async def test_calls_that_wait_in_callers_wake_a_service_without_replicas(tmp_path: Path) -> None:
    asleep = replace(QUICK, min=0)
    control = Control.of(tmp_path, service("model", asleep), service("web", None))
    async with control.running():
        await settled(control, "web", 1)
        assert control.row("model") == (0, 0, 0)
        control.waiting["web"] = {"model": 1, "other": 100}
        await settled(control, "model", 1)
        control.waiting.clear()
        await settled(control, "model", 0)


async def test_requests_held_at_the_edge_wake_one_replica(tmp_path: Path) -> None:
    asleep = replace(QUICK, min=0, panic_threshold=2, target_ongoing_requests=2, downscale_delay_s=1000)
    control = Control.of(tmp_path, replace(service("web", asleep), route="/web"), service("other", None))
    async with control.running():
        await settled(control, "other", 1)
        assert control.row("web") == (0, 0, 0)
        control.router.held["svc_web"] = HeldRequests(now=100)
        await settled(control, "web", 1)
        (words,) = control.said("autoscale")
        assert words.startswith("web: 0 -> 1 replicas: woken by 100 held requests: 100.0 requests (0.0 in work, ")


async def test_short_requests_that_no_look_sees_in_flight_keep_the_last_replica(tmp_path: Path) -> None:
    asleep = replace(QUICK, min=0, downscale_to_zero_delay_s=4.0)
    control = Control.of(tmp_path, service("model", asleep), service("web", None))
    control.waiting["web"] = {"model": 1}
    async with control.running():
        await settled(control, "model", 1)
        its = next(one.version for one in control.engine.containers.values() if one.service == "model")
        control.waiting.clear()
        for count in range(1, 8):
            control.answers[its] = (count, 0)
            await looks_pass(control, 2.0)
        assert control.row("model") == (1, 1, 1)
        await settled(control, "model", 0)


async def test_a_new_controller_continues_from_the_decided_target(control: Control) -> None:
    control.work["model"] = 35
    async with control.running():
        await settled(control, "model", 4)
    control.source.edit(service("model", replace(QUICK, downscale_delay_s=3600)))
    control.work["model"] = 0
    async with control.running():
        await until(lambda: control.row("model")[1] == 4, within_s=30)
        assert control.row("model") == (4, 4, 4)


async def test_a_number_set_by_hand_pauses_the_autoscaler_until_it_is_taken_back(control: Control) -> None:
    control.work["model"] = 25
    async with control.running() as controller:
        await settled(control, "model", 3)
        words = controller.commands.scale("model", 1)  # the first number of the files is a number by hand, too
        assert words == "the autoscaler (1 to 4) pauses until `pierhead scale model auto`"
        await settled(control, "model", 1)
        (row,) = control.view.services
        assert row.autoscale is not None
        assert row.autoscale.paused
        assert row.message.startswith("set by scale; the autoscaler (1 to 4) pauses")
        assert controller.commands.scale("model", None) == "the autoscaler decides, 1 to 4"
        await settled(control, "model", 3)


async def test_bounds_and_load_are_shown(control: Control) -> None:
    control.work["model"] = 15
    control.source.edit(service("model", replace(QUICK, upscale_delay_s=3600)))
    async with control.running() as controller:
        await until(lambda: "15.0 requests" in "".join(row.message for row in control.view.services), within_s=30)
        (row,) = control.view.services
        assert row.message == "autoscaled, 1 to 4: 15.0 requests, which need 2 replicas if they last"
        page = controller.publisher.metrics.page().decode()
        assert 'pierhead_service_autoscale_load{service="model"} 15.0' in page
        assert 'pierhead_service_autoscale_wanted_replicas{service="model"} 2.0' in page


async def test_while_the_engine_is_away_nothing_is_decided_and_the_loop_does_not_spin(
    control: Control,
) -> None:
    def ticks() -> float:
        metrics = control.controller.publisher.metrics.registry
        return metrics.get_sample_value("pierhead_controller_tick_seconds_count") or 0.0

    model = service("model", replace(QUICK, upscale_delay_s=1.0))
    control.source.edit(model)
    async with control.running() as controller:
        await settled(control, "model", 1)
        control.work["model"] = 35
        await until(lambda: controller.scaler.due_in_s({"model": model}, control.clock()) is not None, within_s=30)
        control.engine.go_away()
        await until(lambda: control.view.engine_reachable is False, within_s=30)
        before = ticks()
        await looks_pass(control, 3)
        assert ticks() - before < 100
        assert control.row("model")[0] == 1
        control.engine.come_back()
        await settled(control, "model", 4)


# --------------------------------------------------------------------------------------------- policies of the user's


async def test_a_function_of_the_users_decides(control: Control) -> None:
    policy = with_function(control, "def wanted(situation, spare):\n    return situation.spec.max - spare\n", spare=1)
    async with control.running():
        await settled(control, "model", 3)
        (row,) = control.view.services
        assert row.message == f"autoscaled, 1 to 4: {policy.path} asks for 3"
        (told,) = control.said("autoscale")
        assert told.startswith(f"model: 1 -> 3 replicas: {policy.path} asks for 3, 1 running; above for ")


async def test_a_function_that_goes_by_the_hour_sees_the_wall_clock(control: Control) -> None:
    """The machine began with a wrong clock, which was set while the controller ran."""
    night = control.wall() + 1800.0
    with_function(control, "def wanted(situation, night):\n    return 1 if situation.now < night else 3\n", night=night)
    async with control.running():
        await settled(control, "model", 1)
        control.set_clock(3600.0)
        await settled(control, "model", 3)


async def test_a_function_that_raises_is_one_event_and_no_first_request_or_burst_waits_for_it(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("model"), service("web", None))
    source = "def wanted(situation):\n    return 1 // 0\n"
    policy = with_function(control, source, replace(QUICK, min=0, initial=0, panic_threshold=2))
    async with control.running():
        await settled(control, "web", 1)
        await looks_pass(control, 3)
        (row,) = [row for row in control.view.services if row.name == "model"]
        file = control.directory / f"{policy.path.partition(':')[0]}.py"
        words = f"{policy.path} raised ZeroDivisionError: integer division or modulo by zero at {file}:2"
        assert row.message == f"autoscaled, 0 to 4: its policy gives no number, so 0 are held: {words}"
        (failed,) = control.events("policy_failed")
        assert failed.outcome == "warning"
        assert failed.message == f"model: the autoscaling policy gives no number, so 0 replicas are held: {words}"
        control.waiting["web"] = {"model": 1}
        await settled(control, "model", 1)
        control.waiting.clear()
        control.work["model"] = 35
        await settled(control, "model", 4)


async def test_a_measured_value_decides_and_the_target_is_held_without_one(control: Control) -> None:
    found: list[float] = [140.0]

    async def query(service: str, policy: PrometheusPolicy) -> float:
        if not found:
            raise PolicyError("the query gives nothing: no series matches it now")
        return found[0]

    control.query = query
    control.source.edit(
        service("model", replace(QUICK, max=2, policy=PrometheusPolicy("avg(gpu)", 70.0, period_s=0.2)))
    )
    async with control.running():
        await settled(control, "model", 2)
        (row,) = control.view.services
        assert row.message == "autoscaled, 1 to 2: avg(gpu) = 140, 70 wanted"
        found.clear()
        await until(lambda: "2 are held" in control.view.services[0].message, within_s=30)
        assert control.row("model") == (2, 2, 2)
        assert len(control.events("policy_failed")) == 1
        found.append(0.0)
        await settled(control, "model", 1)
        await until(lambda: control.events("policy_works"), within_s=120)


async def test_a_defect_in_scaling_a_service_holds_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(QUICK, initial=2)

    def decided(before: Decided, situation: Situation, answer: PolicyAnswer) -> tuple[Decided, str]:
        if situation.spec == broken and situation.load.total:
            raise OverflowError("int too large to convert to float")
        return decide(before, situation, answer)

    monkeypatch.setattr(scaler, "decide", decided)
    control = Control.of(tmp_path, service("model", broken), service("other", QUICK))
    control.work = {"model": 40, "other": 40}
    async with control.running() as controller:
        await settled(control, "other", 4)
        assert control.row("model") == (2, 2, 2)
        words = "internal: autoscaling raised OverflowError: int too large to convert to float"
        assert control.said("policy_failed") == [f"model: 2 replicas are held: {words}"]
        assert controller.scaler.rows["model"].problem == words
        assert "tick_failed" not in control.kinds()
