"""What the API, Discovery and Prometheus are shown of a snapshot, the events of its changes, and obsolete failures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.desired.deployer import REFUSED_FOR_S
from controller.errors import EngineError, ImageNotFound
from controller.model.actions import CreateContainer, PullImage
from controller.model.desired import Desired, VersionGoal
from controller.model.nodes import Node
from controller.model.observed import Observed
from controller.model.plan import PendingReplica, Plan, Refusal
from controller.model.reports import AutoscaleStatus
from controller.model.spec import GpuSlot, ServiceSpec, backend_name
from controller.model.world import (
    ContainerState,
    FailureRecord,
    Gpu,
    GpuReading,
    HeldRequests,
    PublishedStats,
    ReplicaContainer,
    ReplicaHealth,
    Retirement,
    RoutingState,
    Server,
    ServerState,
)
from controller.plan.failures import STEADY_S, obsolete_failures
from controller.status.endpoints import endpoints, scrape_targets
from controller.status.records.answers import Target
from controller.status.records.services import GpuSlotUse, Service
from controller.status.services import service_rows
from controller.status.transitions import transitions
from controller.status.view import View, gpu_uses
from tests.unit.controller.worlds import IMAGE_ID, NOW, gpu_service, replica, service, version

WAITS: dict[str, object] = {"state": ContainerState.PENDING, "ip": None, "engine_detail": "no suitable node"}
WEB = service("web", metrics_port=9100)
RANKER = gpu_service("ranker", metrics_port=9100)


def desired(*services: ServiceSpec, **targets: int) -> Desired:
    wanted = {one.name: targets.get(one.name, one.replicas) for one in services}
    return Desired("p", {one.name: one for one in services}, wanted)


def observed(*containers: ReplicaContainer, **changes: object) -> Observed:
    images = {f"image/{name}": IMAGE_ID for name in ("web", "ranker")}
    return Observed(containers=containers, images=images, **{"routing": routing(*containers), **changes})  # type: ignore[arg-type]


def routing(*containers: ReplicaContainer, state: ServerState = ServerState.READY) -> RoutingState:
    servers = [Server(backend_name(c.service), c.name, f"{c.ip}:8080", state, up=True) for c in containers]
    return RoutingState(1, 1.0, "3.0.11", "r", tuple(servers))


def retired(container: ReplicaContainer, stopping_since: float | None = None) -> dict[str, Retirement]:
    return {container.id: Retirement(container.name, container.id, NOW - 1, stopping_since, "2 replicas, 1 wanted")}


def row_of(
    world: Observed, wanted: Desired, plan: Plan | None = None, refusals: tuple[Refusal, ...] = (), **overrides: int
) -> Service:
    (row,) = service_rows(View(NOW, "p", wanted, world, plan or Plan(), refusals=refusals), overrides)
    return row


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({"state": ContainerState.CREATED, "ip": None}, "STARTING", "is being started"),
        (
            {"health": ReplicaHealth.UNKNOWN, "health_detail": "503 from :9100/readyz: loading"},
            "STARTING",
            "not ready yet: 503 from :9100/readyz: loading",
        ),
        (
            {"health": ReplicaHealth.FAILED, "health_detail": "no answer"},
            "FAILED",
            "its readiness probe failed: no answer",
        ),
        ({"state": ContainerState.EXITED, "exit_code": 3}, "FAILED", "exited by itself with code 3"),
        (WAITS, "PENDING", "no suitable node"),
        ({"reported_draining": True}, "DRAINING", "it was asked to stop: it finishes its requests in flight"),
        ({}, "RUNNING", ""),
    ],
)
def test_states_of_a_replica(changes: dict[str, object], state: str, words: str) -> None:
    row = row_of(observed(replica(WEB, 1, **changes)), desired(WEB, web=1))
    assert (row.replicas[0].state, row.replicas[0].message) == (state, words)
    assert row.converged is (state == "RUNNING")


def test_a_retiring_replica_is_shown_with_its_cause() -> None:
    stays, leaves = replica(WEB, 1), replica(WEB, 2)
    for stopping_since, state in ((None, "DRAINING"), (NOW, "STOPPING")):
        world = observed(stays, leaves, retirements=retired(leaves, stopping_since))
        row = row_of(world, desired(WEB, web=1))
        assert (row.ready, row.converged, row.message) == (1, False, f"1 {state.lower()}")
        assert (row.replicas[1].state, row.replicas[1].message) == (state, "2 replicas, 1 wanted")


def test_a_replica_that_ignores_sigterm_is_shown_with_since_when_and_until_when() -> None:
    stays, leaves = replica(WEB, 1), replica(WEB, 2)
    world = observed(stays, leaves, retirements=retired(leaves, NOW - 12))
    row = row_of(world, desired(replace(WEB, stop_grace_period_s=30.0), web=1))
    words = "SIGTERM 12 s ago, SIGKILL after 30 s"
    assert (row.message, row.replicas[1].message) == (f"1 stopping ({words})", f"2 replicas, 1 wanted; {words}")


def test_a_routed_replica_runs_when_haproxy_sends_to_it() -> None:
    container = replica(WEB, 1)
    for there in (RoutingState(1, 1.0, "3", "r"), routing(container, state=ServerState.MAINT)):
        row = row_of(observed(container, routing=there), desired(WEB, web=1))
        assert (row.ready, row.replicas[0].message) == (0, "ready, HAProxy does not send to it yet")
    assert row_of(observed(container, routing=None), desired(WEB, web=1)).ready == 1, "what HAProxy does is not known"
    assert row_of(observed(replica(RANKER, 1), routing=None), desired(RANKER, ranker=1)).ready == 1


def test_status_says_which_caller_does_not_reach_which_ready_replica() -> None:
    first, second = replica(RANKER, 1), replica(RANKER, 2)
    cut = {"ranker": {first.name: "no connection", "gone": "no connection"}, "other": {second.name: "no connection"}}
    callers = [replica(WEB, number, unreached=cut) for number in (1, 2)]
    wanted = desired(WEB, RANKER, web=2, ranker=2)
    rows = service_rows(View(NOW, "p", wanted, observed(first, second, *callers)))
    words = f"{callers[0].name} and 1 more do not reach {first.name} of ranker, which is ready: no connection"
    for row in rows:
        assert (row.unreached, row.message, [one.words for one in row.obstacles]) == ((words,), words, [words])
        assert row.state == "HEALTHY"
    failed = replace(first, health=ReplicaHealth.FAILED)
    for row in service_rows(View(NOW, "p", wanted, observed(failed, second, *callers))):
        assert row.unreached == (), "it is the replica's own fault"


def test_pending_replicas_say_why_once() -> None:
    plan = Plan(pending=(PendingReplica("ranker", "it asks for 1 GPU and 0 of 2 are free", blocked=True),) * 2)
    row = row_of(observed(replica(RANKER, 1)), desired(RANKER, ranker=3), plan)
    assert row.message == "2 pending: it asks for 1 GPU and 0 of 2 are free"
    assert row.blocked == "it asks for 1 GPU and 0 of 2 are free"
    assert [one.state for one in row.replicas] == ["RUNNING", "PENDING", "PENDING"]
    row = row_of(observed(replica(RANKER, 1), replica(RANKER, 2, **WAITS)), desired(RANKER, ranker=2))
    assert (row.message, row.blocked) == ("1 pending: no suitable node", ""), "in the engine's words"
    leaving = replica(WEB, 9)
    world = observed(leaving, retirements=retired(leaving))
    row = service_rows(View(NOW, "p", desired(RANKER), world, plan))[0]
    assert (row.name, row.blocked) == ("ranker", ""), "the retiring replica may hold what is missing"


def test_a_container_that_the_engine_refuses_blocks_after_a_while() -> None:
    create = CreateContainer(target="web-1", service="web", version=version(WEB), number=1, spec=WEB, cause="missing")
    refused = Refusal(create, EngineError("no command specified"), 8, NOW + 4, since=NOW - REFUSED_FOR_S)
    for since, blocked in ((NOW - REFUSED_FOR_S + 1, ""), (NOW - REFUSED_FOR_S, "no command specified")):
        row = row_of(observed(), desired(WEB), refusals=(replace(refused, since=since),))
        assert row.blocked == blocked
        assert row.message == "could not create web-1 8 times, next try in 4 s: no command specified"
    for goal, message in ((VersionGoal(version(WEB), WEB), row.message), (VersionGoal("other", WEB), "")):
        wanted = replace(desired(WEB, web=0), goals={"web": goal})
        assert row_of(observed(), wanted, refusals=(refused,)).message == message, "files that were put right"


def test_a_missing_image_blocks_and_other_failures_do_not() -> None:
    pull = PullImage(target="web", service="web", image="nowhere/web", spec=WEB, cause="missing")
    refusal = Refusal(pull, ImageNotFound("nowhere/web: manifest unknown"), 3, NOW + 4)
    files = desired(replace(WEB, image="nowhere/web"), web=1)
    row = row_of(observed(), files, refusals=(refusal,))
    assert row.blocked == "nowhere/web: manifest unknown"
    assert row.message == "could not pull nowhere/web for web 3 times, next try in 4 s: nowhere/web: manifest unknown"
    row = row_of(observed(), files, refusals=(replace(refusal, error=EngineError("no route")),))
    assert row.blocked == ""
    pulled = replace(observed(), images={"nowhere/web": "sha256:1"})
    renamed = desired(replace(WEB, image="image/web"), web=1)
    for over in row_of(pulled, files, refusals=(refusal,)), row_of(observed(), renamed, refusals=(refusal,)):
        assert (over.blocked, over.message) == ("", ""), "the image came otherwise, or the files name another one"
    row = row_of(replace(observed(replica(WEB, 1), replica(WEB, 2)), images={WEB.image: None}), desired(WEB))
    assert row.ready == 2
    assert row.message == (
        "image image/web is not on this machine: running replicas are not affected, no new one can be started; "
        "build it (`docker compose build web`)"
    )


def test_a_crash_loop_is_named() -> None:
    failures = {("web", version(WEB)): FailureRecord(3, NOW - 1, "exited by itself with code 1")}
    plan = Plan(pending=(PendingReplica("web", "failed 3 times in a row, next try in 1 s"),))
    row = row_of(observed(failures=failures), desired(WEB, web=1), plan)
    assert row.message == "CRASH_LOOP: 1 pending: failed 3 times in a row, next try in 1 s"
    once = {("web", version(WEB)): FailureRecord(1, NOW - 1, "exited by itself with code 1")}
    assert "is being replaced: exited by itself" in row_of(observed(failures=once), desired(WEB, web=1)).message


def test_a_failure_that_a_later_replica_has_overcome_explains_no_scaling() -> None:
    failures = {("web", version(WEB)): FailureRecord(3, NOW - 9, "exited by itself with code 1")}
    starting = replica(WEB, 3, health=ReplicaHealth.UNKNOWN, created_at=NOW - 1)
    for created_at, state, message in (
        (NOW - 8, "UPSCALING", "1 starting"),
        (NOW - 50, "UNHEALTHY", "CRASH_LOOP: failed 3 times in a row; last: exited by itself with code 1"),
    ):
        world = observed(replica(WEB, 1, created_at=created_at), starting, failures=failures)
        row = row_of(world, desired(WEB, web=2))
        assert (row.state, row.message) == (state, message)
        assert (row.failure is None) is (state == "UPSCALING")


@pytest.mark.parametrize(
    ("held", "scaled", "set_to", "words"),
    [
        (37, AutoscaleStatus(0, 3, 1, 37.0, 1), None, "1 starting, woken by 37 held requests"),
        (2, AutoscaleStatus(1, 3, 1, 1.0, 1), None, "1 starting, 2 held requests wait for it"),
        (1, AutoscaleStatus(0, 3, 1, 1.0, 1, paused=True), 1, "1 starting, 1 held request waits for it"),
        (3, AutoscaleStatus(0, 3, 0, 3.0, 1, paused=True), 0, "3 held requests wait; set to 0 by scale"),
        (0, None, 0, "set by scale; the compose files say 2"),
    ],
)
def test_what_haproxy_holds_and_what_scale_has_set_are_said(
    held: int, scaled: AutoscaleStatus | None, set_to: int | None, words: str
) -> None:
    starting = [] if set_to == 0 else [replica(WEB, 1, health=ReplicaHealth.UNKNOWN)]
    world = observed(*starting, routing=replace(routing(), held={"svc_web": HeldRequests(now=held)}))
    overrides = {} if set_to is None else {"web": set_to}
    autoscaled = {"web": scaled} if scaled else {}
    (row,) = service_rows(View(NOW, "p", desired(WEB, web=len(starting)), world), overrides, autoscaled)
    assert (row.message, row.override) == (words, set_to)


def test_endpoints_are_the_replicas_that_serve_or_drain() -> None:
    ready, leaving, starting, told, gone, failed = (replica(RANKER, number) for number in range(1, 7))
    world = observed(
        ready,
        leaving,
        replace(starting, health=ReplicaHealth.UNKNOWN),
        replace(told, reported_draining=True),
        replace(gone, state=ContainerState.EXITED),
        replace(failed, health=ReplicaHealth.FAILED),
        replica(WEB, 1),
        retirements=retired(leaving, NOW),
    )
    listed = endpoints(desired(RANKER, service("idle")), world)
    assert [(one.address, one.state == one.DRAINING) for one in listed["ranker"].endpoints] == [
        ("10.0.0.1:50051", False),
        ("10.0.0.2:50051", True),
        ("10.0.0.4:50051", True),
    ]
    assert not listed["idle"].endpoints
    assert set(listed) == {"ranker", "idle"}
    six = endpoints(desired(RANKER), observed(replica(RANKER, 1, ip="fd00::1")))["ranker"].endpoints
    assert six[0].address == "[fd00::1]:50051"


def test_endpoints_carry_what_callers_choose_and_wait_by() -> None:
    spec = replace(RANKER, max_queued_requests=7, router_policy="prefix", router_policy_kwargs='{"balance":2}')
    stats = PublishedStats({"running": 3.0}, 5)
    (told,) = endpoints(desired(spec), observed(replica(spec, 1, node="gpu-7", stats=stats))).values()
    assert (told.max_queued_requests, told.policy, told.policy_kwargs) == (7, "prefix", '{"balance":2}')
    assert [(one.node, dict(one.stats), one.stats_version) for one in told.endpoints] == [
        ("gpu-7", {"running": 3.0}, 5)
    ]
    off = replace(
        desired(RANKER, WEB, service("asleep"), ranker=0, web=0, asleep=0), switched_off=frozenset({"ranker", "web"})
    )
    assert {name: one.scaled_to_zero_by for name, one in endpoints(off, observed(), {"ranker": 0}).items()} == {
        "ranker": "`pierhead scale`",
        "web": "`replicas: 0` in the compose files",
        "asleep": "",
    }


def test_targets() -> None:
    world = observed(replica(RANKER, 1, gpus=("GPU-0", "GPU-1")), replica(RANKER, 2, ip=None), replica(WEB, 1))
    labels = {"job": "replicas", "service": "ranker", "version": version(RANKER), "gpu": "GPU-0,GPU-1"}
    labels |= {"replica": f"p-ranker-{version(RANKER)}-1", "__metrics_path__": "/metrics"}
    (target,) = scrape_targets(desired(RANKER, service("web")), world)
    assert target == Target(("10.0.0.1:9100",), labels)
    edges = replace(routing(), edge_addresses={"n1": "10.0.1.1", "n2": "fd00::1"})
    on_swarm = replace(world, routing=edges, nodes=(Node("n1"), Node("n2")))
    *haproxys, replica_ = scrape_targets(desired(RANKER), on_swarm)
    assert [one.targets for one in haproxys] == [("10.0.1.1:8404",), ("[fd00::1]:8404",)]
    assert haproxys[0].labels == {"job": "haproxy", "node": "n1", "instance": "n1"}
    assert replica_.labels == {**target.labels, "node": world.containers[0].node}


def test_gpus_their_holders_and_their_memory() -> None:
    gib = 1024**3
    machine = tuple(Gpu(f"GPU-{n}", name="L4", memory_bytes=24 * gib) for n in range(2))
    part, plain = Gpu("MIG-0", memory_bytes=10 * gib, parent="GPU-m"), Gpu("GPU-p")
    memory, share = GpuSlot(memory_bytes=8 * gib), GpuSlot(fraction=0.25)
    one, two = (replica(RANKER, n, gpus=("GPU-1",), gpu_slot=slot) for n, slot in ((1, memory), (2, share)))
    whole = replica(RANKER, 3, gpus=("GPU-p",))
    reading = GpuReading(NOW, {"GPU-0": 20 * gib, "GPU-1": 3 * gib})
    seen = {"gpus": (*machine, part, plain), "gpu_reading": reading, "foreign_gpu_holders": {"GPU-m": "training"}}
    zero, first, parts, last = gpu_uses(observed(one, two, whole, **seen))
    assert (zero.holder, zero.memory_bytes, zero.used_bytes, zero.free_bytes) == ("", 24 * gib, 20 * gib, 4 * gib)
    assert first.slots == (GpuSlotUse(one.name, "8 GiB"), GpuSlotUse(two.name, "0.25"))
    assert first.holder == f"{one.name}, {two.name}"
    assert (first.used_bytes, first.free_bytes) == (3 * gib, 10 * gib), "memory that a slot reserves is not free"
    assert (parts.holder, parts.used_bytes, parts.free_bytes) == ("training", None, 0), "the GPU's holder has its parts"
    assert (last.holder, last.memory_bytes, last.used_bytes, last.free_bytes) == (whole.name, None, None, None)


# --------------------------------------------------------------------------------------------------------- transitions


def view(*containers: ReplicaContainer, plan: Plan | None = None, **changes: object) -> View:
    wanted, world = desired(WEB), observed(*containers, **changes)
    rows = service_rows(View(NOW, "p", wanted, world, plan or Plan()))
    up = world.routing is not None
    return View(NOW, "p", wanted, world, services=rows, haproxy_reachable=up, engine_reachable=True)


def kinds(before: View, after: View) -> list[str]:
    return [change.kind for change in transitions(before, after)]


def test_each_change_is_one_event() -> None:
    starting, ready = view(replica(WEB, 1, health=ReplicaHealth.UNKNOWN)), view(replica(WEB, 1))
    (change,) = transitions(starting, ready)
    assert (change.kind, change.message) == (
        "replica_ready",
        f"p-web-{version(WEB)}-1 is ready, 100.0 s after its start",
    )
    blocked = view(plan=Plan(pending=(PendingReplica("web", "no GPU", blocked=True),)))
    other = replace(routing(replica(WEB, 1)), pid=2)
    both, one = {"n1": "", "n2": ""}, {"n1": "", "n2": "it is away"}
    strange = view(replica(WEB, 1), left_alone={"p-web-1": "container p-web-1 is left alone"})
    at_edges = [
        view(replica(WEB, 1), routing=replace(routing(replica(WEB, 1)), edges=e)) for e in (both, one, {"n1": ""})
    ]
    for before, after, expected in (
        (starting, starting, []),
        (blocked, blocked, []),
        (view(), blocked, ["replica_pending"]),
        (ready, view(replica(WEB, 1, health=ReplicaHealth.FAILED)), ["replica_not_ready"]),
        (ready, view(replica(WEB, 1, **WAITS)), ["replica_not_ready"]),
        (ready, view(replica(WEB, 1), routing=None), ["haproxy_silent"]),
        (view(replica(WEB, 1), routing=None), ready, ["haproxy_answers"]),
        (ready, view(replica(WEB, 1), routing=other), ["haproxy_restarted"]),
        (ready, view(replica(WEB, 1, moved="Swarm has replaced it on n1", started_at=NOW - 1)), ["replica_moved"]),
        (ready, view(replica(WEB, 1, moved="Swarm has replaced it on n1")), []),
        (ready, strange, ["left_alone"]),
        (strange, strange, []),
        (at_edges[0], at_edges[1], ["edge_differs"]),
        (at_edges[1], at_edges[0], ["edge_back"]),
        (at_edges[0], at_edges[2], ["edge_differs"]),
        (at_edges[1], at_edges[2], []),
    ):
        assert kinds(before, after) == expected


# ------------------------------------------------------------------------------------------------------------ recovery


@pytest.mark.parametrize(
    ("ready_since", "failed_at", "wanted", "is_obsolete"),
    [
        pytest.param([NOW - STEADY_S], NOW - 70, 1, True, id="its replacement is steady"),
        pytest.param([NOW - STEADY_S + 1], NOW - 70, 1, False, id="its replacement is new"),
        pytest.param([NOW - 500], NOW - 61, 2, False, id="it has no replacement"),
        pytest.param([NOW - 500, None], NOW - 61, 2, False, id="its replacement is not ready"),
        pytest.param([NOW - 500], NOW - 61, 1, True, id="no replica is missing"),
        pytest.param([NOW - 500], NOW - 59, 1, False, id="it failed a moment ago"),
    ],
)
def test_obsolete_failures(ready_since: list[float | None], failed_at: float, wanted: int, is_obsolete: bool) -> None:
    containers = [
        replica(WEB, n, health=ReplicaHealth.READY if at else ReplicaHealth.UNKNOWN, ready_since=at)
        for n, at in enumerate(ready_since, 1)
    ]
    key = ("web", version(WEB))
    world = observed(*containers, failures={key: FailureRecord(2, failed_at, "code 1")})
    assert obsolete_failures(desired(WEB, web=wanted), world, NOW) == ({key} if is_obsolete else set())


def test_addresses_are_those_the_replicas_were_made_for() -> None:
    old, new = replica(WEB, 1, port=8080), replica(WEB, 2, port=None)
    moved = replace(WEB, port=9090)
    wanted = Desired("p", {"web": moved}, {"web": 2})
    world = Observed(containers=(old, new), images={moved.image: IMAGE_ID})
    addresses = [endpoint.address for endpoint in endpoints(wanted, world)["web"].endpoints]
    assert addresses == ["10.0.0.1:8080", "10.0.0.2:9090"]
    (row,) = service_rows(View(NOW, "p", wanted, world))
    assert [one.address for one in row.replicas] == ["10.0.0.1:8080", "10.0.0.2:9090"]
