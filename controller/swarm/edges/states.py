"""Several edges as one: what the planner sees of them, and why an edge differs from the others. Pure.

A server is ready when it is so at every edge that runs the wanted routes. One that takes requests at some edges and not
at others is PARTLY ready, so the planner sees that it has to act, whether it wants the server ready or drained: each
action goes to all edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

from ...model.world import HeldRequests, RoutingState, Server, ServerState

DISAGREE = 0
"""The weight of a server that has several: no server is given it."""

Place = tuple[str, str]
"""Backend and server."""
_Count = tuple[int, ...]
"""Answers, and errors among them; of a waiting room, what it held by how that ended."""
ENDINGS = ("served", "expired", "left", "refused")
ROOM = ""
"""In the place of a server's name: the backend's waiting room."""


def hash_in_force(states: Iterable[RoutingState], published: str) -> str:
    """The hash of the routes that count: those published last once an edge runs them, else those of most edges."""
    found = [state.routing_hash for state in states]
    return published if published in found else usual(found)


def merged(states: Mapping[str, RoutingState], published: str) -> RoutingState:
    """The edges that answer (at least one) as one HAProxy. Sessions, queues and counts are added up.

    Edges with other routes than those that count are being changed: what they send counts, what they lack does not.
    """
    routing_hash = hash_in_force(states.values(), published)
    current = [state for state in states.values() if state.routing_hash == routing_hash]
    places = sorted({place for state in states.values() for place in state.by_place})
    return RoutingState(
        pid=0,
        started_at=0.0,
        version=min(state.version for state in states.values()),
        routing_hash=routing_hash,
        servers=tuple(
            _server(
                [state.by_place[place] for state in states.values() if place in state.by_place],
                [state.by_place.get(place) for state in current],
            )
            for place in places
        ),
        backends=frozenset.intersection(*(state.backends for state in current)),
        queued=_added(state.queued for state in states.values()),
        held=_held(states.values()),
        closed=frozenset.intersection(*(state.closed for state in current)),
        keys=current[0].keys if len({state.keys for state in current}) == 1 else "",
    )


def _server(seen: list[Server], at_current: list[Server | None]) -> Server:
    """One server of all edges: `seen` where they have it, `at_current` at each edge whose routes count."""
    address = usual(server.address for server in seen)
    there = [server if server and server.address == address else None for server in at_current]
    found = [server for server in there if server] or seen
    weights = {server.weight for server in found}
    return replace(
        found[0],
        address=address,
        state=_state(seen, there),
        up=all(server.up for server in found),
        is_asked=all(server.is_asked for server in found),
        weight=weights.pop() if len(weights) == 1 else DISAGREE,
        sessions=sum(server.sessions for server in seen),
        queued=sum(server.queued for server in seen),
        answered=sum(server.answered for server in seen),
        errors=sum(server.errors for server in seen),
        limit=sum(server.limit for server in seen),
    )


def usual(values: Iterable[str]) -> str:
    """The value that most edges have; of several such, the first by the alphabet."""
    found = Counter(values)
    return min(found, key=lambda one: (-found[one], one))


def _state(seen: list[Server], there: list[Server | None]) -> ServerState:
    if there and all(server and server.state is ServerState.READY for server in there):
        return ServerState.READY
    states = {server.state for server in seen}
    for state in (ServerState.READY, ServerState.DRAIN):
        if state in states:
            return ServerState.PARTLY if state is ServerState.READY else state
    return ServerState.MAINT


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def _held(states: Iterable[RoutingState]) -> dict[str, HeldRequests]:
    total: dict[str, HeldRequests] = {}
    for state in states:
        for backend, held in state.held.items():
            before = total.get(backend, HeldRequests())
            sums = {one.name: getattr(before, one.name) + getattr(held, one.name) for one in fields(HeldRequests)}
            total[backend] = HeldRequests(**sums)
    return total


def differences(states: Mapping[str, RoutingState], whole: RoutingState) -> dict[str, str]:
    """The edges that are not as most others, each with the reason in words."""
    current = {name: state.by_place for name, state in states.items() if state.routing_hash == whole.routing_hash}
    wrong: dict[str, list[str]] = {name: [] for name in current}
    for server in whole.servers:
        if server.state is ServerState.PARTLY:
            takes = {name: _takes(one.get((server.backend, server.name)), server) for name, one in current.items()}
            most = 2 * sum(takes.values()) >= len(takes)
            for name in (name for name, one in takes.items() if one is not most):
                wrong[name].append(f"{server.backend}/{server.name}")
    keys = usual(states[name].keys for name in current)
    words = {name: "it has other keys of clients than the others" for name in current if states[name].keys != keys}
    words |= {
        name: f"it differs from the others in {len(servers)} servers, first {servers[0]}"
        for name, servers in wrong.items()
        if servers
    }
    ours = whole.routing_hash or "none"
    other = {name: state.routing_hash or "none" for name, state in states.items() if name not in current}
    return words | {name: f"it runs routes {theirs}, the others {ours}" for name, theirs in other.items()}


def _takes(mine: Server | None, server: Server) -> bool:
    return mine is not None and mine.address == server.address and mine.state is ServerState.READY


class Counts:
    """Answers and errors of each server at all edges, and how the waits of each backend ended. They never go down while
    that exists.

    An edge that restarts counts from 0, and one that is away is not in the sum: what it had counted is kept.
    """

    def __init__(self) -> None:
        self._last: dict[Place, dict[str, _Count]] = {}
        """By server or room, and edge."""
        self._kept: dict[Place, _Count] = {}
        """What was counted before restarts, by server or room."""

    def added_up(self, states: Mapping[str, RoutingState], whole: RoutingState) -> RoutingState:
        """The whole with everything that was ever counted."""
        rooms = {(backend, ROOM) for backend in whole.backends | whole.held.keys()}
        for place in self._last.keys() - whole.by_place.keys() - rooms:
            del self._last[place]
            self._kept.pop(place, None)
        for edge, state in states.items():
            for server in state.servers:
                self._note(edge, (server.backend, server.name), (server.answered, server.errors))
            for backend, held in state.held.items():
                self._note(edge, (backend, ROOM), tuple(getattr(held, ending) for ending in ENDINGS))
        return replace(
            whole,
            servers=tuple(self._counted(server) for server in whole.servers),
            held={backend: self._held(backend, whole) for backend, name in self._last if name == ROOM},
        )

    def _note(self, edge: str, place: Place, now: _Count) -> None:
        at_edges = self._last.setdefault(place, {})
        last = at_edges.get(edge, now)
        if any(count < before for count, before in zip(now, last, strict=True)):
            self._kept[place] = _sums(last, self._kept.get(place, (0,) * len(now)))
        at_edges[edge] = now

    def _sum(self, place: Place) -> _Count:
        counts = self._last[place].values()
        return _sums(*counts, *([self._kept[place]] if place in self._kept else []))

    def _counted(self, server: Server) -> Server:
        answered, errors = self._sum((server.backend, server.name))
        return replace(server, answered=answered, errors=errors)

    def _held(self, backend: str, whole: RoutingState) -> HeldRequests:
        now = whole.held.get(backend, HeldRequests()).now
        return HeldRequests(now, **dict(zip(ENDINGS, self._sum((backend, ROOM)), strict=True)))


def _sums(*counts: _Count) -> _Count:
    return tuple(map(sum, zip(*counts, strict=True)))
