"""The numbers of replicas that there would be if an operator set some of them."""

from __future__ import annotations

from dataclasses import replace

from controller.desired.targets import rehearsed
from controller.model.desired import Demand, Desired
from controller.model.spec import AutoscaleSpec, YieldSpec
from tests.unit.controller.worlds import gpu_service, service

SCALED = AutoscaleSpec(min=0, max=4)


def desired(**targets: int) -> Desired:
    services = {
        "web": service("web"),
        "auto": service("auto", autoscale=SCALED),
        "chat": gpu_service("chat", yields=YieldSpec(group="pair")),
        "draw": gpu_service("draw", yields=YieldSpec(group="pair")),
    }
    demands = {name: Demand(used_at=1.0) for name in ("chat", "draw")}
    return Desired("p", services, {"web": 2, "auto": 1, "chat": 0, "draw": 0, **targets}, demands=demands)


def test_a_number_is_off_or_on_as_a_scale_makes_it() -> None:
    assert rehearsed(desired(), {"auto": 0}).switched_off == {"auto"}
    off = replace(desired(web=0), switched_off=frozenset({"web"}))
    assert rehearsed(off, {"web": 2}).switched_off == frozenset()
    assert rehearsed(off, {"auto": 3}).switched_off == {"web"}, "the others do not change"


def test_one_that_has_a_number_takes_no_turns_and_its_group_goes_with_the_others() -> None:
    found = rehearsed(desired(), {"chat": 1})
    assert found.demands.keys() == {"draw"}
    assert (found.targets["chat"], found.targets["draw"]) == (1, 0)
    assert rehearsed(desired(chat=1, draw=1), {"web": 1}).targets["draw"] == 1
