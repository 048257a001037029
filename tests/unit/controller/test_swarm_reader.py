"""What a manager of a Swarm lists -> replicas, strays, GPUs and events: each way in which a replica can stand."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.engines.labels import create_body
from controller.model.phases import Phase, phase_of
from controller.model.spec import ProbeSpec, ServiceSpec
from controller.model.world import ContainerState, EdgePlace, Gpu, ReplicaContainer
from controller.swarm.engine.reader import SwarmListing, changes, edges, gpus, replicas, strays
from controller.swarm.engine.service_spec import NARROWED_LABEL, service_spec

PENDING, RUNNING, EXITED, CREATED = (
    *(ContainerState.PENDING, ContainerState.RUNNING, ContainerState.EXITED, ContainerState.CREATED),
)
SPEC = ServiceSpec(
    "ranker", "shop/ranker", "http", 8080, 1, ProbeSpec(9100, "/readyz"), container={"Image": "shop/ranker"}
)
NAME = "shop-ranker-1a2b3c4d-1"
NO_NODE = "no suitable node (host-mode port already in use on 3 nodes)"


def at(second: float) -> str:
    return datetime.fromtimestamp(1_800_000_000 + second, UTC).isoformat().replace("+00:00", "Z")


def seconds(time: float | None) -> float | None:
    return None if time is None else time - 1_800_000_000


def service(wanted: int = 1, claimed: tuple[str, ...] = (), **labels: str) -> dict[str, Any]:
    made = create_body(SPEC, NAME, "1a2b3c4d", 1, tuple(map(Gpu, claimed)), "shop")
    spec = service_spec(NAME, made, len(claimed))
    spec["Mode"]["Replicated"]["Replicas"] = wanted
    spec["Labels"] |= labels
    return {"ID": "s1", "CreatedAt": at(0), "Spec": spec}


def task(
    state: str,
    made: float = 1,
    noted: float | None = None,
    *,
    node: str = "n1",
    error: str = "",
    code: int | None = None,
    uuids: tuple[str, ...] = (),
    told: float | None = None,
) -> dict[str, Any]:
    """`made`, `noted`: the leader's times of its creation and its last change; `told`: the node's time of its state."""
    noted = made + 1 if noted is None else noted
    container = {"ContainerStatus": {"ContainerID": "" if code is None else "c", "ExitCode": code or 0}}
    return {
        "ID": f"t{made}",
        "ServiceID": "s1",
        "NodeID": node,
        "CreatedAt": at(made),
        "UpdatedAt": at(noted),
        "Spec": {"ContainerSpec": {"Labels": {"pierhead.replica": NAME}}, "Networks": [{"Target": "main"}]},
        "Status": {"State": state, "Timestamp": at(noted if told is None else told), "Err": error, "Message": state}
        | container,
        "GenericResources": [{"NamedResourceSpec": {"Kind": "NVIDIA-GPU", "Value": uuid}} for uuid in uuids],
        "NetworksAttachments": [
            {"Network": {"ID": network}, "Addresses": [f"10.0.{place}.{round(made)}/24"]}
            for place, network in enumerate(("other", "main"))
        ],
    }


def node(name: str, state: str = "ready", availability: str = "active", uuids: tuple[str, ...] = ()) -> dict[str, Any]:
    resources = [{"NamedResourceSpec": {"Kind": "NVIDIA-GPU", "Value": uuid}} for uuid in uuids]
    return {
        "ID": name,
        "Spec": {"Availability": availability},
        "Status": {"State": state},
        "Description": {"Hostname": f"host-{name}", "Resources": {"GenericResources": resources}},
    }


READY = (node("n1"), node("n2"), node("n3"))


def read(wanted: int, *tasks: Any, nodes: Any = READY, **labels: str) -> ReplicaContainer:
    (one,) = replicas(SwarmListing([service(wanted, (), **labels)], tasks, nodes), "shop")
    return one


NO_IMAGE = (
    "could not be started on host-n1: No such image: a:1 (`docker pull a:1` on that node says why; PIERHEAD_REGISTRY "
    "names a registry that all nodes reach and trust)"
)
STOPPED = {"pierhead.stopped": at(4)}
CRASHED = task("failed", 1, 5, code=3, error="task: non-zero exit (3)")
CASES: dict[str, tuple[ReplicaContainer, Any]] = {
    "created": (read(0), (CREATED, "", None, None, "")),
    "no task yet": (read(1), (PENDING, "", None, None, "")),
    "no node has room": (read(1, task("pending", node="", error=NO_NODE)), (PENDING, "", None, None, NO_NODE)),
    "its image is pulled": (read(1, task("preparing")), (PENDING, "host-n1", None, None, "host-n1: preparing")),
    "it runs": (read(1, task("running", 1, 4)), (RUNNING, "host-n1", 4, None, "")),
    "its node's clock is behind": (read(1, task("running", 1, 4, told=-116)), (RUNNING, "host-n1", 1, None, "")),
    "it crashed": (read(1, CRASHED), (EXITED, "host-n1", 1, 3, "")),
    "Swarm's next task waits": (read(1, CRASHED, task("ready", 5)), (EXITED, "host-n1", 1, 3, "")),
    "Swarm's next task runs": (read(1, CRASHED, task("running", 5, 8, node="n2")), (RUNNING, "host-n2", 8, None, "")),
    "it ended by itself": (read(1, task("complete", 1, 5, code=0)), (EXITED, "host-n1", 1, 0, "")),
    "no such image": (
        read(1, task("rejected", 1, 5, error="No such image: a:1"), task("ready", 5, node="")),
        (EXITED, "host-n1", 1, None, NO_IMAGE),
    ),
    "its node is unknown": (
        read(1, task("running", 1, 4), nodes=(node("n1", "unknown"),)),
        (RUNNING, "host-n1", 4, None, ""),
    ),
    "its node is down": (
        read(1, task("running", 1, 9), task("pending", 9, node="", error=NO_NODE), nodes=(node("n1", "down"),)),
        (PENDING, "", None, None, f"host-n1 is down; {NO_NODE}"),
    ),
    "its node is drained": (
        read(1, task("running", 1, 9), task("ready", 9, node="n2"), nodes=(node("n1", "ready", "drain"), node("n2"))),
        (PENDING, "host-n2", None, None, "host-n1 is drained; host-n2: ready"),
    ),
    "its former node is back": (
        read(1, task("failed", 1, 60, code=255), task("pending", 9, node="", error=NO_NODE)),
        (PENDING, "", None, None, NO_NODE),
    ),
    "it went elsewhere": (
        read(1, task("running", 1, 9), task("running", 9, 12, node="n2"), nodes=(node("n1", "down"), node("n2"))),
        (RUNNING, "host-n2", 12, None, ""),
    ),
    "its node was removed": (read(1, task("running", 1, 4), nodes=()), (RUNNING, "", 4, None, "")),
    "it is being stopped": (read(0, task("running", 1, 9), **STOPPED), (RUNNING, "host-n1", 4, None, "")),
    "it was stopped": (read(0, task("shutdown", 1, 9, code=0), **STOPPED), (EXITED, "host-n1", 4, 0, "")),
    "it was stopped long ago": (read(0, **STOPPED), (EXITED, "", 4, None, "")),
}


@pytest.mark.parametrize("case", CASES)
def test_how_a_replica_stands(case: str) -> None:
    one, expected = CASES[case]
    assert (one.state, one.node, seconds(one.started_at), one.exit_code, one.engine_detail) == expected
    assert (one.id, one.name, one.service, one.version, one.number) == ("s1", NAME, "ranker", "1a2b3c4d", 1)
    assert (seconds(one.created_at), one.port, one.probe) == (0, 8080, (9100, "/readyz"))
    assert (one.ip is not None) == one.state.is_up


def test_it_has_the_address_in_its_primary_network() -> None:
    assert read(1, task("running", 7)).ip == "10.0.1.7"


def test_a_start_is_half_done_while_its_constraints_are_there() -> None:
    narrowed = {NARROWED_LABEL: "2"}
    assert read(1, task("running"), **narrowed).is_half_started
    assert not read(1, task("running")).is_half_started
    assert not read(0, task("running"), **STOPPED, **narrowed).is_half_started, "it is to end"


@pytest.mark.parametrize(
    ("case", "phase", "words"),
    [
        ("no node has room", Phase.STARTING, ""),
        ("it crashed", Phase.FAILED, "exited by itself with code 3"),
        ("no such image", Phase.FAILED, NO_IMAGE),
        ("its node is down", Phase.STARTING, ""),
        ("created", Phase.CREATED, ""),
    ],
)
def test_the_phases_that_follow(case: str, phase: Phase, words: str) -> None:
    """A replica that waits for a node is not late, however long."""
    assert phase_of(CASES[case][0], SPEC, None, 1_800_000_000 + 10**6) == (phase, words)


STATES = ("new", "pending", "assigned", "preparing", "ready", "starting", "running", "complete", "failed", "rejected")
HISTORIES = st.lists(st.sampled_from([*STATES, "shutdown", "orphaned"]), max_size=5)


@given(HISTORIES, st.integers(0, 1), st.sampled_from(("ready", "unknown", "down")), st.integers(-200, 200))
def test_any_history_is_one_replica_whatever_the_nodes_clocks_say(
    states: list[str], wanted: int, condition: str, skew: int
) -> None:
    def look(state_of_nodes: str, off_by: int) -> ReplicaContainer:
        tasks = [task(state, number * 10, told=number * 10 + off_by) for number, state in enumerate(states, start=1)]
        return read(wanted, *tasks, nodes=[node(name, state_of_nodes) for name in ("n1", "n2")], **STOPPED)

    one, right = look(condition, skew), look("ready", 0)
    if wanted or condition != "down":
        assert one.state is right.state, "neither clocks nor a node's state make a replica end, or start"
        assert (one.exit_code, one.node, one.gpus) == (right.exit_code, right.node, right.gpus)
    else:
        assert one.state is EXITED, "a lost node reports nothing more of one that was stopped"
    if wanted and states:
        assert (one.state is RUNNING) == (states[-1] == "running")
    assert one.state is not CREATED
    assert (one.ip is not None, one.started_at is not None) >= (one.state.is_up, one.state.is_up)


@pytest.mark.parametrize(
    ("spec", "swarms", "words"),
    [
        ({}, "insufficient resources on 3 nodes", "it reserves something that no node has free: reserve less"),
        (
            {
                "Reservations": {
                    "NanoCPUs": 2_500_000_000,
                    "MemoryBytes": 2**30,
                    "GenericResources": [{"DiscreteResourceSpec": {"Kind": "NVIDIA-GPU", "Value": 2}}],
                }
            },
            "insufficient resources on 3 nodes",
            "it reserves 2 NVIDIA-GPU, 2.5 CPUs, 1024 MiB of memory: reserve less (deploy.resources.reservations)",
        ),
        (
            ["node.labels.zone==x", "node.role == worker"],
            "scheduling constraints not satisfied on 3 nodes",
            "no node fulfils 'node.labels.zone==x': `pierhead node label NODE zone=x` gives a node that label",
        ),
        (
            ["node.labels.zone!=a", "node.hostname==HOST-n1"],
            "scheduling constraints not satisfied on 3 nodes",
            "no node fulfils 'node.labels.zone!=a', 'node.hostname==HOST-n1': change deploy.placement.constraints",
        ),
        (["node.platform.arch==arm"], "unsupported platform on 3 nodes", "its image is of another architecture: build"),
    ],
)
def test_why_no_node_takes_it_comes_with_what_to_do(spec: Any, swarms: str, words: str) -> None:
    waiting = task("pending", node="", error=f"no suitable node ({swarms})")
    waiting["Spec"] |= {"Placement": {"Constraints": spec}} if isinstance(spec, list) else {"Resources": spec}
    nodes = [node("n1"), node("n2"), node("n3")]
    for one, zone, role in zip(nodes, "aab", ("manager", "worker", "worker"), strict=True):
        one["Spec"] |= {"Labels": {"zone": zone}, "Role": role}
    assert words in read(1, waiting, nodes=nodes).engine_detail


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            task("running", 1, node="n1"),
            task("running", 20, node="n2"),
            "Swarm has moved it from {0} to {1}: {0} is down",
        ),
        (task("shutdown", 1, node="n2"), task("running", 20, node="n3"), "Swarm has moved it from {0} to {1}"),
        (task("shutdown", 1, node="n2"), task("running", 20, node="n2"), "Swarm has replaced it on {0}"),
        (task("failed", 1, 20, node="n2", code=1), task("running", 20, node="n2"), ""),
        (task("shutdown", 1, node="n1"), task("ready", 20, node="n2"), ""),
    ],
    ids=["its node is lost", "elsewhere", "on its node", "it had ended by itself", "not yet"],
)
def test_a_move_is_reported_when_it_is_over(before: Any, after: Any, told: str) -> None:
    nodes = (node("n1", "down"), node("n2"), node("n3"))
    hosts = [f"host-{one['NodeID']}" for one in (before, after)]
    assert read(1, before, after, nodes=nodes).moved == told.format(*hosts)


def test_gpus_of_all_nodes_and_who_holds_them() -> None:
    """A replica without a node counts for its number of GPUs on any node."""
    nodes = (node("n1", uuids=("GPU-1", "GPU-2")), node("n2", "down", uuids=("GPU-3",)), node("n3", uuids=("GPU-4",)))
    foreign = task("running", uuids=("GPU-4",)) | {"ServiceID": "s9"}
    for tasks, held in (([], ("GPU-2",)), ([task("running", uuids=("GPU-1",))], ("GPU-1",))):
        listing = SwarmListing([service(1, claimed=("GPU-2",))], [*tasks, foreign], nodes)
        ours = replicas(listing, "shop")
        assert ours[0].gpus == held
        listed, holders = gpus(listing, ours)
        assert [(gpu.uuid, gpu.node) for gpu in listed] == [
            *(("GPU-1", "host-n1"), ("GPU-2", "host-n1"), ("GPU-3", "host-n2"), ("GPU-4", "host-n3"))
        ]
        assert holders == {"GPU-3": "host-n2 (down)", "GPU-4": NAME}


def test_a_service_of_the_stack_that_runs_what_replicas_run_is_a_stray() -> None:
    stack = [
        {"ID": name, "Spec": {"Name": name, "Mode": {"Replicated": {"Replicas": count}}}}
        for name, count in (("shop_ranker", 1), ("shop_other", 1), ("shop_idle", 0))
    ]
    found = strays(stack, "shop", {"ranker", "idle"})
    assert [(one.name, one.service) for one in found] == [("shop_ranker", "ranker")]


def test_a_service_that_is_no_replica_in_spite_of_its_labels_is_left_alone() -> None:
    renamed = service()
    renamed["Spec"]["Name"] = "other"
    assert replicas(SwarmListing([renamed], [], READY), "shop") == ()


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        (None, "created", ["create"]),
        ("created", "it runs", ["start"]),
        ("it runs", "it crashed", ["die"]),
        ("it runs", "it went elsewhere", ["die", "start"]),
        ("it runs", None, ["die", "destroy"]),
        ("it crashed", None, ["destroy"]),
        ("no task yet", "no node has room", ["update"]),
        ("it runs", "it runs", []),
    ],
)
def test_what_changed_is_reported_as_the_engine_of_one_machine_does(
    before: str | None, after: str | None, kinds: list[str]
) -> None:
    was, now = ([CASES[name][0]] if name else [] for name in (before, after))
    assert [(event.kind, event.container_id, event.name) for event in changes(was, now)] == [
        (kind, "s1", NAME) for kind in kinds
    ]


def test_edges_are_found_by_their_node_in_the_network_that_replicas_are_not_on() -> None:
    def edge(node: str, state: str, network: str = "shop_edges", desired: str = "running") -> dict[str, Any]:
        given = [
            {"Network": {"Spec": {"Name": name}}, "Addresses": [f"10.0.{place}.7/24"]}
            for place, name in enumerate(("shop_default", network))
        ]
        return task(state, node=node) | {"NetworksAttachments": given, "DesiredState": desired}

    tasks = [edge("n1", "running"), edge("n2", "starting"), edge("n3", "preparing"), edge("n4", "running")]
    tasks.append(edge("n2", "running", "other") | {"NodeID": "n5"})
    nodes = [node(name) for name in ("n1", "n2", "n3", "n5")]
    here = EdgePlace("10.0.1.7")
    assert edges(tasks, nodes, "shop_edges") == {"host-n1": here, "host-n2": here}

    # One that was stopped serves some seconds longer; its successor counts once it starts.
    ends, ended = edge("n1", "running", desired="shutdown"), edge("n2", "shutdown", desired="shutdown")
    leaves = replace(here, is_leaving=True)
    assert edges([ends, ended], nodes, "shop_edges") == {"host-n1": leaves}
    assert edges([ends, edge("n1", "preparing")], nodes, "shop_edges") == {"host-n1": leaves}
    for both in ([ends, edge("n1", "starting")], [edge("n1", "starting"), ends]):
        assert edges(both, nodes, "shop_edges") == {"host-n1": here}
    assert edges([ends], [node("n1", "down")], "shop_edges") == {}, "it is listed as running for a day"
