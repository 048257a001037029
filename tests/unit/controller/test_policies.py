"""Policies: what a function's answer and a query's value make of the target."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.desired.autoscale import ServiceLoad, Situation
from controller.desired.policies import Policies
from controller.model.spec import AutoscaleSpec, FunctionPolicy, PrometheusPolicy

SPEC = AutoscaleSpec(min=0, max=20, target_ongoing_requests=10)
GPU = PrometheusPolicy("avg(DCGM_FI_DEV_GPU_UTIL)", 70.0)
FUNCTION = FunctionPolicy("any:one")


def situation(spec: AutoscaleSpec = SPEC, *, load: float = 0.0, running: int = 2, target: int = 2) -> Situation:
    found = ServiceLoad(running=load)
    return Situation(spec, found, found, found, running, target, now=1000.0)


def measured(value: float | None) -> Policies:
    def no_function(service: str, policy: FunctionPolicy, situation: Situation) -> int | None:
        raise AssertionError(policy.path)

    return Policies(no_function, lambda service, policy, now: value)


def answered(answer: int | None) -> Policies:
    return Policies(lambda service, policy, situation: answer, lambda service, policy, now: None)


# Kubernetes' formula: ceil(currentReplicas * currentMetricValue / desiredMetricValue).
@pytest.mark.parametrize(
    ("running", "value", "wanted"),
    [(2, 70.0, 2), (2, 140.0, 4), (2, 71.0, 3), (4, 35.0, 2), (4, 36.0, 3), (3, 0.0, 0), (8, 700.0, 20)],
)
def test_a_measured_value(running: int, value: float, wanted: int) -> None:
    spec = replace(SPEC, policy=GPU)
    answer = measured(value).ask("llm", situation(spec, running=running))
    assert answer.wanted == wanted
    assert answer.because == f"avg(DCGM_FI_DEV_GPU_UTIL) = {value:g}, 70 wanted"


def test_factors_apply_to_every_policy() -> None:
    half = replace(SPEC, upscaling_factor=0.5, downscaling_factor=0.1, policy=GPU)
    assert measured(140.0).ask("llm", situation(half, running=4)).wanted == 6
    assert measured(35.0).ask("llm", situation(half, running=4)).wanted == 3  # stuck by the factor, so one goes
    asked = replace(half, policy=FUNCTION)
    assert answered(10).ask("llm", situation(asked, running=4)).wanted == 7
    assert answered(10).ask("llm", situation(asked, running=0)).wanted == 10


def test_a_function_that_has_not_answered_yet_holds_the_target() -> None:
    answer = answered(None).ask("llm", situation(replace(SPEC, policy=FUNCTION), running=2, target=5))
    assert (answer.wanted, answer.because) == (5, "any:one has not answered yet")


@pytest.mark.parametrize(
    ("value", "load", "running", "target", "wanted"),
    [(None, 1.0, 0, 0, 1), (None, 0.0, 0, 0, 0), (None, 0.0, 2, 5, 5), (0.0, 0.0, 1, 1, 0), (0.0, 0.5, 1, 1, 1)],
    ids=["asleep, a request", "asleep", "not read yet", "no request", "the last replica has a request"],
)
def test_where_more_than_the_value_decides(
    value: float | None, load: float, running: int, target: int, wanted: int
) -> None:
    seen = situation(replace(SPEC, policy=GPU), load=load, running=running, target=target)
    assert measured(value).ask("llm", seen).wanted == wanted


@given(
    value=st.floats(0, 1e6),
    target=st.floats(0.001, 1e5),
    running=st.integers(1, 500),
    load=st.floats(0, 1e4),
    up=st.floats(0.01, 10),
    down=st.floats(0.01, 10),
)
def test_any_value_gives_a_number_within_the_bounds_on_its_side(
    value: float, target: float, running: int, load: float, up: float, down: float
) -> None:
    spec = AutoscaleSpec(
        min=0, max=1000, upscaling_factor=up, downscaling_factor=down, policy=PrometheusPolicy("q", target)
    )
    wanted = measured(value).ask("llm", situation(spec, load=load, running=running)).wanted
    assert 0 <= wanted <= 1000
    if value > target * 1.000001:
        assert wanted >= running
    if value < target * 0.999999:
        assert wanted <= running
