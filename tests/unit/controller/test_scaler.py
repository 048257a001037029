"""Autoscaling by the whole controller, on fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from controller.desired.autoscale import Answer, Situation
from controller.desired.scaler import Scaler
from controller.errors import PolicyError
from controller.model.observed import Observed
from controller.model.spec import AutoscaleSpec, FunctionPolicy, ProbeSpec, PrometheusPolicy, ServiceSpec
from controller.model.world import Held
from controller.storage.events import EventLog
from controller.storage.store import Store, StoredEvent
from tests.unit.controller import worlds
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


async def test_load_brings_replicas_and_its_end_takes_them(control: Control) -> None:
    async with control.running():
        await control.settled("model", 1, within_s=30)
        control.work["model"] = 35
        await control.settled("model", 4, within_s=30)
        control.work["model"] = 12
        await control.settled("model", 2, within_s=30)
        told = [
            stored.event.message
            for stored in control.controller.events.select(limit=1000)
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
        (told,) = [
            stored.event.message for stored in control.controller.events.select() if stored.event.kind == "autoscale"
        ]
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
        await until(lambda: any(row.autoscale for row in control.view.services), within_s=30)
        assert control.row("model") == (3, 3, 3)


async def test_a_number_set_by_hand_pauses_it_until_it_is_taken_back(control: Control) -> None:
    async with control.running():
        await control.settled("model", 1, within_s=30)
        words = control.controller.commands.scale("model", 3)
        assert words == "the autoscaler (1 to 4) pauses until `make scale SERVICE=model N=auto`"
        await control.settled("model", 3, within_s=30)
        (row,) = control.view.services
        assert row.autoscale is not None
        assert row.autoscale.paused
        assert row.message.startswith("set by scale; the autoscaler (1 to 4) pauses")
        assert control.controller.commands.scale("model", None) == "the autoscaler decides, 1 to 4"
        await control.settled("model", 1, within_s=30)


async def test_the_first_number_may_be_pinned_too(control: Control) -> None:
    control.work["model"] = 35
    async with control.running():
        await control.settled("model", 4, within_s=30)
        control.controller.commands.scale("model", 1)
        await control.settled("model", 1, within_s=30)
        assert control.store.overrides["model"].replicas == 1


async def test_bounds_and_load_are_shown(control: Control) -> None:
    control.work["model"] = 15
    control.source.edit(service("model", replace(QUICK, upscale_delay_s=3600)))
    async with control.running():
        await until(lambda: "15.0 requests" in "".join(row.message for row in control.view.services), within_s=30)
        (row,) = control.view.services
        assert row.message == "autoscaled, 1 to 4: 15.0 requests, which are for 2 replicas if they last"
        page = control.controller.publisher.metrics.page().decode()
        assert 'pierhead_service_autoscale_load{service="model"} 15.0' in page
        assert 'pierhead_service_autoscale_wanted_replicas{service="model"} 2.0' in page


async def test_nothing_is_decided_while_the_engine_is_away(control: Control) -> None:
    async with control.running():
        await control.settled("model", 1, within_s=30)
        control.engine.go_away()
        await until(lambda: control.view.engine_reachable is False, within_s=30)
        control.work["model"] = 35
        ticks = control.controller.publisher.last_tick_at
        await until(lambda: (control.controller.publisher.last_tick_at or 0.0) > (ticks or 0.0) + 2, within_s=30)
        assert control.row("model")[0] == 1
        control.engine.come_back()
        await control.settled("model", 4, within_s=30)


async def test_a_decision_that_is_due_while_the_engine_is_away_does_not_make_the_loop_spin(control: Control) -> None:
    model = service("model", replace(QUICK, upscale_delay_s=1.0))
    control.source.edit(model)
    async with control.running():
        await control.settled("model", 1, within_s=30)
        control.work["model"] = 35
        await until(
            lambda: control.controller.scaler.due_in_s({"model": model}, control.clock()) is not None, within_s=30
        )
        control.engine.go_away()
        await until(lambda: control.view.engine_reachable is False, within_s=30)
        begun, before = control.clock(), ticks(control)
        await until(lambda: (control.controller.publisher.last_tick_at or 0.0) > begun + 3, within_s=30)
        assert ticks(control) - before < 100


def ticks(control: Control) -> float:
    """Looks at the world so far."""
    samples = [
        sample for metric in control.controller.publisher.metrics.registry.collect() for sample in metric.samples
    ]
    (count,) = [sample.value for sample in samples if sample.name == "pierhead_controller_tick_seconds_count"]
    return count


async def test_a_function_of_the_users_decides(control: Control) -> None:
    (control.directory / "scaler_test_policy.py").write_text(
        "def wanted(situation, spare):\n    return situation.spec.max - spare\n"
    )
    policy = FunctionPolicy("scaler_test_policy:wanted", {"spare": 1})
    control.source.edit(service("model", replace(QUICK, policy=policy)))
    async with control.running():
        await control.settled("model", 3, within_s=30)
        (row,) = control.view.services
        assert row.message == "autoscaled, 1 to 4: scaler_test_policy:wanted asks for 3"
        (told,) = [stored.event.message for stored in events(control, "autoscale")]
        assert told.startswith("model: 1 -> 3 replicas: scaler_test_policy:wanted asks for 3, 1 running; above for ")


async def test_a_function_that_goes_by_the_hour_goes_by_the_clock_that_people_see(control: Control) -> None:
    """The machine began with a wrong clock, which was set while the controller ran."""
    (control.directory / "scaler_test_hours.py").write_text(
        "def wanted(situation, night):\n    return 1 if situation.now < night else 3\n"
    )
    night = control.wall() + 1800.0
    policy = FunctionPolicy("scaler_test_hours:wanted", {"night": night})
    control.source.edit(service("model", replace(QUICK, policy=policy)))
    async with control.running():
        await control.settled("model", 1, within_s=30)
        control.set_clock(3600.0)
        await control.settled("model", 3, within_s=30)


async def test_a_function_that_raises_is_one_event_and_holds_the_target(control: Control) -> None:
    (control.directory / "scaler_test_broken.py").write_text("def wanted(situation):\n    return 1 // 0\n")
    control.source.edit(service("model", replace(QUICK, initial=2, policy=FunctionPolicy("scaler_test_broken:wanted"))))
    control.work["model"] = 100
    async with control.running():
        await control.settled("model", 2, within_s=30)
        seen = control.controller.publisher.last_tick_at
        await until(lambda: (control.controller.publisher.last_tick_at or 0.0) > (seen or 0.0) + 3, within_s=30)
        assert control.row("model") == (2, 2, 2)
        words = (
            "scaler_test_broken:wanted raised ZeroDivisionError: integer division or modulo by zero "
            f"at {control.directory}/scaler_test_broken.py:2"
        )
        (row,) = control.view.services
        assert row.message == f"autoscaled, 1 to 4: its policy gives no number, so 2 are held: {words}"
        (failed,) = events(control, "policy_failed")
        assert (failed.times, failed.event.outcome) == (1, "warning")
        assert failed.event.message == (
            f"model: the autoscaling policy gives no number, so 2 replicas are held: {words}"
        )


async def test_a_function_that_does_not_return_is_one_event_and_holds_up_nobody(tmp_path: Path) -> None:
    returns = asyncio.Event()

    async def run(call: Callable[[], int]) -> int:
        await returns.wait()
        return call()

    (tmp_path / "scaler_test_slow.py").write_text("def wanted(situation):\n    return 3\n")
    policy = FunctionPolicy("scaler_test_slow:wanted")
    control = Control.of(tmp_path, service("model", replace(QUICK, initial=2, policy=policy)), service("other"))
    control.run = run
    control.work["other"] = 35
    async with control.running():
        await control.settled("other", 4, within_s=30)
        await until(lambda: "policy_failed" in control.kinds(), within_s=30)
        assert control.row("model") == (2, 2, 2)
        (failed,) = events(control, "policy_failed")
        assert failed.event.message == (
            "model: the autoscaling policy gives no number, so 2 replicas are held: "
            "scaler_test_slow:wanted has not returned for 5 s"
        )
        returns.set()
        await control.settled("model", 3, within_s=30)
        await until(lambda: "policy_works" in control.kinds(), within_s=90)
        assert len(events(control, "policy_failed")) == 1


async def test_a_measured_value_decides_and_holds_when_it_is_gone(control: Control) -> None:
    found: list[float] = [140.0]

    async def query(service: str, policy: PrometheusPolicy) -> float:
        if not found:
            raise PolicyError("the query gives nothing: no series matches it now")
        return found[0]

    policy = PrometheusPolicy("avg(gpu)", 70.0, period_s=0.2)
    control.query = query
    control.source.edit(service("model", replace(QUICK, max=2, policy=policy)))
    async with control.running():
        await control.settled("model", 2, within_s=30)
        (row,) = control.view.services
        assert row.message == "autoscaled, 1 to 2: avg(gpu) = 140, 70 wanted"
        found.clear()
        await until(lambda: "is held" in (w := control.view.services[0].message) or "are held" in w, within_s=30)
        assert control.row("model") == (2, 2, 2)
        assert len(events(control, "policy_failed")) == 1
        found.append(0.0)
        await control.settled("model", 1, within_s=30)


def events(control: Control, kind: str) -> list[StoredEvent]:
    return [stored for stored in control.controller.events.select(limit=1000) if stored.event.kind == kind]


class Asked:
    """A scaler alone, with a policy that answers what the test says; None = it fails."""

    def __init__(self, directory: Path, spec: AutoscaleSpec) -> None:
        self.now = 1000.0
        self.store = Store(directory)
        self.events = EventLog(self.store, lambda: self.now)
        self.scaler = Scaler(self.store, self.events, self.ask)
        self.service = worlds.service("model", replicas=1, autoscale=spec)
        self.answer: int | None = 1
        self.load = 0
        self.ready = 1

    def ask(self, service: str, situation: Situation) -> Answer:
        if self.answer is None:
            raise PolicyError("nothing")
        return Answer(self.answer, f"asked for {self.answer}")

    def look(self, times: int = 1) -> int:
        """Look once a second; the target after that."""
        target = -1
        for _ in range(times):
            self.now += 1.0
            share = self.load // max(self.ready, 1)
            containers = [worlds.replica(self.service, n + 1, ongoing=share) for n in range(self.ready)]
            waiting = worlds.routing(queued={"svc_model": 0 if self.ready else self.load})
            observed = Observed(containers=tuple(containers), routing=waiting)
            target = self.scaler.targets({"model": self.service}, observed, self.now)["model"]
        return target

    def kinds(self) -> list[str]:
        return [stored.event.kind for stored in self.events.select(limit=1000)]


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    spec = AutoscaleSpec(min=0, max=8, initial=1, target_ongoing_requests=10, downscale_delay_s=60, policy=ANY)
    found = Asked(tmp_path, spec)
    yield found
    found.store.close()


ANY = FunctionPolicy("any:one")


def test_delays_apply_to_what_a_policy_says(asked: Asked) -> None:
    asked.answer = 4
    assert asked.look(30) == 1
    assert asked.look(1) == 4
    asked.answer = 2
    asked.ready = 4
    assert asked.look(60) == 4
    assert asked.look(1) == 2
    assert asked.kinds() == ["autoscale", "autoscale"]


def test_a_policy_that_fails_now_and_then_is_one_event_until_it_is_calm(asked: Asked) -> None:
    asked.look(5)
    for _ in range(20):
        asked.answer = None
        asked.look(1)
        assert asked.scaler.rows["model"].problem == "nothing"
        asked.answer = 1
        asked.look(2)
        assert asked.scaler.rows["model"].problem == ""
    assert asked.kinds() == ["policy_failed"]
    asked.look(70)
    assert asked.kinds() == ["policy_failed", "policy_works"]
    asked.answer = None
    asked.look(3)
    assert asked.kinds() == ["policy_failed", "policy_works", "policy_failed"]


def test_a_policy_that_fails_forgets_what_was_about_to_happen(asked: Asked) -> None:
    asked.answer = 4
    asked.look(25)
    asked.answer = None
    asked.look(1)
    asked.answer = 4
    assert asked.look(30) == 1
    assert asked.look(1) == 4


def test_a_burst_and_a_first_request_do_not_wait_for_a_policy_that_fails(asked: Asked) -> None:
    asked.answer = None
    asked.load = 50
    assert asked.look(5) == 5
    asleep = replace(asked.service.autoscale or QUICK, initial=0)
    asked.service = replace(asked.service, autoscale=asleep)
    asked.store.note_autoscaled("model", 0)
    asked.scaler = Scaler(asked.store, asked.events, asked.ask)
    asked.ready = asked.load = 0
    assert asked.look(3) == 0
    asked.load = 1
    assert asked.look(1) == 1


async def test_a_value_beyond_all_numbers_holds_the_target_and_nobody_else(tmp_path: Path) -> None:
    async def query(service: str, policy: PrometheusPolicy) -> float:
        return 1.7e308

    measured = service("model", replace(QUICK, policy=PrometheusPolicy("up", 0.5)))
    control = Control.of(tmp_path, measured, service("web", None))
    control.query = query
    async with control.running():
        await control.settled("model", 1, within_s=30)
        await until(lambda: "policy_failed" in control.kinds(), within_s=30)
        assert "up = 1.7e+308 with a target of 0.5 gives no number" in events(control, "policy_failed")[0].event.message
        await control.settled("web", 1, within_s=30)
        assert control.row("model") == (1, 1, 1)
        assert "tick_failed" not in control.kinds()


async def test_a_defect_in_scaling_one_service_holds_it_and_nobody_else(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("model", replace(QUICK, initial=2)), service("other", QUICK))
    async with control.running() as controller:
        await control.settled("model", 2, within_s=30)
        ask = controller.scaler._ask

        def broken(name: str, situation: Situation) -> Answer:
            if name == "model":
                raise OverflowError("int too large to convert to float")
            return ask(name, situation)

        controller.scaler._ask = broken
        control.work = {"model": 40, "other": 40}
        await control.settled("other", 4, within_s=30)
        assert control.row("model") == (2, 2, 2)
        (told,) = events(control, "policy_failed")
        words = "internal: autoscaling raised OverflowError: int too large to convert to float"
        assert (told.times, told.event.message) == (1, f"model: 2 replicas are held: {words}")
        assert controller.scaler.rows["model"].problem == words
        assert "tick_failed" not in control.kinds()
