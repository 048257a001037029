"""What is found before a stack is deployed on a Swarm: one sentence each, from what a manager and this machine say."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import UTC, datetime
from ipaddress import IPv4Network
from types import SimpleNamespace
from typing import Any

import pytest

from controller.swarm.nodes.engine_settings import networks_in
from controller.swarm.up import facts
from controller.swarm.up.facts import SwarmFacts, registry_says
from controller.swarm.up.preflight import check
from tests.harness.http_answers import sends, serving

PROJECT = "shop"


def node(number: int, **changes: Any) -> dict[str, Any]:
    reachable = {"Reachability": "reachable", "Addr": f"192.0.2.{number}:2377"}
    made = {
        "ID": f"id{number}",
        "Spec": {"Role": "manager", "Availability": "active"},
        "Description": {"Hostname": f"n{number}"},
        "Status": {"State": "ready", "Addr": "0.0.0.0"},
        "ManagerStatus": reachable,
    }
    return made | changes


WORKER = {"Spec": {"Role": "worker", "Availability": "active"}, "ManagerStatus": None}
DOWN = {"Status": {"State": "down", "Addr": "192.0.2.3"}, "ManagerStatus": {"Reachability": "unreachable"}}
MANAGES = {"LocalNodeState": "active", "ControlAvailable": True, "RemoteManagers": [{"Addr": "192.0.2.1:2377"}]}
INFO = {"Name": "n1", "Swarm": MANAGES, "LiveRestoreEnabled": False, "RegistryConfig": {"IndexConfigs": {}}}
FINE = SwarmFacts(
    PROJECT,
    (8000, 9000),
    INFO,
    nodes=(node(1), node(2), node(3)),
    pools=("10.0.0.0/8",),
    own_networks=("172.17.0.0/16", "192.0.2.0/24"),
    registry="registry.example:5000",
    registry_says="https",
)


def swarm(**changes: Any) -> SwarmFacts:
    return SwarmFacts(PROJECT, (8000,), INFO | {"Swarm": MANAGES | {"ControlAvailable": False} | changes})


def publishing(project: str, service: str = "web", port: int = 8000) -> dict[str, Any]:
    labels = {"com.docker.stack.namespace": project}
    ports = [{"PublishedPort": port}]
    return {"Spec": {"Name": f"{project}_{service}", "Labels": labels, "EndpointSpec": {"Ports": ports}}}


def own_registry(*services: dict[str, Any]) -> SwarmFacts:
    """PIERHEAD_REGISTRY=here, while something listens at its port."""
    trusted: dict[str, Any] = {"IndexConfigs": {"192.0.2.1:5000": {"Secure": False}}}
    return replace(with_registry("", **trusted), services=services, taken=frozenset({5000}))


def at(second: float) -> str:
    return datetime.fromtimestamp(1_800_000_000 + second, UTC).isoformat().replace("+00:00", ".123456789Z")


def task(number: int, made: float, noted: float, told: float) -> dict[str, Any]:
    """`told`: the time of its state, by its node's clock; the others are by the leader's."""
    status = {"State": "running", "Timestamp": at(told)}
    return {"NodeID": f"id{number}", "CreatedAt": at(made), "UpdatedAt": at(noted), "Status": status}


def overlay(subnet: str, name: str = "shop_default") -> dict[str, Any]:
    return {"Name": name, "IPAM": {"Config": [{"Subnet": subnet}]}}


def with_registry(says: str, host: str = "192.0.2.1:5000", **config: Any) -> SwarmFacts:
    return replace(FINE, registry=host, registry_says=says, info=INFO | {"RegistryConfig": config})


PROBLEMS: dict[str, SwarmFacts] = {
    "this machine is in no Swarm: `pierhead node init`": swarm(LocalNodeState="inactive"),
    "n1, is a worker of its Swarm: type this on a manager (192.0.2.1:2377)": swarm(),
    "this machine's membership of its Swarm is error (no reason given)": swarm(LocalNodeState="error"),
    "nothing can be changed in the Swarm (no leader): more than half of its managers must be up": replace(
        FINE, nodes=(), no_answer="no leader"
    ),
    "live-restore is on in this engine": replace(FINE, info=INFO | {"LiveRestoreEnabled": True}),
    "has 35 characters, and 34 leave room": replace(FINE, project="p" * 35),
    "2 nodes are called n3 (id3, id4), and names must distinguish nodes: `hostnamectl": replace(
        FINE, nodes=(*FINE.nodes, node(3, ID="id4"))
    ),
    "n2 takes no connection at 192.0.2.2, port 7946": replace(
        FINE, closed=frozenset({("192.0.2.2", 7946), ("192.0.2.2", 2377)})
    ),
    "n2 is a manager and takes no connection at 192.0.2.2, port 2377: no node could follow it": replace(
        FINE, closed=frozenset({("192.0.2.2", 2377)})
    ),
    "the overlay network shop_default has the addresses 192.0.2.0/25, and so has this machine's network": replace(
        FINE, networks=[overlay("192.0.2.0/25")]
    ),
    "port 8000 is taken by the service other_web: stop that, or": replace(FINE, services=[publishing("other")]),
    "port 9000 is taken by the container db:": replace(
        FINE, containers=[{"Names": ["/db"], "Ports": [{"PublicPort": 9000}]}], taken=frozenset({9000})
    ),
    "port 9000 is taken by a program on n1 (`ss -ltnp`):": replace(FINE, taken=frozenset({9000})),
    "the registry 192.0.2.1:5000 is not reached from n1 (Connection refused)": with_registry("Connection refused"),
    "port 5000 of n1, which is taken: if a registry is there already, write PIERHEAD_REGISTRY=192.0.2.1:5000": (
        own_registry()
    ),
    "which is taken by the service other_registry:": own_registry(publishing("other", "registry", 5000)),
    "192.0.2.1:5000 has no TLS": with_registry("http"),
    "`pierhead node init --registry 192.0.2.1:5000` here": with_registry("", InsecureRegistryCIDRs=["127.0.0.0/8"]),
}
WARNINGS: dict[str, SwarmFacts] = {
    "the Swarm has 1 manager (n1): when it is lost, running services are not affected, but": replace(
        FINE, nodes=(node(1), node(2, **WORKER), node(3, **WORKER))
    ),
    "the Swarm has 2 managers (n1, n2): when one of them is lost,": replace(FINE, nodes=(node(1), node(2))),
    "n3 is not reachable: when one more of the managers (n1, n2, n3) is lost": replace(
        FINE, nodes=(node(1), node(2), node(3, ManagerStatus=DOWN["ManagerStatus"]))
    ),
    "n4 is down: it gets no replicas": replace(
        FINE, nodes=(*FINE.nodes, node(4, **WORKER | {"Status": DOWN["Status"]}))
    ),
    "the clock of n2 is 120 s ahead of that of the Swarm's leader": replace(
        FINE, tasks=[task(1, 0, 2, 2), task(2, -90, 100, 0), task(2, 0, 2, 122)]
    ),
    "the clock of n2 is 118 s behind that of": replace(FINE, tasks=[task(2, 0, 2, -118), task(3, -90000, 2, 500)]),
    "get addresses from 192.0.2.0/24, which this machine's network 192.0.2.0/24 is in": replace(
        FINE, pools=("10.0.0.0/8", "192.0.2.0/24")
    ),
    "get addresses from 10.0.0.0/8, which n2's address 10.1.2.3 is in": replace(
        FINE, nodes=(node(1), node(2, ManagerStatus={"Reachability": "reachable", "Addr": "10.1.2.3:2377"}), node(3))
    ),
}


@pytest.mark.parametrize("words", PROBLEMS)
def test_a_problem_is_one_sentence_and_nothing_else_is_said(words: str) -> None:
    found = check(PROBLEMS[words])
    assert len(found.problems) == 1
    assert words in found.problems[0]
    assert found.warnings == ()


@pytest.mark.parametrize("words", WARNINGS)
def test_so_is_a_warning(words: str) -> None:
    found = check(WARNINGS[words])
    assert (found.problems, len(found.warnings)) == ((), 1)
    assert words in found.warnings[0]


@pytest.mark.parametrize(
    "seen",
    [
        FINE,
        replace(FINE, services=[publishing(PROJECT)], taken=frozenset({8000})),
        replace(FINE, networks=[overlay("10.0.9.0/24"), overlay("192.0.2.0/25", "ingress")]),
        replace(
            FINE,
            closed=frozenset({("192.0.2.2", 7946)}),
            nodes=(node(1), node(2, Spec=node(2)["Spec"] | {"Availability": "drain"}), node(3)),
        ),
        replace(FINE, tasks=[task(1, 0, 4000, 4000), task(2, 0, 1, 55)]),
        with_registry("http", "127.0.0.1:5000", InsecureRegistryCIDRs=["127.0.0.0/8"]),
        with_registry("", IndexConfigs={"192.0.2.1:5000": {"Secure": False}}),
        replace(FINE, registry="", registry_says=""),
        own_registry(publishing(PROJECT, "registry", 5000)),
    ],
)
def test_nothing_is_said_without_a_reason(seen: SwarmFacts) -> None:
    found = check(seen)
    assert (found.problems, found.warnings) == ((), ())


def test_what_cannot_be_seen_is_said_before_the_first_up_on_several_nodes() -> None:
    [note] = check(FINE).notes
    assert "whether 4789/udp and 7946/udp are open between the nodes cannot be seen from here" in note
    assert "live-restore of other engines" in note
    assert check(replace(FINE, nodes=FINE.nodes[:1])).notes == ()
    assert check(replace(FINE, services=[publishing(PROJECT)])).notes == ()
    assert check(swarm()).notes == ()


def test_the_gossip_port_of_every_other_node_is_tried_and_that_of_managers_at_managers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = set[tuple[str, int]]()

    def connects(address: str, port: int) -> bool:
        tried.add((address, port))
        return (address, port) != ("192.0.2.2", 2377)

    worker = node(3, **WORKER | {"Status": {"State": "ready", "Addr": "192.0.2.3"}})
    listed = [node(1), node(2), worker, node(4, **DOWN)]
    client: Any = SimpleNamespace(
        info=lambda: INFO | {"Swarm": MANAGES | {"NodeID": "id1"}},
        nodes=lambda: listed,
        inspect_swarm=dict,
        services=list,
        tasks=lambda _: [],
        networks=lambda filters: [],
        containers=list,
    )
    monkeypatch.setattr(facts, "_connects", connects)
    found = facts.gather(client, PROJECT, (8000,), lambda: "", is_own=True)
    others = {("192.0.2.2", 7946), ("192.0.2.2", 2377), ("192.0.2.3", 7946)}
    assert tried == {("127.0.0.1", 8000), ("127.0.0.1", 5000), *others}
    assert set(found.closed) == {("192.0.2.2", 2377)}


def test_a_node_that_left_is_named_for_removal() -> None:
    found = check(replace(FINE, nodes=(*FINE.nodes, node(3, ID="id4", **WORKER | {"Status": DOWN["Status"]}))))
    assert "`docker node rm id4` removes those that are down" in found.problems[0]


def test_networks_are_read_as_linux_lists_them() -> None:
    def field(address: Any) -> str:
        return f"{int.from_bytes(address.packed, sys.byteorder):08X}"

    ranges = [IPv4Network(network) for network in ("0.0.0.0/0", "10.1.0.0/16")]
    lines = [f"eth0 {field(one.network_address)} 0 1 0 0 0 {field(one.netmask)} 0 0 0" for one in ranges]
    assert [*map(str, networks_in("\n".join(["Iface Destination ...", *lines])))] == ["10.1.0.0/16"]


def test_a_registry_without_tls_and_one_that_is_not_there() -> None:
    with serving(lambda handler: sends(handler, 401, b"{}")) as url:
        host = url.removeprefix("http://")
        assert registry_says(host) == "http"
    assert registry_says(host) == "Connection refused"
