"""Who decides how many replicas a service has, and which services nobody wakes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.desired.targets import switched_off, targets_of
from controller.model.spec import AutoscaleSpec, Spec
from tests.unit.controller.worlds import PROJECT, service

TO_ZERO = AutoscaleSpec(min=0, max=4)


def test_a_scale_call_comes_before_the_autoscaler_and_that_before_the_files() -> None:
    spec = Spec(PROJECT, {name: service(name, replicas=1) for name in "abc"})
    assert targets_of(spec, {"a": 5, "gone": 9}, {"a": 3, "b": 3}) == {"a": 5, "b": 3, "c": 1}


@pytest.mark.parametrize(
    ("autoscale", "override", "target", "is_off"),
    [
        (None, None, 2, False),
        (None, 0, 0, True),
        (None, None, 0, True),  # so say the files
        (None, 3, 3, False),
        (TO_ZERO, None, 0, False),  # it sleeps
        (TO_ZERO, 0, 0, True),
        (TO_ZERO, 2, 2, False),
    ],
)
def test_a_service_is_switched_off_where_a_person_says_none(
    autoscale: AutoscaleSpec | None, override: int | None, target: int, is_off: bool
) -> None:
    web = replace(service("web"), autoscale=autoscale)
    overrides = {} if override is None else {"web": override}
    assert switched_off({"web": web}, {"web": target}, overrides) == ({"web"} if is_off else frozenset())
