"""What a manager's API, and this machine, tell about a Swarm before a stack is deployed there. Blocking."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import docker.errors
from docker import APIClient

from ..names import Json, node_address
from ..nodes.engine_settings import networks_in
from .images import OWN_REGISTRY_PORT

GOSSIP_PORT, MANAGER_PORT = 7946, 2377
ANSWER_S = 2.0
ROUTES = Path("/proc/net/route")

_One = TypeVar("_One")


@dataclass(frozen=True, slots=True)
class SwarmFacts:
    """What was seen. Nodes, services, tasks and networks as the API lists them."""

    project: str
    ports: tuple[int, ...]
    """Those on which every node is to take requests."""
    info: Json
    """What the engine says about itself."""
    no_answer: str = ""
    """What the manager says instead of answering."""
    nodes: Sequence[Json] = ()
    services: Sequence[Json] = ()
    tasks: Sequence[Json] = ()
    networks: Sequence[Json] = ()
    pools: Sequence[str] = ()
    """Where overlay networks get their addresses from."""
    containers: Sequence[Json] = ()
    """Those of this machine."""
    own_networks: Sequence[str] = ()
    """Networks that this machine is in."""
    taken: frozenset[int] = frozenset()
    """Ports of `ports`, and that of the stack's own registry, at which something listens here."""
    closed: frozenset[tuple[str, int]] = frozenset()
    """Addresses and ports of other nodes (GOSSIP_PORT, a manager's MANAGER_PORT) that take no connection."""
    registry: str = ""
    """host:port; "" = none."""
    registry_says: str = ""
    """ "https", "http", or why it cannot be reached; "" = it was not asked, as the stack is to start it."""


def gather(
    client: APIClient, project: str, ports: tuple[int, ...], registry: Callable[[], str], *, is_own: bool
) -> SwarmFacts:
    """Look at everything. `registry` gives host:port[/path]; `is_own`: the stack starts it. Raises DockerException."""
    info: Json = client.info()
    if not info.get("Swarm", {}).get("ControlAvailable"):
        return SwarmFacts(project, ports, info)
    try:
        nodes, swarm = client.nodes(), client.inspect_swarm()
    except docker.errors.APIError as error:
        return SwarmFacts(project, ports, info, no_answer=str(error.explanation or error))
    me = info["Swarm"].get("NodeID")
    host = registry().partition("/")[0]
    wanted = (*ports, OWN_REGISTRY_PORT) if is_own else ports
    others = [node for node in nodes if node["ID"] != me and node["Status"]["State"] == "ready"]
    doors = {(node_address(node), GOSSIP_PORT) for node in others}
    doors |= {(node_address(node), MANAGER_PORT) for node in others if node["Spec"].get("Role") == "manager"}
    return SwarmFacts(
        project,
        ports,
        info,
        nodes=nodes,
        services=client.services(),  # type: ignore[no-untyped-call]
        tasks=client.tasks({"desired-state": "running"}),  # type: ignore[no-untyped-call]
        networks=client.networks(filters={"driver": "overlay"}),
        pools=swarm.get("DefaultAddrPool") or (),
        containers=client.containers(),
        own_networks=tuple(map(str, networks_in(ROUTES.read_text() if ROUTES.exists() else ""))),
        taken=frozenset(_those(lambda port: _connects("127.0.0.1", port), wanted)),
        closed=frozenset(_those(lambda door: not _connects(*door), doors)),
        registry=host,
        registry_says="" if is_own or not host else registry_says(host),
    )


def registry_says(host: str) -> str:
    """Which way a registry answers, whatever its certificate, or why it does not."""
    name, _, port = host.rpartition(":") if ":" in host else (host, "", "443")
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE  # the engine checks it, by its own settings
    try:
        try:
            connection = http.client.HTTPSConnection(name, int(port), timeout=ANSWER_S, context=trusting)
            connection.request("GET", "/v2/")
            connection.getresponse()
        except ssl.SSLError:
            connection = http.client.HTTPConnection(name, int(port), timeout=ANSWER_S)  # type: ignore[assignment]
            connection.request("GET", "/v2/")
            connection.getresponse()
            return "http"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(getattr(error, "strerror", "") or error) or "no answer"
    return "https"


def _those(is_so: Callable[[_One], bool], all_of: Iterable[_One]) -> list[_One]:
    """Asked all at once."""
    listed = list(all_of)
    with ThreadPoolExecutor(max_workers=16) as pool:
        return [one for one, yes in zip(listed, pool.map(is_so, listed), strict=True) if yes]


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), ANSWER_S).close()
    except OSError:
        return False
    return True
