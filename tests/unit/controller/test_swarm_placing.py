"""Among which nodes Swarm chooses for a replica."""

from __future__ import annotations

from typing import Any

import pytest

from controller.model.nodes import Node, fits
from controller.swarm.engine.placing import EVERY_NODE, Narrowing, narrowing
from controller.swarm.engine.reader import SwarmListing
from controller.swarm.engine.service_spec import GPU_KIND, LIMIT_LABEL


def node(name: str, zone: str = "", gpus: int = 0, **spec: Any) -> Any:
    named = [{"NamedResourceSpec": {"Kind": GPU_KIND, "Value": f"{name}-{index}"}} for index in range(gpus)]
    return {
        "ID": name,
        "Status": {"State": spec.pop("State", "ready")},
        "Spec": {"Availability": "active", "Role": "worker", "Labels": {"zone": zone} if zone else {}, **spec},
        "Description": {"Hostname": name, "Resources": {"GenericResources": named}},
    }


def task(place: str, service: str = "ranker", gpus: int = 0, state: str = "running") -> Any:
    return {
        "NodeID": place,
        "DesiredState": state if state == "shutdown" else "running",
        "Status": {"State": state},
        "Spec": {"ContainerSpec": {"Labels": {"pierhead.project": "shop", "pierhead.service": service}}},
        "GenericResources": [{"NamedResourceSpec": {"Kind": GPU_KIND, "Value": f"{place}-{n}"}} for n in range(gpus)],
    }


def spec(limit: int = 0, gpus: int = 0, constraints: Any = (), spread: Any = ()) -> Any:
    reserved = [{"DiscreteResourceSpec": {"Kind": GPU_KIND, "Value": gpus}}] if gpus else []
    labels = {"pierhead.project": "shop", "pierhead.service": "ranker"}
    return {
        "Labels": labels | ({LIMIT_LABEL: str(limit)} if limit else {}),
        "TaskTemplate": {
            "Resources": {"Reservations": {"GenericResources": reserved}},
            "Placement": {
                "Constraints": list(constraints),
                "Preferences": [{"Spread": {"SpreadDescriptor": one}} for one in spread],
            },
        },
    }


THREE = [node("n1", "a", gpus=2), node("n2", "a", gpus=2), node("n3", "b", gpus=2)]


@pytest.mark.parametrize(
    ("wanted", "running", "against"),
    [
        (spec(), "", ""),
        (spec(), "n1 n1 n2", "n1 n2"),
        (spec(), "n1 n2 n3", ""),
        (spec(constraints=["node.labels.zone==a"]), "n1", "n1"),
        (spec(constraints=["node.labels.zone==a", "node.hostname != n2"]), "n1", ""),
        (spec(spread=["node.labels.zone"]), "n1 n3 n3", "n1 n3"),  # the zones first (a has one, b two), and then nodes
        (spec(spread=["node.labels.zone"]), "n1 n2 n3", "n1 n2"),
        (spec(spread=["node.labels.rack"]), "n1 n3", "n1 n3"),
    ],
)
def test_a_replica_prefers_the_nodes_with_the_fewest_of_its_service(wanted: Any, running: str, against: str) -> None:
    tasks = [task(place) for place in running.split()] + [task("n1", "other"), task("n3", state="shutdown")]
    expected = Narrowing(preference=tuple(f"node.id!={one}" for one in against.split()))
    assert narrowing(wanted, SwarmListing((), tasks, THREE)) == expected


def test_a_preference_never_sends_a_replica_where_its_gpus_are_taken() -> None:
    tasks = [task("n1", gpus=1), task("n2", "other", gpus=1), task("n3", "other", gpus=2)]
    assert narrowing(spec(gpus=1), SwarmListing((), tasks, THREE)) == Narrowing(preference=("node.id!=n1",))
    assert narrowing(spec(gpus=2), SwarmListing((), tasks, THREE)) == EVERY_NODE, "Swarm says that no node has two"


def test_a_bound_is_kept_and_nodes_that_take_nothing_do_not_count() -> None:
    tasks = [task("n1"), task("n1"), task("n2")]
    assert narrowing(spec(limit=2), SwarmListing((), tasks, THREE)) == Narrowing(("node.id!=n1",), ("node.id!=n2",))
    assert narrowing(spec(limit=1), SwarmListing((), tasks, THREE)) == Narrowing(("node.id!=n1", "node.id!=n2"))
    gone = [node("n1"), node("n2", Availability="pause"), node("n3", State="down")]
    assert narrowing(spec(), SwarmListing((), [task("n1")], gone)) == EVERY_NODE


@pytest.mark.parametrize(
    ("constraint", "is_met"),
    [
        ("node.role==WORKER", True),
        ("node.role != worker", False),
        ("node.labels.zone==a", True),
        ("node.labels.rack!=r1", True),
        ("node.labels.rack==r1", False),
        ("node.hostname==N1", True),
        ("node.platform.os==windows", True),
        ("node.ip==10.0.0.0/8", True),
        ("nonsense", True),
    ],
)
def test_constraints_as_swarm_reads_them(constraint: str, is_met: bool) -> None:
    """One that is about something else is left to Swarm."""
    assert fits(Node("n1", labels={"zone": "a"}), [constraint]) is is_met
