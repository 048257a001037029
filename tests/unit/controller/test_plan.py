"""The planner, example by example: a picture of the world, then the plan as `make plan` prints it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controller.model.actions import CreateContainer, RemoveContainer, SetWaitingRoom, WriteRouting
from controller.model.desired import Desired
from controller.model.machine import Footprint, Machine
from controller.model.observed import Observed
from controller.model.spec import GpuRequest, ServiceSpec
from controller.model.world import (
    ContainerState,
    FailureRecord,
    ReplicaContainer,
    ReplicaHealth,
    ServerState,
    StrayContainer,
)
from controller.plan import plan
from controller.plan.failures import backoff_s
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
    service,
    version,
)

KILLED = "ended by signal 9: killed by a user, or by the kernel because memory ran out (`dmesg` shows which)"
NOTHING = "nothing to do"
WEB = service()
V = version(WEB)
NEW = replace(WEB, definition_hash="d2")
NV = version(NEW)
RANKER = gpu_service()
RV = version(RANKER)
FOREIGN = service(managed=False)
UNROUTED = gpu_service(managed=False)
ONE, TWO = replica(WEB, 1), replica(WEB, 2)
RELOAD = WriteRouting(target="routing", services=(), routing_hash="new", cause="x")


def text(wanted: Desired, world: Observed, now: float = NOW) -> str:
    return str(plan(wanted, world, now))


def lines(*expected: str) -> str:
    return "\n".join(expected)


def seen(*containers: ReplicaContainer, **changes: Any) -> Observed:
    """What there is of `web`."""
    return observed(*containers, specs=(WEB,), **changes)


def leaving(spec: ServiceSpec, seconds: float = 1, **changes: Any) -> Observed:
    """Two replicas, of which the second has been draining for so long; `changes` of it, and of its mark and server."""
    mark = {key: changes.pop(key) for key in ("stopping_since", "failed") if key in changes}
    its = {key: changes.pop(key) for key in ("sessions", "queued") if key in changes}
    one, two = replica(spec, 1), replica(spec, 2, **changes)
    servers = routing(server(one), server(two, state=ServerState.DRAIN, **its)) if spec.is_routed else routing()
    marks = retirement(two, draining_since=NOW - seconds, **mark)
    return observed(one, two, specs=(spec,), retirements=marks, routing=servers)


def first_of(spec: ServiceSpec) -> Desired:
    return desired(spec, **{spec.name: 1})


# ------------------------------------------------------------------------------------------- replicas and their servers


UNREADY, NEVER_STARTED = (
    {"health": ReplicaHealth.UNKNOWN},
    {"health": ReplicaHealth.UNKNOWN, "started_at": None, "ip": None},
)
SERVER = f"server svc_web/p-web-{V}"
WHY_ONE_LESS = "2 replicas, 1 wanted"
NO_REPLICA = "0 of 2 replicas exist"
PICTURES: dict[str, tuple[Desired, Observed, str]] = {
    "converged": (desired(WEB), seen(ONE, TWO), NOTHING),
    "first start": (
        desired(WEB),
        seen(),
        lines(
            f"#1 create p-web-{V}-1: {NO_REPLICA}",
            f"#2 after #1 start p-web-{V}-1: {NO_REPLICA}",
            f"#3 create p-web-{V}-2: {NO_REPLICA}",
            f"#4 after #3 start p-web-{V}-2: {NO_REPLICA}",
        ),
    ),
    "a server only for a ready replica": (
        desired(WEB),
        seen(ONE, replica(WEB, 2, **UNREADY), routing=routing()),
        f"#1 add {SERVER}-1 at 10.0.0.1:8080: its replica is ready",
    ),
    "the server of a replica without an answer yet stays": (
        *(first_of(WEB), seen(replica(WEB, 1, **UNREADY), routing=routing(server(ONE))), NOTHING),
    ),
    "new routes before their servers": (
        first_of(WEB),
        seen(ONE, routing=routing(routing_hash="old", backends=frozenset())),
        lines(
            "#1 write routes of web and reload: HAProxy runs routes old, the services need routes1",
            f"#2 after #1 add {SERVER}-1 at 10.0.0.1:8080: its replica is ready",
        ),
    ),
    "HAProxy is away": (first_of(WEB), seen(ONE, routing=None), NOTHING),
    "created and never started": (
        first_of(WEB),
        seen(replica(WEB, 1, state=ContainerState.CREATED, **NEVER_STARTED)),
        f"#1 start p-web-{V}-1: created and never started",
    ),
    "a start that was interrupted": (
        first_of(WEB),
        seen(replica(WEB, 1, state=ContainerState.PENDING, is_half_started=True, **NEVER_STARTED)),
        f"#1 start p-web-{V}-1: its start was interrupted",
    ),
    "a server without a container": (
        desired(WEB, web=0),
        seen(routing=routing(server(replica(WEB, 9), state=ServerState.MAINT))),
        f"#1 delete {SERVER}-9: no container of that name exists",
    ),
    "a container that Compose started": (
        first_of(WEB),
        seen(ONE, strays=(StrayContainer(id="x", name="p-web-1", service="web"),)),
        "#1 remove p-web-1: started by Compose, which pins no GPU: use `pierhead scale web ...` instead",
    ),
    "a service that was removed": (
        Desired(project="p"),
        observed(ONE, routing=routing(server(ONE))),
        lines(
            f"#1 set {SERVER}-1 to drain: the compose files have no service web any more",
            f"#2 drain p-web-{V}-1: the compose files have no service web any more",
        ),
    ),
    "scale down: the highest number": (
        first_of(WEB),
        seen(ONE, TWO),
        lines(f"#1 set {SERVER}-2 to drain: {WHY_ONE_LESS}", f"#2 drain p-web-{V}-2: {WHY_ONE_LESS}"),
    ),
    "scale down: the fewest requests": (
        first_of(RANKER),
        observed(replica(RANKER, 1, ongoing=2), replica(RANKER, 2, ongoing=7), specs=(RANKER,)),
        f"#1 drain p-ranker-{RV}-1: {WHY_ONE_LESS}",
    ),
}


@pytest.mark.parametrize(("wanted", "world", "expected"), PICTURES.values(), ids=PICTURES)
def test_the_plan_for_a_picture_of_the_world(wanted: Desired, world: Observed, expected: str) -> None:
    assert text(wanted, world) == expected


def test_requests_wait_for_every_service_that_is_not_switched_off() -> None:
    off = replace(desired(WEB, web=0), switched_off=frozenset({"web"}))
    world = seen(routing=routing())
    assert text(off, world) == "#1 let no request wait for web: 0 wanted, and no request wakes it"
    closed = replace(world, routing=routing(closed=frozenset({"svc_web"})))
    assert text(off, closed) == NOTHING
    assert text(desired(WEB, web=0), closed) == "#1 let requests wait for web: replicas are wanted again"
    assert text(desired(WEB, web=0), world) == NOTHING, "it sleeps, and a request may wake it"
    closing = SetWaitingRoom(target="web", service="web", backend="svc_web", is_open=False)
    for unready in (
        replace(world, routing=None),
        replace(world, routing=routing(backends=frozenset())),
        replace(world, in_progress=(closing,)),
        replace(world, in_progress=(RELOAD,)),
    ):
        assert text(off, unready) == NOTHING
    other_routes = replace(world, routing=routing(routing_hash="older"))
    assert "wait for web" not in text(off, other_routes), "a new worker begins with all of them open"


def test_the_server_of_a_replica_that_moved_is_replaced() -> None:
    moved = replica(WEB, 1, ip="10.0.0.77")
    world = seen(moved, routing=routing(server(ONE)))
    assert text(first_of(WEB), world).splitlines()[-1] == (
        f"#4 after #3 add server svc_web/p-web-{V}-1 at 10.0.0.77:8080: its replica is ready"
    )


@pytest.mark.parametrize("health", [ReplicaHealth.READY, ReplicaHealth.UNKNOWN], ids=["ready", "not ready yet"])
def test_calls_at_what_a_replica_replaced_have_a_moment_to_end(health: ReplicaHealth) -> None:
    """The engine has given up its node, and the edges reach it: it gets no call any more, and then it goes."""
    moved, name = replica(WEB, 1, ip="10.0.0.77", health=health), f"svc_web/p-web-{V}-1"
    first = text(first_of(WEB), seen(moved, routing=routing(server(ONE, sessions=2))))
    assert f"set server {name} to maint" in first
    assert "delete" not in first
    out = server(ONE, sessions=2, state=ServerState.MAINT)
    then = text(first_of(WEB), seen(moved, routing=routing(out)))
    assert f"end the sessions of {name}" in then
    assert f"delete server {name}" in then


@pytest.mark.parametrize(
    "successor",
    [
        replica(WEB, 1, health=ReplicaHealth.UNKNOWN),
        replica(WEB, 1, state=ContainerState.CREATED, health=ReplicaHealth.UNKNOWN, started_at=None, ip=None),
    ],
    ids=["running", "created"],
)
def test_the_server_of_an_earlier_container_of_that_name_goes_at_once(successor: ReplicaContainer) -> None:
    """Its address may be another service's by now, and a replica of that service would answer the check."""
    world = seen(successor, routing=routing(server(replica(WEB, 1, ip="10.0.0.9"))))
    assert f"delete server svc_web/p-web-{V}-1" in text(first_of(WEB), world)


# ---------------------------------------------------------------------------------------------- replicas that leave


QUIET = "nothing in flight"
PATIENT = gpu_service(graceful_shutdown_wait_loop_s=5.0)


LEAVING: dict[str, tuple[ServiceSpec, Observed, str]] = {
    "idle": (RANKER, leaving(RANKER), f"#1 send SIGTERM to p-ranker-{RV}-2: {WHY_ONE_LESS}; {QUIET}"),
    "it has calls": (WEB, leaving(WEB, ongoing=3, sessions=3), NOTHING),
    "it has WebSockets alone": (
        WEB,
        leaving(WEB, ongoing=3, lasting=3, sessions=3),
        "in flight but 3 WebSockets or endless",
    ),
    "it has WebSockets and a call": (WEB, leaving(WEB, ongoing=3, lasting=2, sessions=3), NOTHING),
    "counted before callers knew": (RANKER, leaving(RANKER, ongoing_at=NOW - 0.9), NOTHING),
    "counted before the wait was over": (PATIENT, leaving(PATIENT, 5, ongoing_at=NOW - 0.1), NOTHING),
    "the wait is over": (PATIENT, leaving(PATIENT, 5), QUIET),
    "the wait is over and it has a call": (PATIENT, leaving(PATIENT, 5, ongoing=1), NOTHING),
    "not ready": (PATIENT, leaving(PATIENT, health=ReplicaHealth.UNKNOWN), "not ready, so it has no requests"),
    "foreign, drains for 2 s": (FOREIGN, leaving(FOREIGN, 1.9, ongoing=None), NOTHING),
    "foreign": (FOREIGN, leaving(FOREIGN, 2.1, ongoing=None), "HAProxy counts nothing in flight"),
    "foreign, inside": (UNROUTED, leaving(UNROUTED, 2.1, ongoing=None), "it has drained for 2 s"),
    "busy": (WEB, leaving(WEB, 20, ongoing=3), "still busy after 20 s (graceful_shutdown_timeout_s)"),
    "HAProxy cannot be asked": (WEB, replace(leaving(WEB), routing=None), NOTHING),
    "in its grace": (WEB, leaving(WEB, stopping_since=NOW - 29, reported_draining=True), NOTHING),
    "its grace is over": (WEB, leaving(WEB, stopping_since=NOW - 31), "send SIGKILL"),
    "never ready": (WEB, leaving(WEB, 6, health=ReplicaHealth.UNKNOWN, stopping_since=NOW - 6), "SIGKILL"),
    # A controller that has just started has never seen it ready.
    "not ready, and drains": (
        *(WEB, leaving(WEB, 6, health=ReplicaHealth.UNKNOWN, stopping_since=NOW - 6, reported_draining=True), NOTHING),
    ),
    "missed SIGTERM, sent again": (WEB, leaving(WEB, 6, stopping_since=NOW - 6), "send SIGTERM"),
    "not sent a third time": (WEB, leaving(WEB, 11, stopping_since=NOW - 11), NOTHING),
    "foreign, never sent again": (FOREIGN, leaving(FOREIGN, 6, stopping_since=NOW - 6), NOTHING),
    "stopped: out of HAProxy, then removed": (
        WEB,
        leaving(WEB, state=ContainerState.EXITED, exit_code=0, stopping_since=NOW - 1),
        lines(
            f"#1 set {SERVER}-2 to maint: {WHY_ONE_LESS}",
            f"#2 after #1 delete {SERVER}-2: {WHY_ONE_LESS}",
            f"#3 after #2 remove p-web-{V}-2: {WHY_ONE_LESS}",
        ),
    ),
}


@pytest.mark.parametrize(("spec", "world", "expected"), LEAVING.values(), ids=LEAVING)
def test_a_replica_that_leaves_is_drained_and_removed(spec: ServiceSpec, world: Observed, expected: str) -> None:
    made = plan(first_of(spec), world, NOW)
    assert expected in str(made)
    if expected == NOTHING:
        assert made.next_look_s is not None, "the replica has not left yet"


@pytest.mark.parametrize(
    ("work", "is_waited_for"),
    [
        ({"sessions": 7}, True),
        ({"queued": 1}, True),
        ({"ongoing": 3, "ongoing_at": NOW}, True),
        ({}, False),
        ({"sessions": 7, "health": ReplicaHealth.UNKNOWN}, False),
    ],
    ids=["sessions", "queued", "in flight", "idle", "never ready"],
)
def test_a_draining_replica_that_is_silent_may_finish_its_requests(work: dict[str, Any], is_waited_for: bool) -> None:
    silent = {"health": ReplicaHealth.FAILED, "ongoing": None, "ongoing_at": None, **work}
    assert (text(first_of(WEB), leaving(WEB, 5, **silent)) == NOTHING) is is_waited_for
    assert "send SIGTERM" in text(first_of(WEB), leaving(WEB, 5, failed=True, **silent)), (
        "it goes because it has failed"
    )
    assert "still busy after 20 s" in text(first_of(WEB), leaving(WEB, 21, **silent))
    assert text(first_of(WEB), replace(leaving(WEB, 5, **silent), routing=None)) == NOTHING or work.get("health")


@pytest.mark.parametrize(
    ("wanted", "marks", "expected"),
    [(1, {}, "to ready"), (0, {}, "to drain"), (0, {"draining_since": NOW - 5}, "to drain")],
    ids=["stays", "goes", "drains already"],
)
def test_a_server_of_some_edges_is_made_the_same_everywhere(wanted: int, marks: dict[str, Any], expected: str) -> None:
    one = replica(WEB, 1)
    retirements = retirement(one, **marks) if marks else {}
    world = observed(one, retirements=retirements, routing=routing(server(one, state=ServerState.PARTLY)))
    assert f"set server svc_web/{one.name} {expected}" in text(desired(WEB, web=wanted), world)
    assert "SIGTERM" not in text(desired(WEB, web=wanted), world)


MADE_WITH = {"graceful_shutdown_timeout_s": 305.0, "stop_grace_period_s": 315.0}
QUICK = replace(NEW, graceful_shutdown_timeout_s=6.0, stop_grace_period_s=16.0)


@pytest.mark.parametrize("wanted", [desired(QUICK, web=0), Desired(project="p")], ids=["other version", "removed"])
def test_a_replica_has_at_least_the_time_that_it_was_made_with(wanted: Desired) -> None:
    """The new version may allow less time than a request takes that the old replica has accepted."""
    busy = replica(WEB, 1, ongoing=1, **MADE_WITH)

    def after(seconds: float, container: ReplicaContainer = busy, **changes: float) -> str:
        marks = retirement(container, draining_since=NOW - seconds, **changes)
        return text(wanted, observed(container, specs=(QUICK,), retirements=marks, routing=routing()))

    assert after(304) == NOTHING
    assert "still busy after 305 s" in after(306)
    assert after(320, stopping_since=NOW - 314) == NOTHING
    assert "send SIGKILL" in after(321, stopping_since=NOW - 316)
    if wanted.services:
        own = replica(QUICK, 1, ongoing=1, **MADE_WITH)
        assert "still busy after 6 s" in after(7, own), "of its own version the files say the last word"


# --------------------------------------------------------------------------------------------- replicas that failed


def test_a_failed_replica_is_replaced() -> None:
    dead = replica(RANKER, 1, state=ContainerState.EXITED, exit_code=137, gpus=("GPU-0",))
    rankers = observed(dead, replica(RANKER, 2, gpus=("GPU-1",)), specs=(RANKER,), gpus=gpus(4))
    assert text(desired(RANKER), rankers) == lines(
        f"#1 remove p-ranker-{RV}-1: {KILLED}",
        f"#2 after #1 create p-ranker-{RV}-1 on GPU-0: 1 of 2 replicas exist",
        f"#3 after #2 start p-ranker-{RV}-1: 1 of 2 replicas exist",
    ), "another one on the same GPU"
    hangs = replica(WEB, 1, health=ReplicaHealth.FAILED, health_detail="no answer within 2 s")
    assert text(desired(WEB), seen(hangs, TWO, routing=routing(server(ONE), server(TWO)))) == lines(
        f"#1 set {SERVER}-1 to maint: its readiness probe failed: no answer within 2 s",
        f"#2 drain p-web-{V}-1: its readiness probe failed: no answer within 2 s",
        f"#3 create p-web-{V}-3: 1 of 2 replicas exist",
        f"#4 after #3 start p-web-{V}-3: 1 of 2 replicas exist",
    ), "out of rotation at once"


def test_failures_in_a_row_wait_longer_each_time() -> None:
    assert [backoff_s(failures) for failures in (0, 1, 2, 3, 5, 9, 1000)] == [0, 0, 1, 2, 8, 60, 60]
    record = FailureRecord(count=4, last_at=NOW - 1, detail="exited by itself with code 3")
    made = plan(first_of(WEB), seen(failures={("web", V): record}), NOW)
    assert str(made) == "pending web: failed 4 times in a row, next try in 3 s; last: exited by itself with code 3"
    assert made.next_look_s == pytest.approx(3.0)


def test_the_failure_that_is_being_cleared_away_counts_for_the_next_start() -> None:
    """The store counts a failure when its container is gone. The planner counts it before, and not twice."""
    dead = replica(WEB, 1, state=ContainerState.EXITED, exit_code=1, ip=None, started_at=NOW - 5)
    its: dict[str, Any] = {"target": dead.name, "service": "web", "container_id": dead.id, "version": V}
    remove = RemoveContainer(**its, failed=True, began_at=NOW - 5, cause="test")

    def after(count: int, last_at: float, *containers: ReplicaContainer, **changes: Any) -> str:
        failures = {("web", V): FailureRecord(count, last_at, "code 1")}
        world = seen(*containers, failures=failures, **changes)
        return text(first_of(WEB), world).rpartition("\n")[2]

    waits = "pending web: failed 6 times in a row, next try in 16 s; last: "
    assert after(5, NOW - 10, dead, in_progress=(remove,)) == f"{waits}test"
    assert after(5, NOW - 10, in_progress=(remove,)) == f"{waits}test", "gone, and not counted yet"
    assert after(6, NOW, in_progress=(remove,)) == f"{waits}code 1", "counted, and not twice"
    assert "start" in after(0, NOW - 10, dead), "none after the first"


# ------------------------------------------------------------------------------------------- what the machine has left

GIB = 1024**3
SMALL = Machine(cores=2, memory_bytes=24 * GIB, free_bytes=20 * GIB, most_processes=32768, processes=900, load=0.5)
TAKES = {"web": Footprint(memory_bytes=100 * 1024**2, processes=20)}
BUSY = "this machine has no time for a start: "
MEMORY = "of 24 GiB of memory are free on this machine, which keeps 1.1 GiB: ask for fewer, or free memory"
PROCESSES = (
    "one replica takes 20 and 1697 of 32768 process ids are free on this machine, which keeps 1638: ask for fewer, or "
    "raise kernel.pid_max and kernel.threads-max"
)
KEPT = 24 * GIB // 20
MACHINES: dict[str, tuple[Machine | None, int, str]] = {
    "not known: a Swarm": (None, 10, ""),
    "enough of all": (SMALL, 8, "8 replicas are starting, and at most 8 do at a time on 2 cores"),
    "more cores": (replace(SMALL, cores=16), 10, ""),
    "memory for three": (
        replace(SMALL, free_bytes=KEPT + 301 * 1024**2, footprints=TAKES),
        3,
        f"one replica takes 100 MiB and 1.4 GiB {MEMORY}",
    ),
    "no memory, and no replica was measured": (replace(SMALL, free_bytes=1 * GIB), 0, f"1 GiB {MEMORY}"),
    "process ids for two": (replace(SMALL, processes=32768 - 1697, footprints=TAKES), 2, PROCESSES),
    "no time": (replace(SMALL, load=166.0), 0, f"{BUSY}166 processes want to run on 2 cores"),
    "memory is short": (
        replace(SMALL, stalled_percent=44.0),
        0,
        f"{BUSY}processes waited for memory in 44 % of the last 10 s",
    ),
}


@pytest.mark.parametrize(("machine", "starts", "pending"), MACHINES.values(), ids=MACHINES)
def test_a_start_waits_for_room_and_time_on_the_machine(machine: Machine | None, starts: int, pending: str) -> None:
    found = plan(desired(WEB, web=12), seen(ONE, TWO, machine=machine), NOW)
    assert sum(isinstance(step.action, CreateContainer) for step in found.steps) == starts
    assert {one.reason for one in found.pending} == ({pending} if pending else set())
    assert len(found.pending) == 10 - starts


def test_while_some_start_it_is_said_how_many_will_fit() -> None:
    found = plan(desired(WEB, web=1000), seen(ONE, TWO, machine=replace(SMALL, footprints=TAKES)), NOW)
    words = "on 2 cores; this machine has room for about 184 of the 990 that are missing"
    assert {one.reason.partition(" at a time ")[2] for one in found.pending} == {words}


@pytest.mark.parametrize(
    ("reserved", "free"), [(900 * GIB, 20 * GIB), (0, KEPT - GIB)], ids=["it asks for more", "far too little is free"]
)
def test_no_replica_leaves_for_one_that_would_find_no_memory_even_then(reserved: int, free: int) -> None:
    new = replace(NEW, container={"HostConfig": {"MemoryReservation": reserved}})
    found = plan(desired(new, web=2), seen(ONE, TWO, machine=replace(SMALL, free_bytes=free, footprints=TAKES)), NOW)
    assert found.steps == ()
    assert [one.has_no_place for one in found.pending] == [True]


def test_no_more_are_started_while_those_before_do_not_become_ready() -> None:
    """As where the kernel's table of neighbours is full: they run, and nothing reaches them."""
    late = [replica(WEB, number, health=ReplicaHealth.UNKNOWN, started_at=NOW - 300) for number in range(3, 11)]
    found = plan(desired(WEB, web=1000), seen(ONE, TWO, *late, machine=SMALL), NOW)
    assert not [step for step in found.steps if isinstance(step.action, CreateContainer)]
    assert {one.reason for one in found.pending} == {
        "8 of its replicas are not ready yet: no more are started before that"
    }
    others = desired(WEB, RANKER, web=1000, ranker=1)
    started = plan(others, observed(ONE, TWO, *late, specs=(WEB, RANKER), gpus=gpus(1), machine=SMALL), NOW).steps
    assert [step.action.service for step in started if isinstance(step.action, CreateContainer)] == ["ranker"]


def test_without_time_one_replica_starts_where_there_is_none_or_one_is_replaced() -> None:
    busy = replace(SMALL, load=166.0)
    begins = desired(WEB, web=12)
    started = [step.action for step in plan(begins, seen(machine=busy), NOW).steps]
    assert sum(isinstance(action, CreateContainer) for action in started) == 1
    rolls = plan(desired(NEW, web=2), seen(ONE, TWO, machine=busy), NOW)
    assert sum(isinstance(step.action, CreateContainer) for step in rolls.steps) == 1
    coming = replica(NEW, 3, health=ReplicaHealth.UNKNOWN, started_at=NOW - 5)
    assert not plan(desired(NEW, web=2), seen(ONE, TWO, coming, machine=busy), NOW).steps


def test_a_rollout_takes_one_after_the_other_where_there_is_no_memory_for_one_more() -> None:
    full = replace(SMALL, free_bytes=KEPT + 50 * 1024**2, footprints=TAKES)
    assert text(desired(NEW, web=2), seen(ONE, TWO, machine=full)).startswith(
        f"#1 set server svc_web/{TWO.name} to drain: its version is not {NV}; there is no room for one more, "
        "so they are replaced one by one"
    )


# ---------------------------------------------------------------------------------------------- images, GPUs, versions


NO_IMAGE = "pending web: image image/web is not on this machine"
CANNOT_START: dict[str, tuple[ServiceSpec, Observed, str]] = {
    "an image to build": (
        *(WEB, seen(images={WEB.image: None}), f"{NO_IMAGE}: build it (`docker compose build web`)"),
    ),
    "an image to pull": (
        replace(WEB, has_build=False),
        seen(images={WEB.image: None}),
        lines(
            "#1 pull image/web for web: a replica is to be started and the image is not on this machine",
            f"{NO_IMAGE}: it is being pulled",
        ),
    ),
    "no GPU": (
        RANKER,
        observed(specs=(RANKER,)),
        "pending ranker: it asks for 1 GPU and this machine offers none: check the driver and CDI (`docker info`)",
    ),
    "a GPU that does not exist": (
        gpu_service(gpu=GpuRequest(count=1, device_ids=("GPU-9",))),
        observed(specs=(RANKER,), gpus=gpus(2)),
        "pending ranker: it asks for GPU GPU-9, which this machine does not have; it has GPU-0, GPU-1",
    ),
}


@pytest.mark.parametrize(("spec", "world", "expected"), CANNOT_START.values(), ids=CANNOT_START)
def test_a_replica_that_cannot_start_says_why(spec: ServiceSpec, world: Observed, expected: str) -> None:
    assert text(first_of(spec), world) == expected


def test_a_new_version_starts_one_more_replica_and_each_old_one_leaves_for_a_new_one_that_is_ready() -> None:
    first = text(desired(NEW), observed(ONE, TWO, specs=(NEW,)))
    assert first == lines(
        f"#1 create p-web-{NV}-3: version {NV} replaces {V}",
        f"#2 after #1 start p-web-{NV}-3: version {NV} replaces {V}",
    )
    ready = text(desired(NEW), observed(ONE, TWO, replica(NEW, 3), specs=(NEW,)))
    assert ready.count("drain p-web") == 1
    assert f"drain p-web-{V}-2" in ready
