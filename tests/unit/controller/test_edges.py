"""Many edges as one router: an edge that is away or behind neither blocks nor fails the others, and is brought up."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.errors import RoutingError, RoutingUnreachable
from controller.model.actions import AddServer, DeleteServer, SetServerState, SetServerWeight, SetWaitingRoom
from controller.model.world import HeldRequests, RoutingState, Server, ServerState
from controller.swarm.edges.router import EdgesRouter
from controller.swarm.edges.states import Counts, merged
from tests.fakes.fake_edges import FakeEdges
from tests.harness.edge import observe, service, write_routes

ECHO = service("echo", max_ongoing_requests=10)
BACKEND = "svc_echo"
READY, DRAIN, MAINT, PARTLY = ServerState.READY, ServerState.DRAIN, ServerState.MAINT, ServerState.PARTLY


def add(name: str, weight: int = 1) -> AddServer:
    return AddServer(target=name, backend=BACKEND, address="10.0.0.1:80", spec=ECHO, weight=weight)


def set_to(name: str, state: ServerState) -> SetServerState:
    return SetServerState(target=name, backend=BACKEND, state=state)


async def served(edges: FakeEdges) -> EdgesRouter:
    """A router over edges that have the routes and one server."""
    router = edges.router()
    await write_routes(router, ECHO)
    await router.perform(add("echo-1"))
    return router


async def test_an_edge_that_is_away_fails_nothing_and_is_brought_up_when_it_is_back() -> None:
    edges = FakeEdges()
    router = await served(edges)
    away = edges.edges["n2"]
    away.up = False
    await router.perform(add("echo-2", weight=3))
    await router.perform(set_to("echo-1", DRAIN))
    await router.perform(SetWaitingRoom(target="echo", backend=BACKEND, is_open=False))
    [one, two] = (await observe(router)).servers
    assert (one.state, two.state) == (DRAIN, READY)
    assert router.odd_edges == {"n2": "it does not answer"}
    away.up = True
    for _ in range(3):
        state = await observe(router)
    [one, two] = state.servers
    assert (one.state, two.state, two.weight) == (PARTLY, PARTLY, 3), "it still has the one and lacks the other"
    assert router.odd_edges == {"n2": "it differs from the others in 2 servers, first svc_echo/echo-1"}
    await router.perform(set_to("echo-2", READY))
    await router.perform(set_to("echo-1", DRAIN))
    state = await observe(router)
    assert [server.state for server in state.servers] == [DRAIN, READY]
    assert away.servers[BACKEND, "echo-2"].weight == 3
    assert state.closed == {BACKEND}
    assert not router.odd_edges


async def test_an_edge_that_is_ending_is_driven_while_it_answers_and_not_missed_afterwards() -> None:
    """It serves some seconds longer: a replica that is drained in that time must get no request from it either."""
    edges = FakeEdges()
    router = await served(edges)
    edges.leaving.add("n3")
    await observe(router)
    await router.perform(set_to("echo-1", DRAIN))
    assert edges.edges["n3"].servers[BACKEND, "echo-1"].state is DRAIN
    assert (await observe(router)).edge_addresses.keys() == {"n1", "n2", "n3"}
    edges.edges["n3"].up = False
    for _ in range(2):
        state = await observe(router)
    assert state.edge_addresses.keys() == {"n1", "n2"}
    assert not state.away
    assert not router.odd_edges
    edges.edges["n3"].up = True
    assert (await observe(router)).edge_addresses.keys() == {"n1", "n2"}, "only its successor comes back"
    edges.leaving.clear()
    for _ in range(2):
        state = await observe(router)
    assert state.edge_addresses.keys() == {"n1", "n2", "n3"}


@pytest.mark.virtual_time
async def test_an_edge_that_hangs_is_waited_for_once() -> None:
    edges, loop = FakeEdges(), asyncio.get_running_loop()
    router = await served(edges)
    edges.edges["n3"].hangs = True
    took = []
    for _ in range(3):
        begun = loop.time()
        assert [server.state for server in (await observe(router)).servers] == [READY]
        took.append(round(loop.time() - begun, 1))
    assert took == [1.0, 0.0, 0.0]
    await router.close()


async def test_a_refusal_names_the_edge_after_all_others_have_obeyed() -> None:
    edges = FakeEdges()
    router = await served(edges)
    edges.edges["n1"].failing[DeleteServer] = RoutingError("it has new connections")
    with pytest.raises(RoutingError, match=r"^edge n1: it has new connections$"):
        await router.perform(DeleteServer(target="echo-1", backend=BACKEND))
    assert [len(edge.servers) for edge in edges.edges.values()] == [1, 0, 0]
    for edge in edges.edges.values():
        edge.up = False
    with pytest.raises(RoutingUnreachable, match="edge n1: it is away; edge n2"):
        await router.perform(add("echo-2"))
    with pytest.raises(RoutingUnreachable):
        await router.observe()
    assert not await router.http_is_silent(), "no restart of all edges is planned"


@pytest.mark.virtual_time
async def test_an_edge_that_does_not_take_the_routes_is_named_and_counts_for_nothing_but_its_sessions() -> None:
    edges = FakeEdges()
    router = await served(edges)
    edges.edges["n1"].takes_routes = False
    other = service("other")
    await write_routes(router, ECHO, other)
    await router.perform(AddServer(target="other-1", backend="svc_other", address="10.0.0.2:80", spec=other))
    state = await observe(router)
    assert state.routing_hash == router.routing_hash([ECHO, other])
    assert state.backends == {BACKEND, "svc_other"}
    assert [(server.name, server.state) for server in state.servers] == [("echo-1", READY), ("other-1", READY)]
    assert "it runs routes" in router.odd_edges["n1"]
    edges.edges["n1"].takes_routes = True
    edges.fetch()
    assert (await observe(router)).servers[1].state is PARTLY


async def test_a_controller_that_begins_publishes_what_the_edges_run() -> None:
    edges = FakeEdges()
    await served(edges)
    edges.text = ""
    successor = edges.router()
    wanted = successor.routing_hash([ECHO])
    assert (await observe(successor)).routing_hash == wanted == edges.hash


async def test_an_edge_that_is_gone_and_one_that_is_new() -> None:
    edges = FakeEdges(("n1",))
    router = await served(edges)
    assert edges.edges["n1"].servers[BACKEND, "echo-1"].limit == 10
    edges.edges["n2"] = FakeEdges(("n2",)).edges["n2"]
    edges.fetch()
    assert [server.state for server in (await observe(router)).servers] == [PARTLY]
    await router.perform(set_to("echo-1", READY))
    for _ in range(3):
        await observe(router)
    assert [edge.servers[BACKEND, "echo-1"].limit for edge in edges.edges.values()] == [5, 5]
    del edges.edges["n1"]
    for _ in range(3):
        await observe(router)
    assert edges.edges["n2"].servers[BACKEND, "echo-1"].limit == 10


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("away"), st.sampled_from(["n1", "n2", "n3"])),
        st.tuples(st.just("back"), st.sampled_from(["n1", "n2", "n3"])),
        st.tuples(st.just("restart"), st.sampled_from(["n1", "n2", "n3"])),
        st.tuples(st.just("want"), st.sampled_from(["a", "b", "c"]), st.sampled_from([READY, DRAIN, None])),
        st.tuples(st.just("weight"), st.sampled_from(["a", "b", "c"]), st.integers(1, 3)),
        st.tuples(st.just("room"), st.booleans()),
        st.tuples(st.just("plan")),
    ),
    max_size=25,
)


class Wanted:
    """What a planner wants, and the actions that follow from what it sees."""

    def __init__(self) -> None:
        self.states: dict[str, ServerState | None] = {}
        self.weights: dict[str, int] = {}
        self.is_open = True

    async def plan(self, router: EdgesRouter, state: RoutingState) -> int:
        actions: list[Any] = []
        for name, wanted in self.states.items():
            weight, seen = self.weights.get(name, 1), state.server_of("echo", name)
            if wanted is None:
                actions += [DeleteServer(target=name, backend=BACKEND)] if seen else []
            elif seen is None:
                actions += [add(name, weight)] if wanted is READY else []
            elif wanted is DRAIN:
                actions += [set_to(name, DRAIN)] if seen.state.takes_requests else []
            elif seen.state is not READY:
                actions.append(set_to(name, READY))
            elif seen.weight != weight:
                actions.append(SetServerWeight(target=name, backend=BACKEND, weight=weight))
        if self.is_open == (BACKEND in state.closed):
            actions.append(SetWaitingRoom(target="echo", backend=BACKEND, is_open=self.is_open))
        for action in actions:
            await router.perform(action)
        return len(actions)


async def take(step: tuple[Any, ...], edges: FakeEdges, wanted: Wanted, router: EdgesRouter) -> None:
    match step:
        case ("away" | "back" as kind, name):
            edges.edges[name].up = kind == "back"
            edges.fetch()
        case ("restart", name):
            edges.edges[name].restart()
        case ("want", name, state):
            wanted.states[name] = state
        case ("weight", name, weight):
            wanted.weights[name] = weight
        case ("room", is_open):
            wanted.is_open = is_open
        case _:
            with contextlib.suppress(RoutingUnreachable):
                await wanted.plan(router, await router.observe())


@given(STEPS)
async def test_after_any_outages_all_edges_are_as_wanted(steps: list[Any]) -> None:
    edges, wanted = FakeEdges(), Wanted()
    router = edges.router()
    await write_routes(router, ECHO)
    for step in [*steps, ("back", "n1"), ("back", "n2"), ("back", "n3")]:
        await take(step, edges, wanted, router)
    for _ in range(12):
        await take(("plan",), edges, wanted, router)
    assert await wanted.plan(router, await observe(router)) == 0
    ready = {name for name, state in wanted.states.items() if state is READY}
    for edge in edges.edges.values():
        assert set(edge.ready("echo")) == ready
        assert (BACKEND in edge.closed) is not wanted.is_open
        for name in ready:
            server = edge.servers[BACKEND, name]
            assert (server.weight, server.address) == (wanted.weights.get(name, 1), "10.0.0.1:80")
    for name in ready:
        assert sum(edge.servers[BACKEND, name].limit for edge in edges.edges.values()) == 10
    await router.close()


def state_of(*servers: Server, routes: str = "r") -> RoutingState:
    return RoutingState(1, 1.0, "3.0.11", routes, servers, frozenset({BACKEND}), queued={BACKEND: 1})


def server(state: ServerState = READY, **more: Any) -> Server:
    return Server(BACKEND, "echo-1", more.pop("address", "10.0.0.1:80"), state, **{"up": True, **more})


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([server(), server()], READY),
        ([server(), None], PARTLY),
        ([server(), server(DRAIN)], PARTLY),
        ([server(), server(), server(address="10.0.0.2:80")], PARTLY),
        ([server(DRAIN), None], DRAIN),
        ([server(DRAIN), server(MAINT)], DRAIN),
        ([server(MAINT), None], MAINT),
    ],
)
def test_the_state_of_a_server_at_several_edges(states: list[Server | None], expected: ServerState) -> None:
    whole = merged({str(n): state_of(*([one] if one else [])) for n, one in enumerate(states)}, "r")
    assert [(one.state, one.address) for one in whole.servers] == [(expected, "10.0.0.1:80")]
    assert whole.queued == {BACKEND: len(states)}


def test_what_is_added_up_and_what_must_be_so_everywhere() -> None:
    one = server(sessions=2, queued=1, answered=10, errors=1, limit=5, weight=2)
    two = server(sessions=1, answered=5, limit=4, up=False)
    whole = merged({"a": state_of(one), "b": state_of(two)}, "")
    [both] = whole.servers
    assert (both.sessions, both.queued, both.answered, both.errors, both.limit) == (3, 1, 15, 1, 9)
    assert (both.up, both.weight) == (False, 0)
    behind = merged({"a": state_of(one), "b": state_of(two), "c": state_of(routes="old")}, "r")
    assert (behind.routing_hash, behind.servers[0].state) == ("r", READY)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.sampled_from(["answers", "restart", "away"]))))
def test_answers_are_counted_once_and_never_lost(steps: list[tuple[str, int, str]]) -> None:
    counts, now, total = Counts(), {"a": 0, "b": 0}, 0
    for edge, answers, kind in steps:
        if kind == "restart":
            now[edge] = 0
        elif kind == "answers":
            now[edge] += answers
            total += answers
        states = {
            name: replace(state_of(server(answered=count)), held={BACKEND: HeldRequests(now=1, expired=count)})
            for name, count in now.items()
        }
        if kind == "away":
            del states[edge]
        whole = counts.added_up(states, merged(states, "r"))
        assert whole.servers[0].answered == total
        assert whole.held == {BACKEND: HeldRequests(now=len(states), expired=total)}


def test_what_was_counted_of_a_backend_goes_with_it() -> None:
    counts = Counts()
    seen = {"a": replace(state_of(), held={BACKEND: HeldRequests(now=2, expired=7)})}
    assert counts.added_up(seen, merged(seen, "r")).held == {BACKEND: HeldRequests(now=2, expired=7)}
    away = {"b": state_of()}
    assert counts.added_up(away, merged(away, "r")).held == {BACKEND: HeldRequests(expired=7)}
    removed = {"a": RoutingState(1, 1.0, "3.0.11", "r")}
    assert counts.added_up(removed, merged(removed, "r")).held == {}
    assert counts.added_up(away, merged(away, "r")).held == {}
