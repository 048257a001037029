"""Autoscaling by the whole controller, on fakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controller.model import AutoscaleSpec, Held, ProbeSpec, ServiceSpec
from tests.unit.controller.control import Control, until

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


async def test_load_brings_replicas_and_its_end_takes_them(control: Control) -> None:
    async with control.running():
        await control.settled("model", 1, within_s=30)
        control.work["model"] = 35
        await control.settled("model", 4, within_s=30)
        control.work["model"] = 12
        await control.settled("model", 2, within_s=30)
        told = [
            stored.event.message
            for stored in control.loop.events.select(limit=1000)
            if stored.event.kind == "autoscale"
        ]
        assert any("model: " in message and "35.0 requests (35.0 in work, 0.0 waiting)" in message for message in told)
        assert any(message.endswith("below for 0 s") for message in told)


async def test_calls_that_wait_in_callers_wake_a_service_without_replicas(tmp_path: Path) -> None:
    asleep = replace(QUICK, min=0)
    control = Control.of(tmp_path, service("model", asleep), service("web", None))
    async with control.running():
        await control.settled("web", 1, within_s=30)
        assert control.row("model") == (0, 0, 0)
        control.waiting["web"] = {"model": 1, "other": 100}
        await control.settled("model", 1, within_s=30)
        control.waiting.clear()
        await control.settled("model", 0, within_s=30)


async def test_requests_held_at_the_edge_wake_one_replica(tmp_path: Path) -> None:
    asleep = replace(QUICK, min=0, panic_threshold=2, target_ongoing_requests=2, downscale_delay_s=1000)
    control = Control.of(tmp_path, replace(service("web", asleep), route="/web"), service("other", None))
    async with control.running():
        await control.settled("other", 1, within_s=30)
        assert control.row("web") == (0, 0, 0)
        control.router.held["svc_web"] = Held(now=100)
        await control.settled("web", 1, within_s=30)
        (told,) = [stored.event.message for stored in control.loop.events.select() if stored.event.kind == "autoscale"]
        assert told == (
            "web: 0 -> 1 replicas: woken by 100 held requests: "
            "100.0 requests (0.0 in work, 100.0 waiting), no replica running"
        )


async def test_a_new_controller_goes_on_from_what_was_decided(control: Control) -> None:
    control.work["model"] = 35
    async with control.running():
        await control.settled("model", 4, within_s=30)
    spec = replace(QUICK, downscale_delay_s=3600)
    control.source.edit(service("model", spec))
    control.work["model"] = 0
    async with control.running():
        await until(lambda: control.row("model")[1] == 4, within_s=30)
        assert control.row("model") == (4, 4, 4)


async def test_a_service_whose_number_was_fixed_begins_with_what_it_has(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("model", None, replicas=3))
    async with control.running():
        await control.settled("model", 3, within_s=30)
        control.source.edit(service("model", replace(QUICK, downscale_delay_s=3600)))
        await until(lambda: any(row.autoscale for row in control.loop.view.services), within_s=30)
        assert control.row("model") == (3, 3, 3)


async def test_a_number_set_by_hand_pauses_it_until_it_is_taken_back(control: Control) -> None:
    async with control.running():
        await control.settled("model", 1, within_s=30)
        words = control.loop.scale("model", 3)
        assert words == "the autoscaler (1 to 4) pauses until `make scale SERVICE=model N=auto`"
        await control.settled("model", 3, within_s=30)
        (row,) = control.loop.view.services
        assert row.autoscale is not None
        assert row.autoscale.paused
        assert row.message.startswith("set by scale; the autoscaler (1 to 4) pauses")
        assert control.loop.scale("model", None) == "the autoscaler decides, 1 to 4"
        await control.settled("model", 1, within_s=30)


async def test_the_first_number_may_be_pinned_too(control: Control) -> None:
    control.work["model"] = 35
    async with control.running():
        await control.settled("model", 4, within_s=30)
        control.loop.scale("model", 1)
        await control.settled("model", 1, within_s=30)
        assert control.store.overrides["model"].replicas == 1


async def test_bounds_and_load_are_shown(control: Control) -> None:
    control.work["model"] = 15
    control.source.edit(service("model", replace(QUICK, upscale_delay_s=3600)))
    async with control.running():
        await until(lambda: "15.0 requests" in "".join(row.message for row in control.loop.view.services), within_s=30)
        (row,) = control.loop.view.services
        assert row.message == "autoscaled, 1 to 4: 15.0 requests, which are for 2 replicas if they last"
        page = control.loop.metrics.page().decode()
        assert 'pierhead_service_autoscale_load{service="model"} 15.0' in page
        assert 'pierhead_service_autoscale_wanted_replicas{service="model"} 2.0' in page


async def test_nothing_is_decided_while_the_engine_is_away(control: Control) -> None:
    async with control.running():
        await control.settled("model", 1, within_s=30)
        control.engine.go_away()
        await until(lambda: control.loop.view.engine_reachable is False, within_s=30)
        control.work["model"] = 35
        ticks = control.loop.last_tick_at
        await until(lambda: (control.loop.last_tick_at or 0.0) > (ticks or 0.0) + 2, within_s=30)
        assert control.row("model")[0] == 1
        control.engine.come_back()
        await control.settled("model", 4, within_s=30)
