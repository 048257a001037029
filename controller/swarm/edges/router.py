"""Many HAProxies as the router: one on each node, each driven over TLS, together one RoutingState for the planner.

    observe    every edge that answered last time is asked at once; the others are asked in tasks, without a wait
    perform    the action goes to every edge that answers; what an edge lacks afterwards shows in the next snapshot
    routes     are published, and fetched by each edge itself (routes.py)

The edges keep the truth: nothing about them has to be remembered. An edge that comes back lacks something that others
have, so servers are PARTLY ready (states.py), and the planner's action for that goes to all edges.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from ...errors import ControllerError, RoutingError, RoutingUnreachable
from ...model.actions import AddServer, SetServerState, SetWaitingRoom, WriteRouting
from ...model.spec import ServiceSpec, backend_name
from ...model.world import EdgePlace, RoutingState, ServerState
from ...routing import haproxy_config as config
from ...routing import haproxy_text as text
from ...routing.base import ProcessAction, RoutingAction
from ...routing.haproxy_process import HAProxyProcess
from ...routing.haproxy_socket import CommandRefused, TlsPeer, command
from ...routing.haproxy_tokens import NO_KEYS, Tokens
from ...settings import DEFAULT_LIMITS, EdgeLimits
from ..certificates import DOMAIN
from .routes import PublishedRoutes
from .shares import Use, next_shares
from .states import Counts, differences, merged

_log = logging.getLogger(__name__)

RUNTIME_PORT, MASTER_PORT = 9999, 9998
"""Of the frontends in haproxy.cfg.j2."""
ANSWER_S = 1.0
"""An edge that takes longer counts as not answering until it has answered once."""
KEEP_SHARE_S = 5.0
"""An edge that has been away for longer has lost its shares to the others."""
ODD_S = 3.0
"""An edge that differs for a shorter time is not reported: each change reaches one edge before another."""
ROUTES_WAIT_S = 20.0
"""How long a change of routes waits for the edges that answer."""
ROUTES_LOOK_S = 0.1

COMMANDS = 100
"""The most commands on one connection: HAProxy reads no line of more than 16 kB."""

Find = Callable[[], Awaitable[Mapping[str, EdgePlace]]]
"""The edges there are, each by its name (its node). May raise ControllerError."""


def over_tls(tls: ssl.SSLContext, epoch: int) -> Callable[[str], HAProxyProcess]:
    """How a controller of this epoch reaches the HAProxy at an address."""
    name = f"{epoch}.edge.{DOMAIN}"

    def connect(address: str) -> HAProxyProcess:
        return HAProxyProcess(TlsPeer(address, RUNTIME_PORT, tls, name), TlsPeer(address, MASTER_PORT, tls, name))

    return connect


@dataclass(slots=True)
class _Edge:
    address: str
    process: HAProxyProcess
    state: RoutingState | None = None
    """Its last answer; None = it does not answer."""
    shares_seen: Mapping[str, int] | None = None
    """By backend, its last known share: an edge that does not answer may use it."""
    looking: asyncio.Task[RoutingState] | None = None
    problem: RoutingError = field(default_factory=lambda: RoutingUnreachable("it has not been asked yet"))
    """Why it does not answer."""
    away_since: float = 0.0
    is_new: bool = True
    has_answered_late: bool = False
    """It was away and has answered: the next snapshot waits for it."""


class EdgesRouter:
    """A `Router` over the edges that `find` returns. `close` ends what it has under way."""

    def __init__(
        self,
        find: Find,
        connect: Callable[[str], HAProxyProcess],
        routes: PublishedRoutes,
        limits: EdgeLimits = DEFAULT_LIMITS,
        tls: config.Tls | None = None,
        tokens: Tokens = NO_KEYS,
    ) -> None:
        """`connect`: the HAProxy at an address. `tls`, `tokens`: of files that every edge has."""
        self._find = find
        self._connect = connect
        self._routes = routes
        self._texts = config.Rendered(limits, is_remote=True, tls=tls, tokens=tokens)
        self._edges: dict[str, _Edge] = {}
        self._specs: dict[str, ServiceSpec] = {}
        """By backend: the services asked for last."""
        self._shares: dict[str, dict[str, int]] = {}
        """By backend and edge: what a new server gets."""
        self._rooms: dict[str, bool] = {}
        """By backend: whether its waiting room was set to be open."""
        self._counts = Counts()
        self._odd_since: Mapping[str, float] = {}
        self.odd_edges: Mapping[str, str] = {}
        """The edges that were not as the others when they were looked at last, each with the reason."""
        self._looking = asyncio.Lock()
        self._whole: tuple[str, Mapping[str, RoutingState], RoutingState] | None = None
        """The hash of the published routes, the edges' states, and what these are together."""

    async def close(self) -> None:
        """End the questions under way."""
        for edge in self._edges.values():
            if edge.looking is not None:
                edge.looking.cancel()

    # -------------------------------------------------------------------------------------------------- snapshots

    async def observe(self) -> RoutingState:
        """See `Router.observe`. Raises RoutingUnreachable while no edge answers, RoutingError when some answer and none
        can be read.
        """
        await self._find_edges()
        await self._look()
        states = self._states()
        self._name_odd_edges(states)
        if not states:
            unreadable = {n: e.problem for n, e in self._edges.items() if not isinstance(e.problem, RoutingUnreachable)}
            if unreadable:
                raise RoutingError(_words(unreadable))
            raise RoutingUnreachable("no edge answers")
        whole = self._counts.added_up(states, self._merged(states))
        self._adopt(whole)
        self._share_out(states)
        work = [(name, self._share_commands(name, states), self._room_actions(states[name], states)) for name in states]
        await asyncio.gather(*(self._tend(*one) for one in work))
        away = frozenset(self._edges.keys() - states.keys())
        addresses = {name: edge.address for name, edge in sorted(self._edges.items())}
        return replace(whole, edges=self._reported(), away=away, edge_addresses=addresses)

    async def http_is_silent(self) -> bool:
        """False: the engine restarts an edge that hangs, by its health check."""
        return False

    def _merged(self, states: Mapping[str, RoutingState]) -> RoutingState:
        """The edges as one, computed once for all actions that follow from one look."""
        if self._whole is not None:
            published, before, whole = self._whole
            same = before.keys() == states.keys() and all(before[name] is state for name, state in states.items())
            if same and published == self._routes.hash:
                return whole
        whole = merged(states, self._routes.hash)
        self._whole = self._routes.hash, states, whole
        return whole

    def _states(self) -> dict[str, RoutingState]:
        return {name: edge.state for name, edge in sorted(self._edges.items()) if edge.state is not None}

    async def _find_edges(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await self._find()
        except (TimeoutError, ControllerError) as error:
            _log.warning("the edges cannot be listed, those known are kept: %s", error or "no answer")
            return
        wanted = {name: one.address for name, one in found.items() if not one.is_leaving or self._serves(name, one)}
        for name in [name for name, edge in self._edges.items() if wanted.get(name) != edge.address]:
            gone = self._edges.pop(name)
            if gone.looking is not None:
                gone.looking.cancel()
        for name, address in wanted.items():
            if name not in self._edges:
                self._edges[name] = _Edge(address, self._connect(address))

    def _serves(self, name: str, place: EdgePlace) -> bool:
        """Whether an edge has answered its last question."""
        edge = self._edges.get(name)
        return edge is not None and edge.address == place.address and edge.state is not None

    async def _look(self) -> None:
        """Ask every edge; wait for those that are expected to answer."""
        async with self._looking:
            await self._look_once()

    async def _look_once(self) -> None:
        awaited = {}
        for name, edge in self._edges.items():
            if edge.looking is not None and edge.looking.done():
                self._take(name, edge, is_late=True)
            if edge.looking is None:
                if edge.state is not None or edge.is_new or edge.has_answered_late:
                    awaited[name] = edge
                edge.looking = asyncio.create_task(edge.process.observe())
        if awaited:
            await asyncio.wait([edge.looking for edge in awaited.values() if edge.looking], timeout=ANSWER_S)
        for name, edge in awaited.items():
            edge.is_new = edge.has_answered_late = False
            if edge.looking is not None and edge.looking.done():
                self._take(name, edge, is_late=False)
            else:
                self._lose(name, edge, RoutingUnreachable(f"it does not answer within {ANSWER_S:g} s"))

    def _take(self, name: str, edge: _Edge, *, is_late: bool) -> None:
        """Take an answer. One that came late may be older than an action: it says only that the edge is back."""
        looking, edge.looking = edge.looking, None
        if looking is None or looking.cancelled():
            return
        error = looking.exception()
        if isinstance(error, RoutingError):
            self._lose(name, edge, error)
        elif error is not None:
            raise error
        elif is_late:
            edge.has_answered_late = True
        else:
            edge.state = looking.result()

    def _lose(self, name: str, edge: _Edge, why: RoutingError) -> None:
        if edge.state is not None:
            _log.warning("edge %s does not answer: %s", name, why)
            edge.away_since = asyncio.get_running_loop().time()
        edge.state, edge.problem = None, why

    def _adopt(self, whole: RoutingState) -> None:
        """Publish the routes that the edges run, after a start of the controller that changes none."""
        if not self._routes.hash and self._specs:
            asked = self._texts.of(tuple(self._specs.values()))
            if text.hash_of(asked) == whole.routing_hash:
                self._routes.publish(asked)

    def _name_odd_edges(self, states: Mapping[str, RoutingState]) -> None:
        away = {name: edge.problem for name, edge in sorted(self._edges.items()) if edge.state is None}
        # In words that stay the same; the log has each error.
        odd = {n: "it does not answer" if isinstance(e, RoutingUnreachable) else str(e) for n, e in away.items()}
        if states:
            odd |= differences(states, self._merged(states))
        odd |= {name: why for name, why in self._routes.refusals().items() if name in self._edges}
        now = asyncio.get_running_loop().time()
        self._odd_since = {name: self._odd_since.get(name, now) for name in odd}
        self.odd_edges = odd

    def _reported(self) -> dict[str, str]:
        """See `RoutingState.edges`."""
        long_ago = asyncio.get_running_loop().time() - ODD_S
        lasting = {name for name, since in self._odd_since.items() if since <= long_ago}
        return {name: self.odd_edges[name] if name in lasting else "" for name in sorted(self._edges)}

    # ------------------------------------------------------------------------------- what the edges share, and rooms

    async def _tend(self, name: str, commands: list[str], rooms: list[SetWaitingRoom]) -> None:
        """Set an edge's shares, and waiting rooms that edges do not agree on. What fails is done at the next look."""
        process = self._edges[name].process
        try:
            async with asyncio.timeout(ANSWER_S):
                for begin in range(0, len(commands), COMMANDS):
                    await process.runtime.ask_all(commands[begin : begin + COMMANDS])
                for room in rooms:
                    await process.perform(room)
        except (RoutingError, TimeoutError) as error:
            _log.warning("edge %s: its shares and waiting rooms could not be set: %s", name, error or "no answer")

    def _share_out(self, states: Mapping[str, RoutingState]) -> None:
        for name, state in states.items():
            self._edges[name].shares_seen = {
                backend: max((server.limit for server in state.servers if server.backend == backend), default=0)
                for backend in self._specs
            }
        # An edge that was away for longer sends no requests.
        lost = asyncio.get_running_loop().time() - KEEP_SHARE_S
        here = {name: edge for name, edge in self._edges.items() if edge.state is not None or edge.away_since > lost}
        for backend, spec in self._specs.items():
            uses = {name: _use(backend, edge) for name, edge in here.items()}
            self._shares[backend] = next_shares(spec.max_ongoing_requests, uses)

    def _share_commands(self, name: str, states: Mapping[str, RoutingState]) -> list[str]:
        return [
            command("set", "maxconn", "server", f"{server.backend}/{server.name}", str(share))
            for server in states[name].servers
            for share in (self._shares.get(server.backend, {}).get(name, 0),)
            if share and server.limit != share
        ]

    def _room_actions(self, state: RoutingState, states: Mapping[str, RoutingState]) -> list[SetWaitingRoom]:
        """Rooms that are closed at some edges only, and differ from their setting (open, if there is none)."""
        closed = frozenset[str]().union(*(one.closed for one in states.values()))
        everywhere = frozenset.intersection(*(one.closed for one in states.values()))
        return [
            SetWaitingRoom(target=backend.removeprefix(text.BACKEND_PREFIX), backend=backend, is_open=is_open)
            for backend in sorted((closed - everywhere) & state.backends)
            for is_open in (self._rooms.get(backend, True),)
            if is_open == (backend in state.closed)
        ]

    async def key_ages(self) -> Mapping[str, float]:
        """See `Router.key_ages`. Edges that do not answer are left out."""
        here = [edge for edge in self._edges.values() if edge.state is not None]
        found = await asyncio.gather(*map(_key_ages, here))
        names = {name for ages in found for name in ages}
        return {name: min(ages[name] for ages in found if name in ages) for name in names}

    # ---------------------------------------------------------------------------------------------------- actions

    async def perform(self, action: RoutingAction) -> None:
        """See `Router.perform`. An edge that does not answer fails nothing; RoutingUnreachable if none does.

        Raises RoutingError with the name of an edge that refuses, after all others have carried it out.
        """
        if not self._edges:
            await self._find_edges()
            await self._look()
        if isinstance(action, WriteRouting):
            await self._write_routes(action.services)
            return
        if isinstance(action, SetWaitingRoom):
            self._rooms[action.backend] = action.is_open
        if isinstance(action, AddServer):
            self._specs.setdefault(action.backend, action.spec)
        states = self._states()
        if not states:
            raise RoutingUnreachable("no edge answers")
        whole = self._merged(states)
        results = await asyncio.gather(
            *(self._perform_at(name, action, state, whole) for name, state in states.items())
        )
        refusals = {name: error for name, error in zip(states, results, strict=True) if error is not None}
        counted = {name: error for name, error in refusals.items() if _counts(error, states[name], whole)}
        if all(isinstance(error, RoutingUnreachable) for error in refusals.values()) and len(refusals) == len(states):
            raise RoutingUnreachable(_words(refusals))
        if counted or len(refusals) == len(states):
            raise RoutingError(_words(counted or refusals))

    async def _perform_at(
        self, name: str, action: ProcessAction, state: RoutingState, whole: RoutingState
    ) -> RoutingError | None:
        edge = self._edges.get(name)
        if edge is None:
            return None
        try:
            await edge.process.perform(self._for_edge(name, action, state, whole))
        except RoutingUnreachable as error:
            self._lose(name, edge, error)
            return error
        except RoutingError as error:
            return error
        return None

    def _for_edge(self, name: str, action: ProcessAction, state: RoutingState, whole: RoutingState) -> ProcessAction:
        """The action as this edge has to carry it out: with its share, and with a server that it lacks."""
        if isinstance(action, SetServerState) and action.state is ServerState.READY:
            action = self._addition(action, state, whole) or action
        if not isinstance(action, AddServer):
            return action
        return replace(action, spec=replace(action.spec, max_ongoing_requests=self._share(name, action)))

    def _share(self, name: str, action: AddServer) -> int:
        """What this edge sends to a new server; no edge has used a backend that no snapshot has shown."""
        shares = self._shares.get(action.backend)
        if not shares or name not in shares:
            unused = {edge: Use(share=0) for edge in self._edges}
            shares = next_shares(action.spec.max_ongoing_requests, unused)
        return shares.get(name, 1)

    def _addition(self, action: SetServerState, state: RoutingState, whole: RoutingState) -> AddServer | None:
        """The addition of a server that other edges have and this one lacks, or has at another address."""
        spec = self._specs.get(action.backend)
        place = (action.backend, action.target)
        server, mine = whole.by_place.get(place), state.by_place.get(place)
        if spec is None or server is None or (mine is not None and mine.address == server.address):
            return None
        return AddServer(
            target=action.target,
            backend=action.backend,
            address=server.address,
            weight=server.weight or 1,
            spec=spec,
        )

    # ----------------------------------------------------------------------------------------------------- routes

    def routing_hash(self, services: Collection[ServiceSpec]) -> str:
        """See `Router.routing_hash`. Raises RoutingError when a value may not be put into a configuration."""
        self._specs = {backend_name(spec.name): spec for spec in services if spec.is_routed}
        return text.hash_of(self._texts.of(services))

    async def _write_routes(self, services: Collection[ServiceSpec]) -> None:
        """Publish routes and wait until every edge that answers runs them, or has refused them.

        An edge that does not take them in time is named, and fails nothing while another edge runs them.
        """
        wanted = self._texts.of(services)
        self._rooms.clear()  # a new worker has all of them open
        self._routes.publish(wanted)
        lagging = set(self._states())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROUTES_WAIT_S):
                while lagging - self._routes.refusals().keys():
                    await asyncio.sleep(ROUTES_LOOK_S)
                    await self._look()
                    states = self._states()
                    lagging = {name for name in states if states[name].routing_hash != self._routes.hash}
        refused = {name: why for name, why in self._routes.refusals().items() if name in lagging}
        if refused:
            raise RoutingError(_words(refused))
        if lagging == self._states().keys():
            raise RoutingUnreachable(f"no edge runs the routes after {ROUTES_WAIT_S:g} s")


def _counts(error: RoutingError, state: RoutingState, whole: RoutingState) -> bool:
    """Whether an edge's refusal fails the action: not while the edge has other routes, lacks the server or is away."""
    lacks = isinstance(error, CommandRefused) and error.answer.startswith("No such server")
    return not lacks and not isinstance(error, RoutingUnreachable) and state.routing_hash == whole.routing_hash


def _use(backend: str, edge: _Edge) -> Use:
    seen = (edge.shares_seen or {}).get(backend, 0)
    if edge.state is None:
        return Use(share=seen, is_away=True)
    servers = [server for server in edge.state.servers if server.backend == backend]
    waiting = edge.state.queued.get(backend, 0) + sum(server.queued for server in servers)
    return Use(
        share=seen,
        busiest=max((server.sessions for server in servers), default=0),
        wanted=waiting + sum(server.sessions for server in servers),
        servers=len(servers),
        is_waiting=waiting > 0,
    )


def _words(errors: Mapping[str, object]) -> str:
    return "; ".join(f"edge {name}: {error}" for name, error in sorted(errors.items()))


async def _key_ages(edge: _Edge) -> Mapping[str, float]:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await edge.process.key_ages()
    except (RoutingError, TimeoutError):  # the next look finds it away
        return {}
