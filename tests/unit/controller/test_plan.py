"""The planner, example by example: a picture of the world, then the plan as `make plan` prints it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controller.model.actions import (
    BeginRetirement,
    CreateContainer,
    PullImage,
    RemoveContainer,
    SetWaitingRoom,
    WriteRouting,
)
from controller.model.desired import Desired
from controller.model.observed import Observed
from controller.model.plan import Plan
from controller.model.spec import GpuRequest
from controller.model.world import (
    ContainerState,
    FailureRecord,
    Gpu,
    Health,
    ReplicaContainer,
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

KILLED = "ended by signal 9: somebody killed it, or the kernel for want of memory (`dmesg` knows)"
WEB = service()
V = version(WEB)
RANKER = gpu_service()
RV = version(RANKER)


def made(wanted: Desired, world: Observed) -> Plan:
    return plan(wanted, world, NOW)


def text(wanted: Desired, world: Observed) -> str:
    return str(made(wanted, world))


def lines(*expected: str) -> str:
    return "\n".join(expected)


def test_converged_world_needs_nothing() -> None:
    assert text(desired(WEB), observed(replica(WEB, 1), replica(WEB, 2), specs=(WEB,))) == "nothing to do"


def test_first_start_creates_numbered_replicas() -> None:
    assert text(desired(WEB), observed(specs=(WEB,))) == lines(
        f"#1 create p-web-{V}-1: 0 of 2 replicas exist",
        f"#2 after #1 start p-web-{V}-1: 0 of 2 replicas exist",
        f"#3 create p-web-{V}-2: 0 of 2 replicas exist",
        f"#4 after #3 start p-web-{V}-2: 0 of 2 replicas exist",
    )


def test_ready_replica_gets_its_server_and_a_starting_one_does_not() -> None:
    world = observed(replica(WEB, 1), replica(WEB, 2, health=Health.UNKNOWN), specs=(WEB,), routing=routing())
    assert text(desired(WEB), world) == f"#1 add server svc_web/p-web-{V}-1 at 10.0.0.1:8080: its replica is ready"


def test_nobody_waits_for_a_service_that_is_switched_off() -> None:
    off = replace(desired(WEB, web=0), switched_off=frozenset({"web"}))
    world = observed(specs=(WEB,), routing=routing())
    assert text(off, world) == "#1 let no request wait for web: 0 wanted, and no request wakes it"
    closed = replace(world, routing=routing(closed=frozenset({"svc_web"})))
    assert text(off, closed) == "nothing to do"
    assert text(desired(WEB, web=0), closed) == "#1 let requests wait for web: it shall have replicas again"
    assert text(desired(WEB, web=0), world) == "nothing to do", "it sleeps, and a request may wake it"


def test_waiting_rooms_are_left_alone_while_haproxy_cannot_be_told() -> None:
    off = replace(desired(WEB, web=0), switched_off=frozenset({"web"}))
    world = observed(specs=(WEB,), routing=routing())
    closing = SetWaitingRoom(target="web", service="web", backend="svc_web", is_open=False)
    for unready in (
        replace(world, routing=None),
        replace(world, routing=routing(backends=frozenset())),
        replace(world, in_progress=(closing,)),
        replace(world, in_progress=(WriteRouting(target="routing", services=(), routing_hash="0"),)),
    ):
        assert text(off, unready) == "nothing to do"
    other_routes = replace(world, routing=routing(routing_hash="older"))
    assert "wait for web" not in text(off, other_routes), "a new worker begins with all of them open"


def test_server_of_a_replica_that_could_not_be_asked_yet_stays() -> None:
    unasked = replica(WEB, 1, health=Health.UNKNOWN)
    world = observed(unasked, specs=(WEB,), routing=routing(server(unasked)))
    assert text(desired(WEB, web=1), world) == "nothing to do"


def test_new_routes_are_written_before_servers_are_added_to_them() -> None:
    world = observed(replica(WEB, 1), specs=(WEB,), routing=routing(routing_hash="old", backends=frozenset()))
    assert text(desired(WEB, web=1), world) == lines(
        "#1 write routes of web and reload: HAProxy runs routes old, the services need routes1",
        f"#2 after #1 add server svc_web/p-web-{V}-1 at 10.0.0.1:8080: its replica is ready",
    )


def test_a_backend_that_exists_does_not_wait_for_a_reload() -> None:
    world = observed(replica(WEB, 1), specs=(WEB,), routing=routing(routing_hash="old"))
    assert text(desired(WEB, web=1), world).splitlines()[1].startswith("#2 add server")


def test_haproxy_away_plans_no_routing_and_everything_else() -> None:
    world = observed(replica(WEB, 1), specs=(WEB,), routing=None)
    assert "server" not in text(desired(WEB), world)
    assert f"create p-web-{V}-2" in text(desired(WEB), world)


def test_restarted_haproxy_gets_every_server_back() -> None:
    world = observed(replica(WEB, 1), replica(WEB, 2), specs=(WEB,), routing=routing())
    assert text(desired(WEB), world).count("add server") == 2


def test_scale_down_drains_the_highest_number() -> None:
    world = observed(replica(WEB, 1), replica(WEB, 2), specs=(WEB,))
    assert text(desired(WEB, web=1), world) == lines(
        f"#1 set server svc_web/p-web-{V}-2 to drain: 2 replicas, 1 wanted",
        f"#2 drain p-web-{V}-2: 2 replicas, 1 wanted",
    )


def test_scale_down_takes_the_one_with_the_least_to_finish() -> None:
    web = service()
    world = observed(replica(web, 1, ongoing=7), replica(web, 2, ongoing=2), replica(web, 3, ongoing=9), specs=(web,))
    retired = [
        step.action.target
        for step in plan(desired(web, web=2), world, NOW).steps
        if isinstance(step.action, BeginRetirement)
    ]
    assert retired == [replica(web, 2).name]


def test_scale_down_takes_the_one_that_is_not_ready_first() -> None:
    world = observed(replica(WEB, 1, health=Health.UNKNOWN), replica(WEB, 2), specs=(WEB,))
    assert text(desired(WEB, web=1), world) == f"#1 drain p-web-{V}-1: 2 replicas, 1 wanted"


def test_draining_replica_is_waited_for_while_it_has_calls() -> None:
    leaving = replica(WEB, 2, ongoing=3)
    world = observed(
        replica(WEB, 1),
        leaving,
        specs=(WEB,),
        retirements=retirement(leaving),
        routing=routing(server(replica(WEB, 1)), server(leaving, state=ServerState.DRAIN, sessions=3)),
    )
    result = made(desired(WEB, web=1), world)
    assert str(result) == "nothing to do"
    assert result.next_look_s is not None
    assert result.next_look_s <= 0.25


def test_a_count_read_before_callers_knew_does_not_end_the_drain() -> None:
    leaving = replica(RANKER, 2, ongoing=0, ongoing_at=NOW - 0.9)
    world = observed(replica(RANKER, 1), leaving, specs=(RANKER,), retirements=retirement(leaving))
    assert text(desired(RANKER, ranker=1), world) == "nothing to do"


def test_drained_replica_is_told_to_stop() -> None:
    leaving = replica(RANKER, 2)
    world = observed(replica(RANKER, 1), leaving, specs=(RANKER,), retirements=retirement(leaving))
    assert text(desired(RANKER, ranker=1), world) == (
        f"#1 send SIGTERM to p-ranker-{RV}-2: 2 replicas, 1 wanted; nothing in flight"
    )


def test_a_replica_stays_as_long_as_its_service_says() -> None:
    patient = gpu_service(graceful_shutdown_wait_loop_s=5.0)
    leaving = replica(patient, 2, ongoing_at=NOW - 0.1)
    stays = retirement(leaving, draining_since=NOW - 5)
    early = observed(replica(patient, 1), leaving, specs=(patient,), retirements=stays)
    result = made(desired(patient, ranker=1), early)
    assert str(result) == "nothing to do", "callers may have begun something since the count was read"
    assert result.next_look_s is not None
    late = observed(replica(patient, 1), replace(leaving, ongoing_at=NOW), specs=(patient,), retirements=stays)
    assert text(desired(patient, ranker=1), late).endswith("; nothing in flight")
    busy = observed(
        replica(patient, 1), replace(leaving, ongoing_at=NOW, ongoing=1), specs=(patient,), retirements=stays
    )
    assert text(desired(patient, ranker=1), busy) == "nothing to do"


def test_how_long_a_replica_stays_counts_for_foreign_ones_too() -> None:
    foreign = service(managed=False, graceful_shutdown_wait_loop_s=5.0)
    leaving = replica(foreign, 2, ongoing=None)
    drained = routing(server(replica(foreign, 1)), server(leaving, state=ServerState.DRAIN))
    world = observed(replica(foreign, 1), leaving, specs=(foreign,), retirements=retirement(leaving), routing=drained)
    assert str(plan(desired(foreign, web=1), world, NOW + 3.9)) == "nothing to do"
    assert "nothing in flight that HAProxy knows of" in str(plan(desired(foreign, web=1), world, NOW + 4.1))


def test_nobody_has_to_stay_who_does_not_serve() -> None:
    patient = gpu_service(graceful_shutdown_wait_loop_s=5.0)
    leaving = replica(patient, 2, health=Health.UNKNOWN)
    world = observed(replica(patient, 1), leaving, specs=(patient,), retirements=retirement(leaving))
    assert "it is not ready, so it has no requests" in text(desired(patient, ranker=1), world)


def test_drain_has_a_deadline() -> None:
    leaving = replica(WEB, 2, ongoing=3)
    world = observed(replica(WEB, 1), leaving, specs=(WEB,), retirements=retirement(leaving, draining_since=NOW - 20))
    assert "still busy after 20 s (graceful_shutdown_timeout_s)" in text(desired(WEB, web=1), world)


def test_a_drain_is_not_judged_while_haproxy_cannot_be_asked() -> None:
    leaving = replica(WEB, 2)
    world = observed(replica(WEB, 1), leaving, specs=(WEB,), retirements=retirement(leaving), routing=None)
    assert text(desired(WEB, web=1), world) == "nothing to do"


def test_foreign_replica_without_a_count_drains_for_two_seconds() -> None:
    foreign = service(managed=False)
    leaving = replica(foreign, 2, ongoing=None)
    drained = routing(server(replica(foreign, 1)), server(leaving, state=ServerState.DRAIN))
    world = observed(replica(foreign, 1), leaving, specs=(foreign,), retirements=retirement(leaving), routing=drained)
    assert text(desired(foreign, web=1), world) == "nothing to do"
    later = plan(desired(foreign, web=1), world, NOW + 1.1)
    assert "nothing in flight that HAProxy knows of" in str(later)


def test_replica_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    leaving = replica(WEB, 2)
    world = observed(replica(WEB, 1), leaving, specs=(WEB,), retirements=retirement(leaving, stopping_since=NOW - 31))
    assert "send SIGKILL" in text(desired(WEB, web=1), world)
    early = observed(replica(WEB, 1), leaving, specs=(WEB,), retirements=retirement(leaving, stopping_since=NOW - 29))
    assert "SIGKILL" not in text(desired(WEB, web=1), early)


def test_stopped_replica_leaves_haproxy_before_its_container_goes() -> None:
    gone = replica(WEB, 2, state=ContainerState.EXITED, exit_code=0)
    world = observed(
        replica(WEB, 1),
        gone,
        specs=(WEB,),
        retirements=retirement(gone, stopping_since=NOW - 1),
        routing=routing(server(replica(WEB, 1)), server(gone, state=ServerState.DRAIN)),
    )
    assert text(desired(WEB, web=1), world) == lines(
        f"#1 set server svc_web/p-web-{V}-2 to maint: 2 replicas, 1 wanted",
        f"#2 after #1 delete server svc_web/p-web-{V}-2: 2 replicas, 1 wanted",
        f"#3 after #2 remove p-web-{V}-2: 2 replicas, 1 wanted",
    )


def test_killed_replica_is_removed_and_replaced_on_the_same_gpu() -> None:
    dead = replica(RANKER, 1, state=ContainerState.EXITED, exit_code=137, gpus=("GPU-0",))
    alive = replica(RANKER, 2, gpus=("GPU-1",))
    world = observed(dead, alive, specs=(RANKER,), gpus=gpus(4))
    assert text(desired(RANKER), world) == lines(
        f"#1 remove p-ranker-{RV}-1: {KILLED}",
        f"#2 after #1 create p-ranker-{RV}-1 on GPU-0: 1 of 2 replicas exist",
        f"#3 after #2 start p-ranker-{RV}-1: 1 of 2 replicas exist",
    )


def test_out_of_memory_is_named() -> None:
    dead = replica(WEB, 1, state=ContainerState.EXITED, exit_code=137, oom_killed=True)
    assert "out of memory" in text(desired(WEB, web=1), observed(dead, specs=(WEB,)))


def test_hung_replica_leaves_rotation_at_once_and_is_replaced() -> None:
    hung = replica(WEB, 1, health=Health.FAILED, health_detail="no answer within 2 s")
    world = observed(hung, replica(WEB, 2), specs=(WEB,), routing=routing(server(hung), server(replica(WEB, 2))))
    cause = "its readiness probe failed: no answer within 2 s"
    assert text(desired(WEB), world) == lines(
        f"#1 set server svc_web/p-web-{V}-1 to maint: {cause}",
        f"#2 drain p-web-{V}-1: {cause}",
        f"#3 create p-web-{V}-3: 1 of 2 replicas exist",
        f"#4 after #3 start p-web-{V}-3: 1 of 2 replicas exist",
    )


def test_hung_replica_keeps_its_gpu_until_it_is_gone() -> None:
    hung = replica(RANKER, 1, health=Health.FAILED, gpus=("GPU-0",))
    world = observed(hung, specs=(RANKER,), gpus=gpus(1))
    assert made(desired(RANKER, ranker=1), world).pending[0].reason == (
        "it asks for 1 GPU and 0 of 1 are free: 1 held by ranker"
    )


def test_replica_that_never_gets_ready_fails_at_its_deadline() -> None:
    slow = replica(WEB, 1, health=Health.UNKNOWN, started_at=NOW - 1801, health_detail="503 from /readyz")
    assert "not ready 1800 s after its start (startup.deadline_s): 503 from /readyz" in text(
        desired(WEB, web=1), observed(slow, specs=(WEB,))
    )


def test_each_replica_has_a_gpu_of_its_own_and_the_fifth_waits_with_a_reason() -> None:
    result = made(desired(RANKER, ranker=5), observed(specs=(RANKER,), gpus=gpus(4)))
    creates = [step.action for step in result.steps if isinstance(step.action, CreateContainer)]
    assert [create.gpus[0].uuid for create in creates] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    assert str(result).splitlines()[-1] == ("pending ranker: it asks for 1 GPU and 0 of 4 are free: 4 held by ranker")


def test_foreign_holders_of_gpus_are_respected_and_named() -> None:
    world = observed(specs=(RANKER,), gpus=gpus(2), foreign_gpu_holders={"GPU-0": "ollama"})
    result = made(desired(RANKER), world)
    assert [p.reason for p in result.pending] == [
        "it asks for 1 GPU and 0 of 2 are free: 1 held by container ollama, 1 held by ranker"
    ]


def test_no_gpu_at_all() -> None:
    assert "this machine offers none" in text(desired(RANKER, ranker=1), observed(specs=(RANKER,)))


def test_device_ids_that_do_not_exist_are_named() -> None:
    picky = gpu_service(gpu=GpuRequest(count=1, device_ids=("GPU-9",)))
    assert text(desired(picky, ranker=1), observed(specs=(picky,), gpus=gpus(2))) == (
        "pending ranker: it asks for GPU GPU-9, which this machine does not have; it has GPU-0, GPU-1"
    )


def test_creation_in_progress_holds_its_number_and_its_gpu() -> None:
    busy = CreateContainer(
        target=f"p-ranker-{RV}-1",
        service="ranker",
        version=RV,
        number=1,
        gpus=(Gpu(uuid="GPU-0"),),
        spec=RANKER,
        cause="x",
    )
    world = observed(specs=(RANKER,), gpus=gpus(4), in_progress=(busy,))
    assert text(desired(RANKER), world) == lines(
        f"#1 create p-ranker-{RV}-2 on GPU-1: 1 of 2 replicas exist",
        f"#2 after #1 start p-ranker-{RV}-2: 1 of 2 replicas exist",
    )


def test_a_replacement_in_progress_counts_although_its_predecessor_has_its_name() -> None:
    gone = replica(WEB, 2, state=ContainerState.EXITED, exit_code=137, ip=None)
    remove = RemoveContainer(target=gone.name, service="web", container_id=gone.id, failed=True, cause="test")
    create = CreateContainer(target=gone.name, service="web", version=V, number=2, spec=WEB, cause="test")
    world = observed(replica(WEB, 1), gone, specs=(WEB,), in_progress=(remove, create))
    assert text(desired(WEB), world) == "nothing to do"


def test_one_that_was_never_ready_is_not_waited_for_long() -> None:
    starting = replica(WEB, 2, health=Health.UNKNOWN)
    told = retirement(starting, draining_since=NOW - 6, stopping_since=NOW - 6)
    world = observed(replica(WEB, 1), starting, specs=(WEB,), retirements=told)
    assert "send SIGKILL" in text(desired(WEB, web=1), world)
    drains = replace(starting, reported_draining=True)  # seen so by a new controller, which never saw it ready
    world = observed(replica(WEB, 1), drains, specs=(WEB,), retirements=told)
    assert "send SIGKILL" not in text(desired(WEB, web=1), world)


@pytest.mark.parametrize(("told_s", "again"), [(1, False), (6, True), (11, False)])
def test_one_that_could_not_hear_is_told_again(told_s: float, again: bool) -> None:
    told = replica(WEB, 2)
    marks = retirement(told, draining_since=NOW - told_s, stopping_since=NOW - told_s)
    world = observed(replica(WEB, 1), told, specs=(WEB,), retirements=marks)
    assert ("send SIGTERM" in text(desired(WEB, web=1), world)) is again
    heard = observed(replica(WEB, 1), replace(told, reported_draining=True), specs=(WEB,), retirements=marks)
    assert "SIGTERM" not in text(desired(WEB, web=1), heard)
    foreign = service(managed=False)
    world = observed(replica(foreign, 1), told, specs=(foreign,), retirements=marks)
    assert "SIGTERM" not in text(desired(foreign, web=1), world), "it has no words for that"


def test_replacement_that_waits_for_the_removal_of_its_namesake_is_not_made_twice() -> None:
    dead = replica(WEB, 2, state=ContainerState.EXITED, exit_code=137)
    first = made(desired(WEB), observed(replica(WEB, 1), dead, specs=(WEB,)))
    underway = tuple(step.action for step in first.steps)
    again = observed(replica(WEB, 1), dead, specs=(WEB,), in_progress=underway)
    assert text(desired(WEB), again) == "nothing to do"


def test_replica_that_was_never_ready_is_not_given_a_long_grace() -> None:
    unready = replica(WEB, 2, health=Health.UNKNOWN)
    marks = retirement(unready, stopping_since=NOW - 6)
    world = observed(replica(WEB, 1), unready, specs=(WEB,), retirements=marks)
    assert "send SIGKILL" in text(desired(WEB, web=1), world)


def test_nothing_is_planned_for_a_target_in_progress_and_no_server_during_a_reload() -> None:
    reload = WriteRouting(target="routing", services=(), routing_hash="new", cause="x")
    world = observed(replica(WEB, 1), specs=(WEB,), routing=routing(), in_progress=(reload,))
    assert "server" not in text(desired(WEB, web=1), world)


def test_container_that_was_created_and_never_started_is_started() -> None:
    left = replica(WEB, 1, state=ContainerState.CREATED, health=Health.UNKNOWN, started_at=None, ip=None)
    assert text(desired(WEB, web=1), observed(left, specs=(WEB,))) == (
        f"#1 start p-web-{V}-1: created and never started"
    )


def test_missing_image_says_how_to_get_it() -> None:
    world = observed(specs=(WEB,), images={WEB.image: None})
    assert text(desired(WEB, web=1), world) == (
        "pending web: image image/web is not on this machine: build it (`make build`)"
    )


def test_missing_foreign_image_is_pulled() -> None:
    foreign = service(has_build=False)
    assert text(desired(foreign, web=1), observed(specs=(foreign,), images={foreign.image: None})) == lines(
        "#1 pull image/web for web: a replica is to be started and the image is not on this machine",
        "pending web: image image/web is not on this machine: it is being pulled",
    )


def test_missing_image_does_not_touch_what_runs() -> None:
    world = observed(replica(WEB, 1), replica(WEB, 2), specs=(WEB,), images={WEB.image: None})
    assert text(desired(WEB), world) == "nothing to do"


def test_new_version_surges_by_one_and_the_old_stay() -> None:
    new = replace(WEB, definition_hash="d2")
    world = observed(replica(WEB, 1), replica(WEB, 2), specs=(new,))
    assert text(desired(new), world) == lines(
        f"#1 create p-web-{version(new)}-3: version {version(new)} replaces {V}",
        f"#2 after #1 start p-web-{version(new)}-3: version {version(new)} replaces {V}",
    )


def test_one_old_replica_leaves_for_each_new_one_that_is_ready() -> None:
    new = replace(WEB, definition_hash="d2")
    world = observed(replica(WEB, 1), replica(WEB, 2), replica(new, 3), specs=(new,))
    result = text(desired(new), world)
    assert result.count("drain p-web") == 1
    assert f"drain p-web-{V}-2" in result


def test_a_new_version_that_is_not_ready_displaces_nobody() -> None:
    new = replace(WEB, definition_hash="d2")
    world = observed(replica(WEB, 1), replica(new, 2, health=Health.UNKNOWN), specs=(new,))
    assert text(desired(new, web=1), world) == "nothing to do"


def test_removed_service_is_drained() -> None:
    world = observed(replica(WEB, 1), routing=routing(server(replica(WEB, 1))))
    assert text(Desired(project="p"), world) == lines(
        f"#1 set server svc_web/p-web-{V}-1 to drain: the compose files have no service web any more",
        f"#2 drain p-web-{V}-1: the compose files have no service web any more",
    )


def test_a_replica_of_a_removed_service_has_the_time_that_it_was_made_with() -> None:
    made_with = {"graceful_shutdown_timeout_s": 605.0, "stop_grace_period_s": 615.0}
    busy = replica(WEB, 1, ongoing=1, **made_with)

    def after(seconds: float, **changes: float) -> str:
        leaving = retirement(busy, draining_since=NOW - seconds, **changes)
        return text(Desired(project="p"), observed(busy, retirements=leaving, routing=routing()))

    assert after(600) == "nothing to do"
    assert "still busy after 605 s" in after(606)
    assert after(620, stopping_since=NOW - 614) == "nothing to do"
    assert "send SIGKILL" in after(621, stopping_since=NOW - 616)


@pytest.mark.parametrize(
    ("work", "changes", "is_waited_for"),
    [
        ({"sessions": 7}, {}, True),
        ({"queued": 1}, {}, True),
        ({}, {"ongoing": 3, "ongoing_at": NOW}, True),
        ({}, {}, False),
        ({"sessions": 7}, {"health": Health.UNKNOWN}, False),
    ],
)
def test_one_that_stops_answering_while_it_drains_may_finish_what_it_has(
    work: dict[str, int], changes: dict[str, Any], is_waited_for: bool
) -> None:
    silent = replica(WEB, 1, **{"health": Health.FAILED, "ongoing": None, "ongoing_at": None, **changes})
    servers = routing(server(silent, state=ServerState.DRAIN, **work))

    def after(seconds: float, **mark: Any) -> str:
        leaving = retirement(silent, draining_since=NOW - seconds, **mark)
        return text(desired(WEB, web=0), observed(silent, specs=(WEB,), routing=servers, retirements=leaving))

    assert (after(5) == "nothing to do") is is_waited_for
    assert "send SIGTERM" in after(5, failed=True), "one that goes because it has failed is not waited for"
    assert "still busy after 20 s" in after(21)


def test_the_failure_that_is_being_cleared_away_counts_for_the_next_start() -> None:
    """It is kept when its container is gone; it counts before, also where the world forgets it first."""
    dead = replica(WEB, 1, state=ContainerState.EXITED, exit_code=1, ip=None, started_at=NOW - 5)
    its: dict[str, Any] = {"target": dead.name, "service": "web", "container_id": dead.id, "version": V}
    remove = RemoveContainer(**its, failed=True, began_at=NOW - 5, cause="test")

    def after(count: int, last_at: float, *containers: ReplicaContainer, **changes: Any) -> str:
        failures = {("web", V): FailureRecord(count, last_at, "code 1")}
        world = observed(*containers, specs=(WEB,), failures=failures, **changes)
        return text(desired(WEB, web=1), world).rpartition("\n")[2]

    waits = "pending web: failed 6 times in a row, next try in 16 s; last: "
    assert after(5, NOW - 10, dead, in_progress=(remove,)) == f"{waits}test"
    assert after(5, NOW - 10, in_progress=(remove,)) == f"{waits}test", "gone, and not counted yet"
    assert after(6, NOW, in_progress=(remove,)) == f"{waits}code 1", "counted, and not twice"
    assert "start" in after(0, NOW - 10, dead), "none after the first"


def test_while_haproxy_is_away_nobody_knows_whether_one_that_stops_answering_is_at_work() -> None:
    silent = replica(WEB, 1, health=Health.FAILED, ongoing=None, ongoing_at=None)
    leaving = retirement(silent, draining_since=NOW - 5)
    world = observed(silent, specs=(WEB,), routing=None, retirements=leaving)
    assert text(desired(WEB, web=0), world) == "nothing to do"


def test_a_replica_of_another_version_has_at_least_the_time_that_it_was_made_with() -> None:
    """What the files say of the new version may be less than a request takes that the old one has begun."""
    quick = replace(WEB, definition_hash="d2", graceful_shutdown_timeout_s=6.0, stop_grace_period_s=16.0)
    made_with = {"graceful_shutdown_timeout_s": 305.0, "stop_grace_period_s": 315.0}

    def after(seconds: float, made_as: str, **changes: float) -> str:
        busy = replica(quick, 1, version=made_as, ongoing=1, **made_with)
        leaving = retirement(busy, draining_since=NOW - seconds, **changes)
        return text(desired(quick, web=0), observed(busy, specs=(quick,), retirements=leaving, routing=routing()))

    assert after(304, V) == "nothing to do"
    assert "still busy after 305 s" in after(306, V)
    assert after(320, V, stopping_since=NOW - 314) == "nothing to do"
    assert "still busy after 6 s" in after(7, version(quick)), "of its own the files say the last word"


def test_server_without_a_container_is_deleted() -> None:
    ghost = server(replica(WEB, 9), state=ServerState.MAINT)
    world = observed(specs=(WEB,), routing=routing(ghost))
    assert text(desired(WEB, web=0), world) == (
        f"#1 delete server svc_web/p-web-{V}-9: no container of that name exists"
    )


def test_server_of_a_replica_that_moved_is_replaced() -> None:
    moved = replica(WEB, 1, ip="10.0.0.77")
    world = observed(moved, specs=(WEB,), routing=routing(server(replica(WEB, 1))))
    assert text(desired(WEB, web=1), world).splitlines()[-1] == (
        f"#4 after #3 add server svc_web/p-web-{V}-1 at 10.0.0.77:8080: its replica is ready"
    )


def test_containers_that_compose_started_are_refused() -> None:
    stray = StrayContainer(id="x", name="p-web-1", service="web")
    world = observed(replica(WEB, 1), specs=(WEB,), strays=(stray,))
    assert text(desired(WEB, web=1), world) == (
        "#1 remove p-web-1: started by Compose, which pins no GPU: use `make scale SERVICE=web N=...` instead"
    )


def test_failures_in_a_row_wait_longer_each_time() -> None:
    record = FailureRecord(count=4, last_at=NOW - 1, detail="exited by itself with code 3")
    result = made(desired(WEB, web=1), observed(specs=(WEB,), failures={("web", V): record}))
    assert str(result) == ("pending web: failed 4 times in a row, next try in 3 s; last: exited by itself with code 3")
    assert result.next_look_s == pytest.approx(3.0)


def test_the_first_failure_is_replaced_at_once() -> None:
    record = FailureRecord(count=1, last_at=NOW, detail=KILLED)
    assert "create" in text(desired(WEB, web=1), observed(specs=(WEB,), failures={("web", V): record}))


@pytest.mark.parametrize(("failures", "expected"), [(0, 0), (1, 0), (2, 1), (3, 2), (5, 8), (9, 60), (1000, 60)])
def test_backoff_table(failures: int, expected: float) -> None:
    assert backoff_s(failures) == expected


def test_replicas_of_an_older_version_keep_the_port_they_were_made_for() -> None:
    old = replica(WEB, 1, port=8080)
    new = replace(WEB, port=9090, definition_hash="d2")
    world = observed(old, specs=(new,), routing=routing(server(old)))
    assert "server" not in text(desired(new, web=1), world)
    successor = replica(new, 2, port=9090)
    world = observed(old, successor, specs=(new,), routing=routing(server(old)))
    assert f"add server svc_web/{successor.name} at 10.0.0.2:9090" in text(desired(new, web=1), world)
    restarted = observed(old, specs=(new,), routing=routing())
    assert f"add server svc_web/{old.name} at 10.0.0.1:8080" in text(desired(new, web=1), restarted)


def test_a_container_that_the_engine_could_not_start_is_made_anew_on_another_gpu() -> None:
    broken = replica(RANKER, 1, state=ContainerState.CREATED, exit_code=128, started_at=None, ip=None, gpus=("GPU-9",))
    world = observed(broken, specs=(RANKER,), gpus=gpus(1))
    assert text(desired(RANKER, ranker=1), world) == lines(
        f"#1 remove p-ranker-{RV}-1: the engine could not start it (code 128)",
        f"#2 after #1 create p-ranker-{RV}-1 on GPU-0: 0 of 1 replicas exist",
        f"#3 after #2 start p-ranker-{RV}-1: 0 of 1 replicas exist",
    )


def test_a_server_of_a_container_that_had_the_name_before_goes_at_once() -> None:
    """Its address may be another service's by now, which answers the same question."""
    stale = server(replica(WEB, 1, ip="10.0.0.9"))
    for successor in (
        replica(WEB, 1, health=Health.UNKNOWN),
        replica(WEB, 1, state=ContainerState.CREATED, health=Health.UNKNOWN, started_at=None, ip=None),
    ):
        world = observed(successor, specs=(WEB,), routing=routing(stale))
        assert f"delete server svc_web/p-web-{V}-1" in text(desired(WEB, web=1), world)


def test_a_retirement_in_progress_is_no_longer_counted_as_ready() -> None:
    new = replace(WEB, definition_hash="d2")
    leaving = replica(WEB, 1)
    busy = BeginRetirement(target=leaving.name, service="web", container_id=leaving.id, cause="x")
    world = observed(leaving, replica(WEB, 2), replica(new, 3), specs=(new,), in_progress=(busy,))
    assert "drain p-web" not in text(desired(new), world)


def test_one_that_somebody_told_to_stop_is_not_counted_as_ready() -> None:
    new = replace(WEB, definition_hash="d2")
    stopped = replica(new, 3, reported_draining=True)
    assert "drain p-web" not in text(desired(new), observed(replica(WEB, 1), replica(WEB, 2), stopped, specs=(new,)))


def test_a_service_may_be_named_like_a_target_of_ours() -> None:
    foreign = service("routing", has_build=False, image="far/away")
    pull = PullImage(target="routing", service="routing", image="far/away", spec=foreign, cause="x")
    world = observed(replica(WEB, 1), specs=(WEB,), routing=routing(), in_progress=(pull,))
    assert "add server" in text(desired(WEB, foreign, web=1, routing=0), world)


def test_a_foreign_replica_of_a_removed_service_has_its_whole_time() -> None:
    """HAProxy's new worker knows nothing of it any more, the old one may still have its requests."""
    leaving = replica(WEB, 1, ongoing=None)
    world = observed(leaving, retirements=retirement(leaving, draining_since=NOW - 19), routing=routing())
    assert text(Desired(project="p"), world) == "nothing to do"
    assert "send SIGTERM" in str(plan(Desired(project="p"), world, NOW + 1))
