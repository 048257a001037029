"""What HAProxy is told of services as a whole: their routes, and whether requests wait for replicas."""

from __future__ import annotations

from controller.model import SetWaitingRoom, WriteRouting, backend_name
from controller.planning.draft import Draft


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
    draft.routing_step = draft.add(action)


def set_waiting_rooms(draft: Draft) -> None:
    """Open and close waiting rooms of backends that HAProxy has.

    A process that begins has all of them open: they are closed again.
    """
    routing = draft.observed.routing
    if not draft.routing_usable or routing is None or draft.routing_step is not None:
        return
    changing = {action.backend for action in draft.observed.in_progress if isinstance(action, SetWaitingRoom)}
    for name in sorted(draft.desired.services):
        backend, is_open = backend_name(name), name not in draft.desired.switched_off
        if backend not in routing.backends or backend in changing or is_open == (backend not in routing.closed):
            continue
        cause = "it shall have replicas again" if is_open else "0 wanted, and no request wakes it"
        draft.add(SetWaitingRoom(target=name, service=name, backend=backend, is_open=is_open, cause=cause))
