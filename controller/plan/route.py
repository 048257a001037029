"""The target state of HAProxy: routes, waiting rooms, and a server for each ready replica and no other container."""

from __future__ import annotations

from ..model.actions import (
    AddServer,
    RemoveContainer,
    RestartRouter,
    SetServerWeight,
    SetWaitingRoom,
    WriteKeys,
    WriteRouting,
)
from ..model.phases import Phase
from ..model.spec import ServiceSpec, backend_name
from ..model.world import ContainerState, Server, ServerState, service_address
from .draft import Draft
from .outlook import ReplicaOutlook, ServiceOutlook
from .shares import weights

ROUTER = "haproxy"
"""HAProxy's Compose service."""
MOST_DOUBLINGS = 5
"""The pause between restarts of HAProxy that do not help grows to 2^5 times the silence before the first one."""


def restart_router(draft: Draft) -> None:
    """Restart a HAProxy that hangs, each time after twice as long."""
    silence = draft.observed.router_silence
    if silence is None or ROUTER in draft.busy or draft.observed.brake:
        return
    silent_s = draft.now - silence.since
    left_s = draft.desired.router_silence_s * 2 ** min(silence.restarts, MOST_DOUBLINGS) - silent_s
    if left_s > 0:
        draft.look_again_in(left_s)
        return
    cause = f"HAProxy hangs: neither its runtime API nor its HTTP port has answered for {silent_s:.0f} s"
    draft.add(RestartRouter(target=ROUTER, cause=cause))


def register(draft: Draft, outlook: ServiceOutlook) -> None:
    """Register ready replicas with address, state and weight; delete servers that lead to another container."""
    spec = outlook.spec
    if spec is None or not spec.is_routed or not draft.routing_usable:
        return
    shares = _server_weights(outlook)
    for replica in outlook.alive():
        # A server whose replica is not known to be ready stays: HAProxy's own check keeps traffic away, and a
        # controller that has just started, or is on a busy machine, must not remove what serves.
        server = draft.server_of(outlook.name, replica.name)
        if replica.busy:
            continue
        if server and replica.container.state.is_up and service_address(replica.container, spec) is None:
            # Docker may give the address to another container.
            draft.delete_server(server, outlook.name, "the replica has lost its network address", force=True)
        elif replica.phase is Phase.RUNNING:
            _register_ready(draft, outlook, spec, replica, server, shares[int(_is_former(outlook, replica))])
        elif server and _leads_elsewhere(draft, spec, replica, server):
            # The server is of an earlier container of that name, and its address may be another container's by now.
            _delete_former(draft, outlook.name, server, "its replica is gone, another one has its name")


def _leads_elsewhere(draft: Draft, spec: ServiceSpec, replica: ReplicaOutlook, server: Server) -> bool:
    """Whether a server leads to another address than that of a replica that is not ready.

    Of a node that is down perhaps the managers alone are cut off. What ran there may still answer, and until then the
    engine gives no other container its address.
    """
    if replica.is_kept or server.address == service_address(replica.container, spec):
        return False
    may_be_lost = any(node.state == "down" for node in draft.observed.nodes)
    return not (may_be_lost and server.up and replica.container.state is ContainerState.PENDING)


def _delete_former(draft: Draft, service: str, server: Server, cause: str) -> int | None:
    """Delete the server of an earlier container of that name. Returns the last step's number; None = not yet.

    What still answers runs on a node that the managers alone do not reach. It gets no request any more, and until the
    next plan to finish those that it has.
    """
    if server.up and server.sessions and server.state is not ServerState.MAINT:
        draft.set_server(service, server.name, ServerState.MAINT, cause)
        return None
    return draft.delete_server(server, service, cause, force=True)


def _register_ready(
    draft: Draft,
    outlook: ServiceOutlook,
    spec: ServiceSpec,
    replica: ReplicaOutlook,
    server: Server | None,
    weight: int,
) -> None:
    address = service_address(replica.container, spec)
    if address is None:
        return
    deleted: int | None = None
    if server and server.address != address:
        deleted = _delete_former(draft, outlook.name, server, f"the replica moved to {address}")
        if deleted is None:
            return
        server = None
    if server is None:
        add = AddServer(
            target=replica.name,
            service=outlook.name,
            backend=backend_name(outlook.name),
            address=address,
            weight=weight,
            spec=spec,
            cause="its replica is ready",
        )
        # Only a backend that is new waits for the reload, as a reload may fail.
        is_new = draft.observed.routing is None or add.backend not in draft.observed.routing.backends
        draft.add(add, draft.routing_step if is_new else None, deleted)
    elif server.state is not ServerState.READY:
        draft.set_server(outlook.name, replica.name, ServerState.READY, "its replica is ready")
    elif server.weight != weight:
        percent = outlook.goal.weight
        cause = f"{outlook.version} is tried with {percent} % of the requests" if percent else "no version is tried"
        names = {"target": replica.name, "service": outlook.name, "backend": server.backend, "cause": cause}
        draft.add(SetServerWeight(**names, weight=weight))


def _is_former(outlook: ServiceOutlook, replica: ReplicaOutlook) -> bool:
    return outlook.version is not None and replica.container.version != outlook.version


def _server_weights(outlook: ServiceOutlook) -> tuple[int, int]:
    """Weight of a server of the wanted version, and of one of any other."""
    if outlook.goal.keep is None:
        return 1, 1
    serving = [_is_former(outlook, replica) for replica in outlook.alive() if replica.is_ready]
    return weights(outlook.goal.weight, serving.count(False), serving.count(True))


# ----------------------------------------------------------------------------------------------------
# Routes: what HAProxy serves as a whole, and which services hold requests until a replica is ready.


def write_keys(draft: Draft) -> None:
    """Plan that HAProxy gets the clients' keys where it has others, before it has routes that ask for them."""
    routing, wanted = draft.observed.routing, draft.desired.keys
    if not draft.routing_usable or routing is None or not wanted.digest or routing.keys == wanted.digest:
        return
    if not any(isinstance(action, WriteKeys) for action in draft.observed.in_progress):
        cause = f"HAProxy has the keys {routing.keys or 'of nobody'}, wanted are {wanted.digest}"
        # Each set of keys has retries of its own: a revoked key does not wait because others could not be written.
        draft.keys_step = draft.add(WriteKeys(target=f"keys {wanted.digest}", keys=wanted, cause=cause))


def write_routing(draft: Draft) -> None:
    """Plan another configuration where the services need other routes than HAProxy has."""
    routing = draft.observed.routing
    if not draft.routing_usable or routing is None or not draft.desired.routing_hash:
        return
    if routing.routing_hash == draft.desired.routing_hash:
        return
    routed = tuple(spec for _, spec in sorted(draft.desired.services.items()) if spec.is_routed)
    cause = f"HAProxy runs routes {routing.routing_hash or 'none'}, the services need {draft.desired.routing_hash}"
    action = WriteRouting(target="routing", services=routed, routing_hash=draft.desired.routing_hash, cause=cause)
    draft.routing_step = draft.add(action, draft.keys_step)


def set_waiting_rooms(draft: Draft) -> None:
    """Open and close waiting rooms of backends that HAProxy has. A new HAProxy process begins with all of them open."""
    routing = draft.observed.routing
    if not draft.routing_usable or routing is None or draft.routing_step is not None:
        return
    changing = {action.backend for action in draft.observed.in_progress if isinstance(action, SetWaitingRoom)}
    for name in sorted(draft.desired.services):
        backend, is_open = backend_name(name), name not in draft.desired.switched_off
        if backend not in routing.backends or backend in changing or is_open == (backend not in routing.closed):
            continue
        cause = "replicas are wanted again" if is_open else "0 wanted, and no request wakes it"
        draft.add(SetWaitingRoom(target=name, service=name, backend=backend, is_open=is_open, cause=cause))


# ----------------------------------------------------------------------------------------------------
# Strays: containers that Compose started as replicas, and servers whose container is gone.


def remove_strays(draft: Draft) -> None:
    """Remove containers that `docker compose up --scale` started: Compose pins them to no GPU."""
    for stray in sorted(draft.observed.strays, key=lambda stray: stray.name):
        if stray.name in draft.busy or stray.service not in draft.desired.services:
            continue
        cause = f"started by Compose, which pins no GPU: use `pierhead scale {stray.service} ...` instead"
        draft.add(
            RemoveContainer(target=stray.name, service=stray.service, container_id=stray.id, force=True, cause=cause)
        )


def delete_ghost_servers(draft: Draft) -> None:
    """Delete servers whose container is gone."""
    known = {(backend_name(c.service), c.name) for c in draft.observed.containers}
    for server in sorted(draft.servers(), key=lambda server: (server.backend, server.name)):
        if (server.backend, server.name) not in known and server.name not in draft.busy:
            service = server.backend.removeprefix(backend_name(""))
            draft.delete_server(server, service, "no container of that name exists")
