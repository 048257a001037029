"""Services that take turns on GPUs: a picture of the world, then the plan as `make plan` prints it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.desired.demands import Demands
from controller.desired.loads import Uses
from controller.model.desired import Demand, Desired
from controller.model.observed import Observed
from controller.model.plan import Plan
from controller.model.spec import AutoscaleSpec, ProbeSpec, ServiceSpec, YieldSpec
from controller.model.world import FailureRecord, HeldRequests, ReplicaContainer, ReplicaHealth
from controller.plan import plan
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import (
    NOW,
    desired,
    gpu_service,
    gpus,
    observed,
    replica,
    retirement,
    routing,
    server,
    version,
)

RULE = YieldSpec(idle_s=3.0, min_stay_s=30.0)


def model(name: str, group: str | None = None, **changes: Any) -> ServiceSpec:
    autoscale = AutoscaleSpec(min=0, max=2)
    return gpu_service(name, autoscale=autoscale, yields=replace(RULE, group=group), **{"replicas": 0, **changes})


A, B, C, PINNED = model("a"), model("b"), model("c"), gpu_service("pinned", replicas=1)
VA, VB = version(A), version(B)


def on(spec: ServiceSpec, number: int = 0, ready_s: float | None = 60.0, **changes: Any) -> ReplicaContainer:
    """A replica on the GPU of that number, ready for so long."""
    health = ReplicaHealth.UNKNOWN if ready_s is None else ReplicaHealth.READY
    ready_since = None if ready_s is None else NOW - ready_s
    return replica(spec, 1, gpus=(f"GPU-{number}",), health=health, ready_since=ready_since, **changes)


def used(seconds: float) -> Demand:
    """Of a service whose last request was so long ago."""
    return Demand(NOW - seconds)


def waits(seconds: float, requests: int = 1) -> Demand:
    return Demand(NOW, requests, NOW - seconds)


def wanted(*specs: ServiceSpec, targets: dict[str, int] | None = None, **demands: Demand) -> Desired:
    """Every service wants a replica."""
    found = desired(*specs, **({spec.name: 1 for spec in specs} | (targets or {})))
    return replace(found, demands=demands)


def world(*containers: ReplicaContainer, cards: int = 1, **changes: Any) -> Observed:
    return observed(*containers, specs=(A, B, C, PINNED), gpus=gpus(cards), **changes)


def made(wish: Desired, seen: Observed) -> Plan:
    return plan(wish, seen, NOW)


GOES = f"#1 drain p-a-{VA}-1: gives way to b: 1 request waits"
STAYS = "pending b: it asks for 1 GPU and 0 of 1 are free: 1 held by a; "
PICTURES: dict[str, tuple[Desired, Observed, str]] = {
    "one that is idle gives way to one that is asked": (
        *(wanted(A, B, a=used(3), b=waits(1)), world(on(A)), f"{GOES}\n{STAYS}a makes room"),
    ),
    "nobody gives way where nobody waits": (
        *(wanted(A, B, a=used(900), b=used(900), targets={"b": 0}), world(on(A)), "nothing to do"),
    ),
    "not before its stay is over": (
        *(wanted(A, B, a=used(20), b=waits(1)), world(on(A, ready_s=20)), f"{STAYS}a gives way in 10 s at the latest"),
    ),
    "not while it was used a moment ago": (
        *(wanted(A, B, a=used(1), b=waits(1)), world(on(A)), f"{STAYS}a gives way in 2 s at the latest"),
    ),
    "not while it is used": (
        *(wanted(A, B, a=used(0), b=waits(29)), world(on(A)), f"{STAYS}a gives way in 1 s at the latest"),
    ),
    "one that is used without end gives way in the end": (
        wanted(A, B, a=used(0), b=waits(30, 4)),
        world(on(A)),
        f"#1 drain p-a-{VA}-1: gives way to b: 4 requests wait\n{STAYS}a makes room",
    ),
    "one that starts is waited for": (
        wanted(A, B, a=used(0), b=waits(90)),
        world(on(A, ready_s=None)),
        f"{STAYS}a gives way some time after being ready",
    ),
    "the least recently used one": (
        wanted(A, B, C, a=used(5), b=waits(1), c=used(6)),
        world(on(A), on(C, 1), cards=2),
        (
            f"#1 drain p-c-{version(C)}-1: gives way to b: 1 request waits\n"
            "pending b: it asks for 1 GPU and 0 of 2 are free: 1 held by a, 1 held by c; c makes room"
        ),
    ),
    "the one whose stay is over, though it was used later": (
        wanted(A, B, C, a=used(5), b=waits(1), c=used(20)),
        world(on(A), on(C, 1, ready_s=20), cards=2),
        f"{GOES}\npending b: it asks for 1 GPU and 0 of 2 are free: 1 held by a, 1 held by c; a makes room",
    ),
    "a free GPU needs no one to give way": (
        wanted(A, B, a=used(5), b=waits(1)),
        world(on(A), cards=2),
        f"#1 create p-b-{VB}-1 on GPU-1: 0 of 1 replicas exist\n#2 after #1 start p-b-{VB}-1: 0 of 1 replicas exist",
    ),
    "a GPU that is about to be free needs no other": (
        wanted(A, B, C, b=waits(1), a=used(9), c=used(9), targets={"a": 0}),
        world(on(A, ongoing=1), on(C, 1), cards=2, retirements=retirement(on(A))),
        "pending b: it asks for 1 GPU and 0 of 2 are free: 1 held by a, 1 held by c",
    ),
    "a service without the word never gives way": (
        wanted(PINNED, B, b=waits(90)),
        world(on(PINNED)),
        "pending b: it asks for 1 GPU and 0 of 1 are free: 1 held by pinned; no service that holds one gives way",
    ),
    "a service without the word needs no request to wait": (
        wanted(A, PINNED, a=used(5)),
        world(on(A)),
        (
            f"#1 drain p-a-{VA}-1: gives way to pinned: it has too few replicas\n"
            "pending pinned: it asks for 1 GPU and 0 of 1 are free: 1 held by a; a makes room"
        ),
    ),
    "who waited longest comes first": (
        wanted(A, B, C, a=used(5), b=waits(1), c=waits(2)),
        world(on(A)),
        (
            f"#1 drain p-a-{VA}-1: gives way to c: 1 request waits\n"
            "pending b: it asks for 1 GPU and 0 of 1 are free: 1 held by a; its turn is after c\n"
            "pending c: it asks for 1 GPU and 0 of 1 are free: 1 held by a; a makes room"
        ),
    ),
    "its own next requests do not take it back": (
        wanted(A, B, a=waits(1), b=waits(9)),
        world(on(A), retirements=retirement(on(A), stopping_since=NOW)),
        (
            "pending a: it asks for 1 GPU and 0 of 1 are free: 1 held by a; its turn is after b\n"
            "pending b: it asks for 1 GPU and 0 of 1 are free: 1 held by a"
        ),
    ),
    "nobody gives way for a second replica": (
        wanted(A, B, a=used(5), b=used(0), targets={"b": 2}),
        world(on(A), on(B, 1), cards=2),
        "pending b: it asks for 1 GPU and 0 of 2 are free: 1 held by a, 1 held by b; nothing gives way for one more",
    ),
}


@pytest.mark.parametrize("picture", PICTURES)
def test_pictures(picture: str) -> None:
    wish, seen, expected = PICTURES[picture]
    assert str(made(wish, seen)) == expected


PAIR = (model("a", "chat"), model("b", "chat"))


def test_a_group_waits_for_all_its_gpus_and_gives_way_whole() -> None:
    a, b = PAIR
    wish = wanted(a, b, C, a=waits(1), b=Demand(NOW), c=used(9))
    apart = world(on(C), cards=2)
    assert str(made(wish, apart)).splitlines() == [
        f"#1 drain p-c-{version(C)}-1: gives way to a and b: 1 request waits",
        f"#2 create p-a-{VA}-1 on GPU-1: 0 of 1 replicas exist",
        f"#3 after #2 start p-a-{VA}-1: 0 of 1 replicas exist",
        "pending b: it asks for 1 GPU and 0 of 2 are free: 1 held by a, 1 held by c; c makes room",
    ]
    wish = wanted(a, b, C, a=used(9), b=used(4), c=waits(1))
    together = made(wish, world(on(a), on(b, 1), cards=2))
    assert set(together.gives_way) == {"a", "b"}
    wish = wanted(a, b, C, a=used(9), b=used(1), c=waits(1))
    assert "a and b give way in 2 s at the latest" in str(made(wish, world(on(a), on(b, 1), cards=2)))


def test_what_gave_way_sleeps_and_what_nobody_asks_for_does_not_wait() -> None:
    assert made(wanted(A, B, a=used(3), b=waits(1)), world(on(A))).gives_way == {"a": "gave way to b: 1 request waits"}
    unasked = made(wanted(A, B, a=used(3), b=used(3)), world(on(A)))
    assert (str(unasked), unasked.gives_way) == ("nothing to do", {"b": "found no free GPU, and no request waits"})


def test_a_service_that_backs_off_keeps_no_gpu_from_others() -> None:
    failing = {("a", VA): FailureRecord(9, NOW, "exited by itself with code 1")}
    planned = made(wanted(A, B, a=waits(9), b=waits(1)), world(failures=failing))
    assert f"create p-b-{VB}-1" in str(planned)


# ----------------------------------------------------------------------------------------------------------- the demand


def test_a_request_that_comes_and_goes_between_two_looks_is_seen() -> None:
    demands = Demands()
    quiet = world(on(A, used=7))
    demands.look({"a": A}, (), quiet, NOW)
    assert demands.look({"a": A}, (), quiet, NOW + 5)["a"] == Demand(NOW)
    assert demands.look({"a": A}, (), world(on(A, used=8)), NOW + 6)["a"] == Demand(NOW + 6)
    assert demands.look({"a": A}, (), world(on(A, used=8, ongoing=1)), NOW + 9)["a"] == Demand(NOW + 9)


def test_a_question_about_the_service_is_no_use() -> None:
    demands = Demands()
    demands.look({"a": A}, (), world(on(A, answered=7, used=4)), NOW)
    assert demands.look({"a": A}, (), world(on(A, answered=9, used=4)), NOW + 5)["a"] == Demand(NOW)
    assert demands.look({"a": A}, (), world(on(A, answered=9, used=5)), NOW + 9)["a"] == Demand(NOW + 9)


def test_a_replica_that_is_silent_for_a_moment_was_not_used_then() -> None:
    demands = Demands()
    for seconds, used in enumerate((7, None, 7)):
        assert demands.look({"a": A}, (), world(on(A, used=used)), NOW + seconds)["a"] == Demand(NOW)
    assert demands.look({"a": A}, (), world(on(A, used=8)), NOW + 9)["a"] == Demand(NOW + 9)


def test_an_edge_that_is_silent_for_a_moment_has_sent_nothing_then() -> None:
    uses, foreign = Uses(), on(A)
    counts = (routing(server(foreign, answered=count)) for count in (7, 7, 8))
    first, again, one_more = (world(foreign, routing=each) for each in counts)
    seen = [set(uses.look(["a"], each)) for each in (first, world(foreign, routing=None), again, one_more)]
    assert seen == [set(), set(), set(), {"a"}]


def test_a_request_is_seen_when_another_replica_leaves_at_the_same_time() -> None:
    demands = Demands()
    both = world(on(A, used=7), replica(A, 2, gpus=("GPU-1",), used=900), cards=2)
    demands.look({"a": A}, (), both, NOW)
    assert demands.look({"a": A}, (), world(on(A, used=8)), NOW + 6)["a"] == Demand(NOW + 6)


def test_requests_wait_from_the_first_of_them_on_until_the_replica_is_there() -> None:
    demands = Demands()
    held = world(routing=routing(held={"svc_a": HeldRequests(now=2)}))
    routed = {"a": replace(A, route="/a")}
    demands.look(routed, (), held, NOW)
    assert demands.look(routed, (), held, NOW + 4)["a"] == Demand(NOW + 4, 2, NOW)
    assert demands.look(routed, (), world(routing=None), NOW + 5)["a"] == Demand(NOW + 4, 2, NOW), (
        "HAProxy does not answer"
    )
    starting = world(on(A, ready_s=None), routing=routing(held={"svc_a": HeldRequests(now=2)}))
    assert demands.look(routed, (), starting, NOW + 6)["a"] == Demand(NOW + 6)


def test_a_number_set_by_an_operator_pins_a_service() -> None:
    assert set(Demands().look({"a": A, "b": B, "pinned": PINNED}, {"a": 1}, world(), NOW)) == {"b"}


# ------------------------------------------------------------------------------------------------- the whole controller


@pytest.mark.virtual_time
async def test_two_models_take_turns_on_one_gpu(tmp_path: Path) -> None:
    def quick(name: str) -> ServiceSpec:
        probe, rule = ProbeSpec(port=9100, path="/readyz", period_s=0.05), YieldSpec(idle_s=1.0, min_stay_s=5.0)
        return replace(model(name), route=f"/{name}", probe=probe, yields=rule)

    def said(name: str) -> str:
        return next(row.message for row in control.view.services if row.name == name)

    control = Control.of(tmp_path, quick("a"), quick("b"))
    control.engine.gpus = gpus(1)
    async with control.running():
        await until(lambda: control.row("b") == (0, 0, 0))
        control.router.held["svc_a"] = HeldRequests(now=1)
        await control.settled("a", 1)
        (its,) = {container.version for container in control.engine.containers.values()}
        control.router.held["svc_a"], control.work["a"] = HeldRequests(served=1), 1
        control.router.held["svc_b"] = HeldRequests(now=3)
        await until(lambda: "a gives way in " in said("b"))
        control.work["a"] = 0
        await control.settled("b", 1, within_s=30)
        await until(lambda: control.row("a") == (0, 0, 0))
        assert said("a") == "autoscaled, 0 to 2: asleep until its next request, as it gave way to b: 3 requests wait"
        assert "a: 1 -> 0 replicas: gave way to b: 3 requests wait" in control.said("autoscale")
        assert f"drain p-a-{its}-1: gives way to b: 3 requests wait" in control.said("begin_retirement")
        assert control.said("replica_pending") == []
