"""Who is ready gets a server in HAProxy, and only who is ready."""

from __future__ import annotations

from controller.model import AddServer, Server, ServerState, ServiceSpec, SetServerWeight, backend_name, service_address
from controller.phases import Phase
from controller.planning.draft import Draft
from controller.planning.outlook import ReplicaOutlook, ServiceOutlook
from controller.shares import weights


def register(draft: Draft, outlook: ServiceOutlook) -> None:
    """Give who is ready a server of its address, state and weight; take those away that lead to somebody else."""
    spec = outlook.spec
    if spec is None or not spec.is_routed or not draft.routing_usable:
        return
    shares = _server_weights(outlook)
    for replica in outlook.alive():
        # A server whose replica is not known to be ready stays: HAProxy asks the same question and keeps traffic away,
        # while a controller that has just started, or a busy machine, must not take away what serves.
        server = draft.server_of(outlook.name, replica.name)
        if replica.busy:
            continue
        if replica.phase is Phase.RUNNING:
            _register_ready(draft, outlook, spec, replica, server, shares[int(replica.outdated)])
        elif server and server.address != service_address(replica.container, spec):
            # Of a container that had its name before: somebody else may have the address by now.
            draft.delete_server(server, outlook.name, "its replica is gone, another one has its name", force=True)


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
        deleted = draft.delete_server(server, outlook.name, f"the replica moved to {address}", force=True)
        server = None
    if server is None:
        add = AddServer(
            target=replica.name,
            service=outlook.name,
            backend=backend_name(outlook.name),
            address=address,
            weight=weight,
            cause="its replica is ready",
        )
        draft.add(add, draft.routing_step if _needs_reload(draft, add.backend) else None, deleted)
    elif server.state is not ServerState.READY:
        draft.set_server(outlook.name, replica.name, ServerState.READY, "its replica is ready")
    elif server.weight != weight:
        percent = outlook.goal.weight
        cause = f"{outlook.version} is tried with {percent} % of the requests" if percent else "no version is tried"
        names = {"target": replica.name, "service": outlook.name, "backend": server.backend, "cause": cause}
        draft.add(SetServerWeight(**names, weight=weight))


def _server_weights(outlook: ServiceOutlook) -> tuple[int, int]:
    """Weight of a server of the wanted version, and of one of any other."""
    if outlook.goal.keep is None:
        return 1, 1
    serving = [replica.outdated for replica in outlook.alive() if replica.is_ready]
    return weights(outlook.goal.weight, serving.count(False), serving.count(True))


def _needs_reload(draft: Draft, backend: str) -> bool:
    """Whether the backend comes only with the new routes: a reload that fails must not keep others from scaling."""
    return draft.observed.routing is None or backend not in draft.observed.routing.backends
