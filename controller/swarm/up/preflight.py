"""What would keep a stack from working on this Swarm, found before anything is changed. Pure.

A problem ends `make up`; a warning is only told, and so is what no manager can see: 4789/udp and 7946/udp between two
nodes (an open UDP port answers nothing), live-restore and the toolkit of another node. That shows when the first tasks
run there.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from ..names import STACK_LABEL, Json, node_address, node_name
from .facts import GOSSIP_PORT, MANAGER_PORT, SwarmFacts
from .images import OWN_REGISTRY_PORT

LONGEST_PROJECT = 34
"""Swarm allows 63 characters for the name of a service; a replica's has service, version and number after this one."""
CLOCK_OFF_S = 60.0
RECENT_S = 24 * 3600.0
TASK_LABEL = "com.docker.swarm.task"
_OPEN = "open 2377/tcp, 7946/tcp and udp, 4789/udp between all nodes"


@dataclass(frozen=True, slots=True)
class Findings:
    """One sentence each."""

    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What was not seen."""


def check(facts: SwarmFacts) -> Findings:
    """Everything that the facts say. Where this machine is no manager of a Swarm that answers, only that."""
    if membership := tuple(_membership(facts)):
        return Findings(membership, ())
    problems = (*_settings(facts), *_names(facts), *_closed(facts), *_networks(facts), *_ports(facts))
    warnings = (*_managers(facts.nodes), *_absent(facts.nodes), *_pools(facts), *clocks(facts.nodes, facts.tasks))
    return Findings((*problems, *_registry(facts)), warnings, tuple(_unseen(facts)))


# --------------------------------------------------------------------------------------------------------- this machine


def _membership(facts: SwarmFacts) -> Iterator[str]:
    swarm = facts.info.get("Swarm") or {}
    state, managers = swarm.get("LocalNodeState"), [one["Addr"] for one in swarm.get("RemoteManagers") or ()]
    if state in ("inactive", "", None):
        yield "this machine is in no Swarm: `pierhead node init` makes it the first manager of one"
    elif state != "active":
        yield (
            f"this machine's membership of its Swarm is {state} ({swarm.get('Error') or 'no reason given'}): bring its "
            "managers up (`docker info`), or leave it with `docker swarm leave --force`"
        )
    elif not swarm.get("ControlAvailable"):
        yield (
            f"this machine, {facts.info.get('Name')}, is a worker of its Swarm: type this on a manager "
            f"({', '.join(managers)}), or make it one there with `docker node promote {facts.info.get('Name')}`"
        )
    elif facts.no_answer:
        yield (
            f"nothing can be changed in the Swarm ({facts.no_answer}): more than half of its managers must be up "
            f"({', '.join(managers)}); running services are not affected"
        )


def _settings(facts: SwarmFacts) -> Iterator[str]:
    if facts.info.get("LiveRestoreEnabled"):
        yield (
            "live-restore is on in this engine, which a Swarm does not allow: the engine would not come up after "
            "its next restart; `pierhead node init` turns it off"
        )
    if len(facts.project) > LONGEST_PROJECT:
        yield (
            f'COMPOSE_PROJECT_NAME: "{facts.project}" has {len(facts.project)} characters, and {LONGEST_PROJECT} leave '
            "room for the names of replicas: choose a shorter one"
        )


# ---------------------------------------------------------------------------------------------------------------- nodes


def _managers(nodes: Sequence[Json]) -> Iterator[str]:
    managers = [node for node in nodes if node["Spec"].get("Role") == "manager"]
    up = [node for node in managers if (node.get("ManagerStatus") or {}).get("Reachability") == "reachable"]
    names = ", ".join(sorted(map(node_name, managers)))
    if len(managers) < 3:
        losing = "it is lost" if len(managers) == 1 else "one of them is lost"
        yield (
            f"the Swarm has {len(managers)} manager{'s' if len(managers) > 1 else ''} ({names}): when {losing}, "
            "running services are not affected, but nothing is healed, scaled or deployed; with three, one may be lost "
            "(`pierhead node token --manager`, `docker node promote`)"
        )
    elif len(up) < len(managers) and len(up) <= len(managers) // 2 + 1:
        away = ", ".join(sorted(node_name(node) for node in managers if node not in up))
        yield f"{away} is not reachable: when one more of the managers ({names}) is lost, nothing can be changed"


def _names(facts: SwarmFacts) -> Iterator[str]:
    """Edges, events and the status tell nodes apart by their hostnames."""
    by_name: dict[str, list[Json]] = {}
    for node in facts.nodes:
        by_name.setdefault(node_name(node), []).append(node)
    for name, nodes in sorted(by_name.items()):
        gone = [node["ID"] for node in nodes if node["Status"]["State"] == "down"]
        if len(nodes) > 1:
            remedy = (
                f"`docker node rm {' '.join(gone)}` removes those that are down"
                if gone
                else "`hostnamectl set-hostname` on one of them, and restart its engine"
            )
            ids = ", ".join(node["ID"] for node in nodes)
            yield f"{len(nodes)} nodes are called {name} ({ids}), and names must distinguish nodes: {remedy}"


def _absent(nodes: Sequence[Json]) -> Iterator[str]:
    for name in sorted(node_name(node) for node in nodes if node["Status"]["State"] == "down"):
        yield f"{name} is down: it gets no replicas and takes no requests until it is back"


def _closed(facts: SwarmFacts) -> Iterator[str]:
    for node in facts.nodes:
        name, address = node_name(node), node_address(node)
        manages = node["Spec"].get("Role") == "manager"
        if (address, GOSSIP_PORT) in facts.closed and node["Spec"].get("Availability") == "active":
            yield (
                f"{name} takes no connection at {address}, port {GOSSIP_PORT}, so replicas there would not be "
                f"reached: {_OPEN}, or keep replicas off it with `docker node update --availability drain {name}`"
            )
        elif (address, MANAGER_PORT) in facts.closed and manages:
            yield (
                f"{name} is a manager and takes no connection at {address}, port {MANAGER_PORT}: no node could follow "
                f"it when it becomes the leader; {_OPEN}, or make it a worker with `docker node demote {name}`"
            )


def _unseen(facts: SwarmFacts) -> Iterator[str]:
    """Told before the first `up` of a stack, when ports are the likeliest reason of what follows."""
    is_there = any((one["Spec"].get("Labels") or {}).get(STACK_LABEL) == facts.project for one in facts.services)
    if len(facts.nodes) > 1 and not is_there:
        yield (
            "whether 4789/udp and 7946/udp are open between the nodes cannot be seen from here. Where 4789/udp is "
            "closed, replicas on that node run and are never ready; where 7946/udp is, they are found late, or not at "
            "all. live-restore of other engines cannot be seen either; `node init` and `node join` turn it off"
        )


def clocks(nodes: Sequence[Json], tasks: Iterable[Json]) -> Iterator[str]:
    """Nodes whose clock is off, by the newest task of each: its state has the node's time, its record the leader's."""
    newest: dict[str, Json] = {}
    for task in sorted(tasks, key=lambda task: str(task["CreatedAt"])):
        if task["Status"]["State"] == "running":
            newest[str(task.get("NodeID"))] = task
    latest = max((_time(task["CreatedAt"]) for task in newest.values()), default=0.0)
    for node in nodes:
        found = newest.get(node["ID"])
        if found is None or latest - _time(found["CreatedAt"]) > RECENT_S:
            continue
        told = _time(found["Status"]["Timestamp"])
        ahead, behind = told - _time(found["UpdatedAt"]), _time(found["CreatedAt"]) - told
        off, words = max((ahead, "ahead of"), (behind, "behind"))
        if off > CLOCK_OFF_S:
            yield (
                f"the clock of {node_name(node)} is {off:.0f} s {words} that of the Swarm's leader: certificates and "
                "measurements go by it; set it (timedatectl set-ntp true)"
            )


# ----------------------------------------------------------------------------------------------------- networks, ports


def _networks(facts: SwarmFacts) -> Iterator[str]:
    """Overlay networks that are there. Swarm's ingress network is not used."""
    for network in facts.networks:
        subnets = [
            config["Subnet"] for config in (network.get("IPAM") or {}).get("Config") or () if config.get("Subnet")
        ]
        for subnet in subnets if network.get("Name") != "ingress" else ():
            for place in _overlapping(subnet, facts):
                yield (
                    f"the overlay network {network['Name']} has the addresses {subnet}, and so has {place}: what is "
                    f"sent there stays in the overlay; `docker network rm {network['Name']}`, and set up a Swarm with "
                    "other addresses (`pierhead node init` on its first manager)"
                )


def _pools(facts: SwarmFacts) -> Iterator[str]:
    for pool in facts.pools:
        if places := sorted(set(_overlapping(pool, facts))):
            yield (
                f"overlay networks get addresses from {pool}, which {', '.join(places)} is in: a network that gets "
                "those would hide it; a new Swarm made with `pierhead node init` uses others"
            )


def _overlapping(subnet: str, facts: SwarmFacts) -> Iterator[str]:
    """What a range of addresses would hide: networks of this machine, other nodes."""
    whole = ipaddress.ip_network(subnet, strict=False)
    own = [ipaddress.ip_network(network) for network in facts.own_networks]
    yield from (f"this machine's network {one}" for one in own if one.version == whole.version and one.overlaps(whole))
    for node in facts.nodes:
        address = _parsed(node_address(node))
        if address is not None and address in whole and not any(address in network for network in own):
            yield f"{node_name(node)}'s address {address}"


def _ports(facts: SwarmFacts) -> Iterator[str]:
    """Ports that something else has: services on any node, containers and programs on this one."""
    others = [one for one in facts.containers if TASK_LABEL not in (one.get("Labels") or {})]
    used = [*map(_publishes, facts.services), *map(_container, others)]
    for port in facts.ports:
        holders = {who: project for who, project, ports in used if port in ports}
        in_the_way = [who for who, project in holders.items() if project != facts.project]
        if not holders and port in facts.taken:
            in_the_way = [f"a program on {facts.info.get('Name')} (`ss -ltnp`)"]
        if in_the_way:
            yield (
                f"port {port} is taken by {', '.join(in_the_way)}: stop that, or choose another port for every node "
                "(PIERHEAD_HTTP_PORT, PIERHEAD_GRPC_PORT, PIERHEAD_HTTPS_PORT)"
            )


_Holder = tuple[str, str, frozenset[int]]
"""Who has ports, the project that it is of, the ports."""


def _publishes(service: Json) -> _Holder:
    spec = service["Spec"]
    ports = (spec.get("EndpointSpec") or {}).get("Ports") or ()
    project = (spec.get("Labels") or {}).get(STACK_LABEL, "")
    return f"the service {spec['Name']}", project, frozenset(int(port.get("PublishedPort") or 0) for port in ports)


def _container(container: Json) -> _Holder:
    ports = frozenset(int(port.get("PublicPort") or 0) for port in container.get("Ports") or ())
    return f"the container {container['Names'][0].lstrip('/')}", "", ports


# ------------------------------------------------------------------------------------------------------------- registry


def _registry(facts: SwarmFacts) -> Iterator[str]:
    host, says = facts.registry, facts.registry_says
    has_own = any(one["Spec"]["Name"] == f"{facts.project}_registry" for one in facts.services)
    if host and says not in ("", "https", "http"):
        yield (
            f"PIERHEAD_REGISTRY: the registry {host} is not reached from {facts.info.get('Name')} ({says}): check its "
            "name and that it runs, or write `here` for one of the stack's own"
        )
    elif host and not says and OWN_REGISTRY_PORT in facts.taken and not has_own:
        holders = [who for who, _, ports in map(_publishes, facts.services) if OWN_REGISTRY_PORT in ports]
        by = f" by {', '.join(holders)}" if holders else ""
        yield (
            f"PIERHEAD_REGISTRY: `here` starts a registry at port {OWN_REGISTRY_PORT} of {facts.info.get('Name')}, "
            f"which is taken{by}: if a registry is there already, write PIERHEAD_REGISTRY={host}; "
            "otherwise stop what listens there"
        )
    elif host and says != "https" and not _is_trusted(facts.info, host):
        yield (
            f"PIERHEAD_REGISTRY: {host} has no TLS, so this engine refuses it: "
            f"`pierhead node init --registry {host}` here, and --registry with `node join` on every other node"
        )


def _is_trusted(info: Json, host: str) -> bool:
    """Whether the engine speaks plain HTTP to it."""
    config = info.get("RegistryConfig") or {}
    if (config.get("IndexConfigs") or {}).get(host, {}).get("Secure") is False:
        return True
    address = _parsed(host.rpartition(":")[0].strip("[]") or host)
    ranges = [ipaddress.ip_network(one) for one in config.get("InsecureRegistryCIDRs") or ()]
    return address is not None and any(address in one for one in ranges)


# ---------------------------------------------------------------------------------------------------------------- parts


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return None


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
