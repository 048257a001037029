"""The autoscaler's decisions, by worked cases and by properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.desired.autoscale import (
    Decided,
    LoadHistory,
    ServiceLoad,
    Situation,
    decide,
    due_in_s,
    situation_of,
    wanted_replicas,
)
from controller.model.spec import Aggregation, AutoscaleSpec

SPEC = AutoscaleSpec(min=1, max=10, target_ongoing_requests=10)


def situation(spec: AutoscaleSpec = SPEC, *, load: float, running: int, target: int | None = None) -> Situation:
    found = ServiceLoad(running=load)
    return Situation(spec, found, found, found, running, running if target is None else target, now=1000.0)


# Worked by hand from the formula; those marked are the tests of Ray Serve's own policy.
@pytest.mark.parametrize(
    ("load", "running", "changes", "wanted"),
    [
        (20, 2, {}, 2),  # exactly what two are for
        (40, 2, {}, 4),
        (31, 2, {}, 4),  # what is begun needs a replica
        (30, 3, {}, 3),  # 3 * (1 + (30 / 30 - 1)) is 3 with rounding and all
        (200, 10, {"max": 1000, "upscaling_factor": 0.5}, 15),  # Ray: half of the way up
        (50, 10, {"max": 1000, "downscaling_factor": 0.5}, 8),  # Ray: half of the way down, rounded up
        (10, 2, {"downscaling_factor": 0.2}, 1),  # Ray: stuck by the factor, so one goes
        (0, 3, {"min": 0}, 0),
        (40, 2, {"upscaling_factor": 2.0}, 6),
        (1, 1, {"min": 0, "target_ongoing_requests": 0.5}, 2),
    ],
)
def test_the_formula(load: float, running: int, changes: dict[str, float], wanted: int) -> None:
    assert wanted_replicas(situation(replace(SPEC, **changes), load=load, running=running)) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("load", "target", "factor", "wanted"),
    [(0, 0, 1.0, 0), (0.1, 0, 1.0, 1), (500, 0, 1.0, 1), (1, 0, 2.5, 3), (1, 4, 1.0, 4), (0, 4, 1.0, 4)],
)
def test_without_a_running_replica(load: float, target: int, factor: float, wanted: int) -> None:
    spec = replace(SPEC, min=0, upscaling_factor=factor)
    assert wanted_replicas(situation(spec, load=load, running=0, target=target)) == wanted


class Service:
    """A service with a clock: load and replicas are set, decisions follow tick by tick."""

    def __init__(self, spec: AutoscaleSpec, target: int | None = None) -> None:
        self.spec = spec
        self.now = 1000.0
        self.history = LoadHistory()
        self.decided = Decided(spec.first if target is None else target)
        self.running = self.decided.target
        self.changes: list[tuple[float, int]] = []
        self.words: list[str] = []

    def run(
        self, seconds: float, load: float, *, waiting: float = 0.0, held: float = 0.0, starts_in_s: float = 0.0
    ) -> None:
        """Let time pass, a tick a second; new replicas run `starts_in_s` after they were decided."""
        for _ in range(int(seconds)):
            self.now += 1.0
            self.history.add(self.now, ServiceLoad(load, waiting + held, held), 60.0)
            at = self.changes[-1][0] if self.changes else 0.0
            if self.now >= at + starts_in_s:
                self.running = self.decided.target
            before = self.decided
            seen = situation_of(self.spec, self.history, self.running, before.target, self.now, before.measured_from)
            self.decided, why = decide(before, seen)
            assert bool(why) == (self.decided.target != before.target)
            if why:
                self.changes.append((self.now, self.decided.target))
                self.words.append(why)

    @property
    def target(self) -> int:
        return self.decided.target


CALM = replace(SPEC, panic_threshold=1e9, look_back_period_s=5.0)


SLEEPS = replace(CALM, min=0, downscale_delay_s=20, downscale_to_zero_delay_s=300)

Story = list[tuple[int, float, int]]
"""Seconds, the load during them, and the target after them."""


@pytest.mark.parametrize(
    ("spec", "first", "story"),
    [
        (CALM, 2, [(20, 20, 2), (29, 40, 2), (8, 40, 4)]),
        (CALM, 2, [(20, 40, 2), (10, 20, 2)] * 20),
        (replace(CALM, downscale_delay_s=100), 4, [(99, 10, 4), (10, 10, 1)]),
        (SLEEPS, 3, [(40, 0, 1), (250, 0, 1), (60, 0, 0), (1000, 0, 0)]),
        (replace(SPEC, downscale_delay_s=0.0), 1, [(5, 80, 8), (24, 0, 8), (10, 0, 1)]),
        (replace(SPEC, max=4), 6, [(1, 60, 4)]),
    ],
    ids=[
        "more load has to last for the delay",
        "a load that comes and goes changes nothing",
        "less load has to last for longer",
        "the last replica goes by a delay of its own",
        "nothing is taken away until a burst is over for the look-back period",
        "edited bounds count at once",
    ],
)
def test_targets_over_time(spec: AutoscaleSpec, first: int, story: Story) -> None:
    service = Service(spec, first)
    for seconds, load, target in story:
        service.run(seconds, load)
        assert service.target == target, service.words


def test_a_change_says_why() -> None:
    service = Service(CALM, 2)
    service.run(60, 40)
    service.spec = replace(SPEC, max=3)
    service.run(1, 40)
    assert service.words == [
        "40.0 requests (40.0 in work, 0.0 waiting) over 5 s (mean), 10 per replica wanted, 2 running; above for 30 s",
        "the bounds are 1 to 3 now",
    ]


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ({"waiting": 1}, "1.0 requests (0.0 in work, 1.0 waiting), no replica running"),
        ({"held": 1}, "woken by 1 held request: 1.0 requests (0.0 in work, 1.0 waiting), no replica running"),
        ({"held": 100}, "woken by 100 held requests: 100.0 requests (0.0 in work, 100.0 waiting), no replica running"),
    ],
)
def test_any_load_wakes_a_service_without_replicas_at_once(load: dict[str, float], words: str) -> None:
    service = Service(replace(CALM, min=0), 0)
    service.run(10, 0)
    service.run(1, 0, **load)
    assert (service.target, service.words[-1]) == (1, words)


WAKING = replace(SPEC, min=0, max=50, target_ongoing_requests=2)


def test_more_follow_when_the_first_is_measured_to_be_too_few() -> None:
    service = Service(WAKING, 0)
    service.run(5, 0, held=100, starts_in_s=5)
    assert (service.target, service.running) == (1, 0)
    service.run(4, 2, waiting=98, starts_in_s=5)
    assert service.target == 1, "its load is not known before it has been at work for panic_window_s"
    service.run(3, 2, waiting=98)
    assert service.target == 50
    assert (
        service.words[-1]
        == "a burst: 100.0 requests (2.0 in work, 98.0 waiting) over 3 s, 2 per replica wanted, 1 running"
    )


@given(
    held=st.integers(1, 5000),
    start_s=st.integers(1, 90),
    rush=st.floats(0, 5000),
    target_ongoing=st.floats(0.1, 100),
    window_s=st.floats(1, 10),
)
def test_the_first_step_from_zero_is_one_whatever_waits(
    held: int, start_s: int, rush: float, target_ongoing: float, window_s: float
) -> None:
    spec = replace(WAKING, target_ongoing_requests=target_ongoing, panic_window_s=window_s)
    service = Service(spec, 0)
    service.run(start_s, 0, held=held, starts_in_s=start_s)
    service.run(1, 0, waiting=rush)
    service.run(60, 0)
    assert [target for _, target in service.changes] == [1]


@pytest.mark.parametrize("starts_in_s", [0.5, 1.0, 2.0, 20.0])
def test_a_burst_is_answered_at_once_and_in_full_however_soon_its_first_replicas_are_there(starts_in_s: float) -> None:
    service = Service(replace(SPEC, max=8, target_ongoing_requests=8, look_back_period_s=20), 1)
    service.run(30, 3)
    service.run(5, 30, starts_in_s=starts_in_s)
    assert service.target == 4
    service.run(20, 30)
    assert service.target == 4


def test_when_the_next_decision_is_due() -> None:
    spec = replace(SPEC, downscale_to_zero_delay_s=7.0)
    assert due_in_s(Decided(1), spec, 0.0) is None
    assert due_in_s(Decided(1, "up", 100.0), spec, 110.0) == 20.0
    assert due_in_s(Decided(1, "down", 100.0), spec, 110.0) == 590.0
    assert due_in_s(Decided(1, "zero", 100.0), spec, 110.0) == 0.0


class TestHistory:
    @pytest.mark.parametrize(
        ("window_s", "how", "total"), [(30, "mean", 50 / 3), (30, "max", 40), (30, "min", 5), (5, "max", 5)]
    )
    def test_a_sample_holds_until_the_next(self, window_s: float, how: Aggregation, total: float) -> None:
        history = LoadHistory()
        for at, waiting in [(0.0, 5), (10.0, 40), (20.0, 5)]:
            history.add(at, ServiceLoad(waiting=waiting), 60)
        assert history.over(window_s, 30, how).total == pytest.approx(total)

    @given(
        steps=st.lists(st.tuples(st.floats(0.001, 20), st.floats(0, 1000)), min_size=1, max_size=40),
        window=st.floats(0.5, 60),
    )
    def test_an_aggregate_is_within_what_was_seen(self, steps: list[tuple[float, float]], window: float) -> None:
        history, now, seen = LoadHistory(), 0.0, []
        for gap, total in steps:
            now += gap
            history.add(now, ServiceLoad(running=total), 60)
            seen.append(total)
        low, mean, high = (history.over(window, now + 1.0, how).total for how in ("min", "mean", "max"))
        assert min(seen) <= low <= high <= max(seen)
        assert low - 1e-6 <= mean <= high + 1e-6


@given(
    spec=st.builds(
        AutoscaleSpec,
        min=st.integers(0, 5),
        max=st.integers(5, 50),
        target_ongoing_requests=st.floats(0.1, 100),
        upscaling_factor=st.floats(0.1, 3),
        downscaling_factor=st.floats(0.1, 3),
        upscale_delay_s=st.floats(0, 60),
        downscale_delay_s=st.floats(0, 600),
        look_back_period_s=st.floats(1, 60),
    ),
    loads=st.lists(st.floats(0, 5000), min_size=1, max_size=60),
    target=st.integers(0, 60),
    running=st.lists(st.integers(0, 60), min_size=1, max_size=5),
)
def test_a_target_is_within_its_bounds_and_every_change_has_words(
    spec: AutoscaleSpec, loads: list[float], target: int, running: list[int]
) -> None:
    history, decided, now = LoadHistory(), Decided(target), 0.0
    for tick, load in enumerate(loads):
        now += 7.3
        history.add(now, ServiceLoad(running=load), 60)
        seen = situation_of(spec, history, running[tick % len(running)], decided.target, now, decided.measured_from)
        before = decided
        decided, why = decide(before, seen)
        assert spec.min <= decided.target <= spec.max
        assert bool(why) == (decided.target != before.target)
        assert decided.direction in ("", "up", "down", "zero")
