"""Replicas that sleep between their turns on GPUs: a picture of the world, then the plan as `make plan` prints it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.model.actions import PutToSleep, WakeReplica
from controller.model.desired import Demand, Desired
from controller.model.machine import Machine
from controller.model.observed import Observed
from controller.model.phases import Phase, phase_of
from controller.model.spec import AutoscaleSpec, GpuRequest, GpuSlot, ProbeSpec, ServiceSpec, YieldSpec
from controller.model.world import (
    ContainerState,
    Gpu,
    GpuReading,
    HeldRequests,
    ReplicaContainer,
    ReplicaHealth,
    Retirement,
    ServerState,
    SleepReport,
    UserConfigReport,
)
from controller.plan import plan
from controller.plan.leave import grace_of
from tests.unit.controller.control import Control, until
from tests.unit.controller.worlds import NOW, desired, gpu_service, observed, replica, routing, server, version

GIB = 1024**3
SIZE = 80 * GIB
ROOMY = Machine(16, 512 * GIB, 400 * GIB, 10_000, 0, 0.0)
FULL = replace(ROOMY, free_bytes=GIB)
CAN = SleepReport(can=True, wanted=False, asleep=False)
TOLD = replace(CAN, wanted=True)
SLEEPS = replace(TOLD, asleep=True)
WAKES = replace(SLEEPS, wanted=False)


def model(name: str, **changes: Any) -> ServiceSpec:
    return gpu_service(name, replicas=0, autoscale=AutoscaleSpec(min=0, max=2), yields=YieldSpec(), **changes)


A, B, C = model("a"), model("b"), model("c")
NAMES = {spec.name: f"p-{spec.name}-{version(spec)}-1" for spec in (A, B, C)}


def awake(spec: ServiceSpec, card: int = 0, **changes: Any) -> ReplicaContainer:
    return replica(spec, 1, **{"gpus": (f"GPU-{card}",), "ready_since": NOW - 60, "sleep": CAN, **changes})


def asleep(spec: ServiceSpec, card: int = 0, **changes: Any) -> ReplicaContainer:
    return awake(spec, card, **{"health": ReplicaHealth.UNKNOWN, "sleep": SLEEPS, "ready_since": None, **changes})


def mark(
    container: ReplicaContainer, told_s: float | None = None, drained_s: float = 10.0, **changes: Any
) -> Retirement:
    told = None if told_s is None else NOW - told_s
    gone = Retirement(container.name, container.id, NOW - drained_s, None, "gives way", sleeping_since=told)
    return replace(gone, **changes)


def world(
    *containers: ReplicaContainer | tuple[ReplicaContainer, Retirement], cards: int = 1, use: int = 0, **changes: Any
) -> Observed:
    """What sleeps, or is to, is there with its mark; `use`: GiB in use of each GPU."""
    listed = [one if isinstance(one, tuple) else (one, None) for one in containers]
    gpus = tuple(Gpu(f"GPU-{number}", memory_bytes=SIZE) for number in range(cards))
    reading = GpuReading(NOW, {gpu.uuid: use * GIB for gpu in gpus})
    facts = {"gpus": gpus, "gpu_reading": reading, "machine": ROOMY, **changes}
    marks = {container.id: one for container, one in listed if one is not None}
    return observed(*(container for container, _ in listed), specs=(A, B, C), retirements=marks, **facts)


def sleeper(
    spec: ServiceSpec, card: int = 0, told_s: float = 50.0, **changes: Any
) -> tuple[ReplicaContainer, Retirement]:
    one = asleep(spec, card, **changes)
    return one, mark(one, told_s, drained_s=told_s + 1)


def wish(*specs: ServiceSpec, **targets: int) -> Desired:
    """These services; those with a number are asked for."""
    asked = {name: Demand(NOW, 1, NOW - 1) for name, count in targets.items() if count}
    return replace(desired(*specs, **targets), demands={spec.name: Demand(NOW - 90) for spec in specs} | asked)


def told(drained: Observed, **report: Any) -> Observed:
    """The same, a second after it was told to sleep."""
    (one,) = drained.containers
    return world((replace(one, sleep=replace(TOLD, **report), health=ReplicaHealth.UNKNOWN), mark(one, 1.0)))


ON = awake(A)
DRAINED = world((ON, mark(ON)))
FALLS = f"#1 put {NAMES['a']} to sleep: gives way; nothing in flight"
STOPS = f"#1 send SIGTERM to {NAMES['a']}: gives way"
LEAVES = f"#1 send SIGTERM to {NAMES['a']}: it sleeps, and "
STARTS_B = (
    f"#1 create {NAMES['b']} on GPU-0: 0 of 1 replicas exist\n#2 after #1 start {NAMES['b']}: 0 of 1 replicas exist"
)

OTHER = NAMES["a"][:-1] + "2"
STARTS_ANOTHER = f"#2 create {OTHER} on GPU-1: 0 of 1 replicas exist\n#3 after #2 start {OTHER}: 0 of 1 replicas exist"
HOLDS_IT = "it asks for 1 GPU and 0 of 1 are free: 1 held by a"
IN_USE = (
    "pending b: it asks for 1 GPU and 0 of 1 are free: 1 with 9 GiB in use by replicas that sleep or other processes; "
    "no service that holds one gives way"
)
NO_MEMORY = (
    "pending b: 0 MiB of 512 GiB of memory are free on this machine, which keeps 2 GiB: ask for fewer, or free memory"
)
LATE = "not ready 5000 s after its start and 1800 s after its last progress (startup.deadline_s): it never answered"


STILL_IN_USE = IN_USE.replace("pending b", "pending a").replace("9 GiB", "30 GiB")


def drained(**changes: Any) -> Observed:
    one = replace(ON, **changes)
    return world((one, mark(one)))


def limited(gib: int) -> ServiceSpec:
    """A, whose containers may take so much memory."""
    return replace(A, container={"HostConfig": {"Memory": gib * GIB}})


B_GIVES_WAY = (
    f"#1 drain {NAMES['b']}: gives way to a: 1 request waits\n"
    "pending a: it asks for 1 GPU and 0 of 2 are free: 1 held by b, 1 held by c; b makes room"
)
NO_SLOT = (
    "pending b: it asks for 50 GiB of a GPU and 0 of 1 GPUs fit: 1 has 47 GiB free (replicas that sleep or other "
    "processes use 8 GiB); c gives way in 10 s at the latest"
)
NO_SLOT_ALONE = (
    "pending b: it asks for 50 GiB of a GPU and 0 of 1 GPUs fit: 1 has 40 GiB free (replicas that sleep or other "
    "processes use 40 GiB); no service that holds one gives way"
)
SERVER_GOES = (
    f"#1 set server svc_a/{NAMES['a']} to maint: its replica sleeps\n"
    f"#2 after #1 delete server svc_a/{NAMES['a']}: its replica sleeps"
)
ROUTED = replace(A, route="/a")
LEFT = world(sleeper(ROUTED), routing=routing(server(asleep(ROUTED), state=ServerState.DRAIN)))
HALF = [replace(spec, gpu=GpuRequest(1, slot=GpuSlot(memory_bytes=50 * GIB))) for spec in (A, B)]


PICTURES: dict[str, tuple[Desired, Observed, str]] = {
    # ------------------------------------------------------------------------------------------------- at a drain's end
    "what has drained sleeps": (wish(A), DRAINED, FALLS),
    "not where its program cannot": (wish(A), drained(sleep=replace(CAN, can=False)), f"{STOPS}; nothing in flight"),
    "not of an image without it": (wish(A), drained(sleep=None), f"{STOPS}; nothing in flight"),
    "not while it is busy": (
        *(
            wish(A),
            world((replace(ON, ongoing=1), mark(ON, drained_s=20))),
            f"{STOPS}; still busy after 20 s (graceful_shutdown_timeout_s)",
        ),
    ),
    "not without memory": (wish(A), replace(DRAINED, machine=FULL), f"{STOPS}; nothing in flight"),
    "not where the memory is not known": (wish(A), replace(DRAINED, machine=None), f"{STOPS}; nothing in flight"),
    "not where the GPUs' memory cannot be read": (
        *(wish(A), replace(DRAINED, gpu_reading=None), f"{STOPS}; nothing in flight"),
    ),
    "not where that of its own GPU cannot be read": (
        *(wish(A), replace(DRAINED, gpu_reading=GpuReading(NOW, {"GPU-1": 0})), f"{STOPS}; nothing in flight"),
    ),
    "also while its reading is awaited": (wish(A), replace(DRAINED, gpu_reading=GpuReading(-math.inf)), FALLS),
    "not where its container may not take as much memory": (
        *(wish(limited(79)), DRAINED, f"{STOPS}; nothing in flight"),
    ),
    "where its container may": (wish(limited(81)), DRAINED, FALLS),
    "not while HAProxy is away, which may have its server": (
        *(wish(ROUTED), world((awake(ROUTED), mark(ON, drained_s=20)), routing=None)),
        f"{STOPS}; still busy after 20 s (graceful_shutdown_timeout_s)",
    ),
    "one that wakes up and is no longer needed": (
        *(wish(A), world((asleep(A, sleep=WAKES), mark(ON)))),
        f"#1 put {NAMES['a']} to sleep: gives way; it is not ready, so it has no requests",
    ),
    "not one that failed": (wish(A), world((ON, mark(ON, failed=True))), f"{STOPS}; nothing in flight"),
    "not one whose number an operator has set": (
        *(replace(wish(A), demands={}), DRAINED, f"{STOPS}; nothing in flight"),
    ),
    "not one that is switched off": (
        *(replace(wish(A), switched_off=frozenset("a")), DRAINED, f"{STOPS}; nothing in flight"),
    ),
    "not one of a former version": (*(wish(replace(A, definition_hash="d2")), DRAINED, f"{STOPS}; nothing in flight"),),
    # ----------------------------------------------------------------------------------------------------- on its way
    "it has time for it": (wish(A), told(DRAINED), "nothing to do"),
    "it holds its GPU until it sleeps": (
        wish(A, B, b=1),
        told(DRAINED),
        "pending b: it asks for 1 GPU and 0 of 1 are free: 1 held by a",
    ),
    "it is told again": (
        wish(A),
        told(DRAINED, wanted=False),
        f"#1 put {NAMES['a']} to sleep: gives way; it was not told to sleep yet",
    ),
    "it says why it cannot": (wish(A), told(DRAINED, error="no memory"), f"{STOPS}; no memory"),
    "it takes too long": (
        *(wish(A), world((replace(ON, sleep=TOLD), mark(ON, 30.0))), f"{STOPS}; not asleep 30 s after it was told to"),
    ),
    "a controller that has just started knows nothing of it": (
        *(wish(A), world((replace(ON, sleep=None), mark(ON, 900.0))), "nothing to do"),
    ),
    # ------------------------------------------------------------------------------------------------- while it sleeps
    "nobody needs anything": (wish(A), world(sleeper(A)), "nothing to do"),
    "its GPU is another one's": (wish(A, B, b=1), world(sleeper(A)), STARTS_B),
    "it may leave a tenth of the GPU in use": (wish(A, B, b=1), world(sleeper(A), use=8), STARTS_B),
    "so may two": (wish(A, B, C, b=1), world(sleeper(A), sleeper(C), use=8), STARTS_B),
    "not if it left too much there": (
        wish(A, B, b=1),
        world(sleeper(A), use=9),
        f"{LEAVES}b needs its GPUs' memory\n{IN_USE}",
    ),
    "also if it is in its own way": (
        wish(A, a=1),
        world(sleeper(A), use=30),
        f"{LEAVES}a needs its GPUs' memory\n{STILL_IN_USE}",
    ),
    "another one leaves before that": (
        wish(A, C, a=1),
        world(sleeper(A, told_s=70), sleeper(C), use=30),
        f"#1 send SIGTERM to {NAMES['c']}: it sleeps, and a needs its GPUs' memory\n{STILL_IN_USE}",
    ),
    "a GPU on which nothing sleeps is taken first": (
        wish(A, B, b=1),
        world(sleeper(A), cards=2),
        STARTS_B.replace("GPU-0", "GPU-1"),
    ),
    "so is a slot that is in no sleeper's way": (
        wish(*HALF, b=1),
        world(sleeper(A, gpu_slot=GpuSlot(memory_bytes=50 * GIB)), cards=2),
        STARTS_B.replace("GPU-0", "50 GiB of GPU-1"),
    ),
    "HAProxy's server of it goes": (
        wish(ROUTED),
        LEFT,
        SERVER_GOES,
    ),
    "it leaves for a slot if nothing else gives way": (
        wish(A, *HALF[1:], b=1),
        world(sleeper(A), use=40),
        LEAVES + "b needs its GPUs' memory\n" + NO_SLOT_ALONE,
    ),
    "one that leaves needs no memory to sleep": (
        wish(A, B, C, b=1),
        world(
            (replace(ON, sleep=TOLD), mark(ON, 1.0, stopping_since=NOW)),
            cards=2,
            machine=replace(ROOMY, free_bytes=81 * GIB),
        ),
        STARTS_B.replace("GPU-0", "GPU-1"),
    ),
    "what sleeps counts against slots, and stays while another one gives way": (
        wish(A, *HALF[1:], C, b=1, c=1),
        world(sleeper(A), awake(C, gpu_slot=GpuSlot(memory_bytes=25 * GIB), ready_since=NOW - 20), use=33),
        NO_SLOT,
    ),
    "none leaves for memory that another one may not need to sleep": (
        wish(A, B, C, b=1),
        world(
            (replace(ON, sleep=TOLD, health=ReplicaHealth.UNKNOWN), mark(ON, 1.0)),
            sleeper(C, 1),
            cards=3,
            machine=replace(ROOMY, free_bytes=81 * GIB),
        ),
        NO_MEMORY.replace("0 MiB", "81 GiB", 1),
    ),
    "a start needs the memory of the one that was used least recently": (
        wish(A, B, C, b=1),
        world(sleeper(A, told_s=70), sleeper(C, 1), cards=2, machine=replace(FULL, free_bytes=0)),
        f"{LEAVES}b needs its memory\n{NO_MEMORY}",
    ),
    "one leaves after the other": (
        wish(A, B, C, b=1),
        world(
            sleeper(A),
            (asleep(C, 1), mark(asleep(C, 1), 9.0, stopping_since=NOW - 1)),
            cards=2,
            machine=replace(FULL, free_bytes=0),
        ),
        NO_MEMORY,
    ),
    "its service is gone": (wish(B), world(sleeper(A)), f"{LEAVES}its service takes no turns on GPUs any more"),
    "its service takes no turns": (
        *(wish(replace(A, yields=None)), world(sleeper(A)), f"{LEAVES}its service takes no turns on GPUs any more"),
    ),
    "its service is switched off": (
        replace(wish(A), switched_off=frozenset("a")),
        world(sleeper(A)),
        f"{LEAVES}0 wanted, and no request wakes it",
    ),
    "its version is a former one": (
        wish(replace(A, definition_hash="d2")),
        world(sleeper(A)),
        f"{LEAVES}its version is not {version(replace(A, definition_hash='d2'))}",
    ),
    "it does not answer": (
        wish(A),
        world(sleeper(A, health=ReplicaHealth.FAILED, health_detail="no answer")),
        f"{LEAVES}its readiness probe failed: no answer",
    ),
    "its container ends": (
        *(wish(A), world(sleeper(A, state=ContainerState.EXITED)), f"#1 remove {NAMES['a']}: gives way"),
    ),
    # ---------------------------------------------------------------------------------------------------- asked again
    "it is woken": (wish(A, a=1), world(sleeper(A)), f"#1 wake {NAMES['a']}: 0 of 1 replicas exist"),
    "it needs no memory for that": (
        *(wish(A, a=1), world(sleeper(A), machine=FULL), f"#1 wake {NAMES['a']}: 0 of 1 replicas exist"),
    ),
    "it counts among those of a machine": (
        wish(replace(A, max_replicas_per_node=1), a=1),
        world(sleeper(A)),
        f"#1 wake {NAMES['a']}: 0 of 1 replicas exist",
    ),
    "its GPU is held, and there is no memory for another one": (
        replace(wish(A, B, a=1, b=1), demands={"b": Demand(NOW, 1, NOW - 1)}),
        world(sleeper(A), awake(B, ready_since=NOW - 20), machine=replace(FULL, free_bytes=0)),
        "pending a: it asks for 1 GPU and 0 of 1 are free: 1 held by b; b gives way in 10 s at the latest",
    ),
    "not while its GPU is held": (
        wish(A, B, a=1, b=1),
        world(sleeper(A), awake(B, ready_since=NOW - 20)),
        "pending a: it asks for 1 GPU and 0 of 1 are free: 1 held by b; b gives way in 10 s at the latest",
    ),
    "what holds its GPU gives way before what was used less recently": (
        replace(
            wish(A, B, C, a=1, b=1, c=1),
            demands={"a": Demand(NOW, 1, NOW - 1), "b": Demand(NOW - 50), "c": Demand(NOW - 80)},
        ),
        world(sleeper(A), awake(B), awake(C, 1), cards=2),
        B_GIVES_WAY,
    ),
    "another GPU is free": (
        wish(A, B, a=1, b=1),
        world(sleeper(A), awake(B, ready_since=NOW - 20), cards=2),
        f"{LEAVES}other GPUs than its own are free\n{STARTS_ANOTHER}",
    ),
    "its GPU is the one that it prefers": (
        *(wish(A, a=1), world(sleeper(A, 1), cards=2), f"#1 wake {NAMES['a']}: 0 of 1 replicas exist"),
    ),
    "it is told again to wake up": (
        wish(A, a=1),
        world(asleep(A)),
        f"#1 wake {NAMES['a']}: it is wanted, and was not told to wake up yet",
    ),
    "it wakes up": (wish(A, a=1), world(asleep(A, sleep=WAKES)), "nothing to do"),
    "it gets no user_config before it has woken up": (
        *(wish(A, a=1), world(asleep(A, sleep=WAKES, user_config=UserConfigReport("other", "other"))), "nothing to do"),
    ),
    "one that wakes up holds its GPU": (
        wish(A, B, a=1, b=1),
        world(asleep(A, sleep=WAKES)),
        "pending b: it asks for 1 GPU and 0 of 1 are free: 1 held by a; a gives way some time after being ready",
    ),
    "it takes too long to wake up": (
        wish(A, a=1),
        world(asleep(A, sleep=WAKES, progressed_at=NOW - 1801, started_at=NOW - 5000)),
        f"#1 drain {NAMES['a']}: {LATE}\npending a: {HOLDS_IT}; no service that holds one gives way",
    ),
    "an operator has put it to sleep": (wish(A, a=1), world(awake(A)), "nothing to do"),
}


@pytest.mark.parametrize("picture", PICTURES)
def test_a_plan(picture: str) -> None:
    wanted, seen, text = PICTURES[picture]
    assert str(plan(wanted, seen, NOW)) == text


def test_what_is_told_in_a_plan_is_not_told_again_while_that_is_in_progress() -> None:
    for wanted, seen in [(wish(A), DRAINED), (wish(A, a=1), world(sleeper(A)))]:
        actions = tuple(step.action for step in plan(wanted, seen, NOW).steps)
        assert isinstance(actions[0], PutToSleep | WakeReplica)
        assert str(plan(wanted, replace(seen, in_progress=actions), NOW)) == "nothing to do"


def test_no_other_one_leaves_before_the_engine_has_sent_the_signal() -> None:
    wanted, seen, _ = PICTURES["a start needs the memory of the one that was used least recently"]
    (step,) = plan(wanted, seen, NOW).steps
    assert str(plan(wanted, replace(seen, in_progress=(step.action,)), NOW)) == NO_MEMORY


@pytest.mark.parametrize("was", [CAN, TOLD, SLEEPS, WAKES, None])
@pytest.mark.parametrize("told_s", [None, 1.0])
def test_one_that_has_slept_has_its_whole_grace_period(was: SleepReport | None, told_s: float | None) -> None:
    one = asleep(A, sleep=was)
    has_slept = told_s is not None or was in (TOLD, SLEEPS, WAKES)
    assert grace_of(one, mark(one, told_s, stopping_since=NOW), A, version(A)) == (30.0 if has_slept else 5.0)


def test_one_that_is_being_woken_holds_its_gpu() -> None:
    seen = world(sleeper(A))
    actions = tuple(step.action for step in plan(wish(A, a=1), seen, NOW).steps)
    both = plan(wish(A, B, a=1, b=1), replace(seen, in_progress=actions), NOW)
    assert str(both).startswith("pending b: it asks for 1 GPU and 0 of 1 are free: 1 held by a")


def test_two_do_not_fall_asleep_into_the_same_memory() -> None:
    for_one = replace(ROOMY, free_bytes=100 * GIB)
    ons = [awake(A), awake(B, 1)]
    seen = world(*((one, mark(one)) for one in ons), cards=2, machine=for_one)
    stops = f"#2 send SIGTERM to {NAMES['b']}: gives way; nothing in flight"
    assert str(plan(wish(A, B), seen, NOW)) == f"{FALLS}\n{stops}"
    falls = replace(ons[0], sleep=TOLD)
    seen = world((falls, mark(falls, 1.0)), (ons[1], mark(ons[1])), cards=2, machine=for_one)
    assert "put" not in str(plan(wish(A, B), seen, NOW))


def test_phases() -> None:
    one = asleep(A)
    phases = {
        Phase.DRAINING: (replace(one, sleep=TOLD), mark(one, 1.0)),
        Phase.ASLEEP: (one, mark(one, 1.0)),
        Phase.STARTING: (replace(one, sleep=WAKES), None),
        Phase.STOPPING: (one, mark(one, 1.0, stopping_since=NOW)),
        Phase.STOPPED: (replace(one, state=ContainerState.EXITED), mark(one, 1.0)),
    }
    assert {phase: phase_of(*pair[:1], A, pair[1], NOW)[0] for phase, pair in phases.items()} == {
        phase: phase for phase in phases
    }


# ------------------------------------------------------------------------------------------------- the whole controller


@pytest.mark.virtual_time
async def test_a_model_sleeps_while_another_has_its_turn_and_its_container_answers_again(tmp_path: Path) -> None:
    def quick(name: str) -> ServiceSpec:
        probe, rule = ProbeSpec(port=9100, path="/readyz", period_s=0.05), YieldSpec(idle_s=1.0, min_stay_s=5.0)
        return replace(model(name), route=f"/{name}", probe=probe, yields=rule)

    def states(name: str) -> dict[str, str]:
        return {one.name: one.state for row in control.view.services if row.name == name for one in row.replicas}

    async def asked(name: str, other: str) -> None:
        control.router.held[f"svc_{other}"] = HeldRequests(served=1)
        control.router.held[f"svc_{name}"] = HeldRequests(now=1)
        await until(lambda: control.row(name)[1] == 1, within_s=60)
        control.router.held[f"svc_{name}"] = HeldRequests(served=1)

    control = Control.of(tmp_path, quick("a"), quick("b"))
    control.engine.gpus = (Gpu("GPU-0", memory_bytes=SIZE),)
    control.engine.gpu_memory = {"GPU-0": 0}
    control.engine.machine = ROOMY
    control.can_sleep = {"a", "b"}
    async with control.running():
        await asked("a", "b")
        (its,) = control.engine.containers
        await asked("b", "a")
        assert states("a") == {control.engine.containers[its].name: "ASLEEP"}
        row = next(row for row in control.view.services if row.name == "a")
        assert (row.state, row.converged, row.ready, row.wanted) == ("HEALTHY", True, 0, 0)
        assert row.replicas[0].message.endswith(": gives way to b: 1 request waits")
        assert (control.view.gpus[0].holder or "").startswith("p-b-")
    async with control.running():
        await until(lambda: "ASLEEP" in states("a").values())
        await asked("a", "b")
        assert "ASLEEP" in states("b").values()
        assert its in control.engine.containers
        assert len(control.engine.containers) == 2
        assert control.said("wake_replica") != []
    control.can_sleep = set()
    async with control.running():
        await asked("b", "a")
        await until(lambda: its not in control.engine.containers, within_s=60)
