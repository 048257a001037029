"""A Swarm of many nodes for `many_replicas`: its manager's lists and its edges' answers are texts, read as real ones.

Not in the figures are the manager itself, HTTP, TLS and the network.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from controller.engines.base import EngineAction, EngineEvent, Places
from controller.engines.labels import create_body
from controller.model.actions import CreateContainer
from controller.model.observed import EngineState
from controller.model.world import RoutingState, Server
from controller.routing.haproxy_state import routing_state
from controller.swarm.engine.engine import SwarmEngine
from controller.swarm.engine.service_spec import GPU_KIND, service_spec
from tests.fakes.fake_edges import FakeEdge, FakeEdges
from tests.fakes.fake_engine import FakeContainer
from tests.fakes.fake_swarm_engine import FakeSwarmEngine

WHEN = "2026-11-23T20:00:00.123456789Z"
NETWORK = {
    "Network": {
        "ID": "o2vqyx5h0ml8cwc6vnc2m6e6r",
        "Version": {"Index": 31},
        "CreatedAt": WHEN,
        "UpdatedAt": WHEN,
        "Spec": {"Name": "p_default", "Labels": {"com.docker.stack.namespace": "p"}, "DriverConfiguration": {}},
        "DriverState": {"Name": "overlay", "Options": {"com.docker.network.driver.overlay.vxlanid_list": "4097"}},
        "IPAMOptions": {"Driver": {"Name": "default"}, "Configs": [{"Subnet": "10.0.0.0/16", "Gateway": "10.0.0.1"}]},
    }
}
STATES_HEAD = (
    "1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight "
    "srv_time_since_last_change srv_check_status srv_check_result srv_check_health srv_check_state srv_agent_state "
    "bk_f_forced_id srv_f_forced_id srv_fqdn srv_port srvrecord srv_use_ssl srv_check_port srv_check_addr "
    "srv_agent_addr srv_agent_port\n"
)
COLUMNS = (
    "pxname,svname,qcur,qmax,scur,smax,slim,stot,bin,bout,dreq,dresp,ereq,econ,eresp,wretr,wredis,status,weight,act,bck,"
    "chkfail,chkdown,lastchg,downtime,qlimit,pid,iid,sid,throttle,lbtot,tracked,type,rate,rate_lim,rate_max,"
    "check_status,check_code,check_duration,hrsp_1xx,hrsp_2xx,hrsp_3xx,hrsp_4xx,hrsp_5xx"
)
MORE_COLUMNS = 57
"""HAProxy 3.0 prints 101 of them."""
STAT_HEAD = f"# {COLUMNS}{''.join(f',more{number}' for number in range(MORE_COLUMNS))},\n"
HELD_HEAD = "# backend held served expired left refused closed\n"
INFO = "Name: HAProxy\nVersion: 3.0.11\nPid: 11\nStart_time_sec: 1795251360\n"


@dataclass
class Manager:
    """What a manager lists."""

    swarm: FakeSwarmEngine
    calls: Counter[str]
    specs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By replica: the spec of its service."""
    _texts: dict[tuple[object, ...], tuple[str, str]] = field(default_factory=dict)
    """By what can change about a replica: its service and its task."""
    _read: dict[tuple[object, ...], tuple[str, Any]] = field(default_factory=dict)

    def create(self, action: CreateContainer, project: str) -> None:
        """Know the service of a new replica."""
        body = create_body(action.spec, action.target, action.version, action.number, action.gpus, project)
        self.specs[action.target] = service_spec(action.target, body, len(action.gpus))

    def get(self, kind: str, **filters: str) -> Any:
        """See `Lists.get`."""
        text = self._nodes() if kind == "nodes" else self._tasks() if kind == "tasks" else self._services(**filters)
        self.calls["manager"] += 1
        self.calls["bytes"] += len(text)
        key = kind, *filters.items()
        if self._read.get(key, ("",))[0] != text:
            self._read[key] = text, json.loads(text)
        return self._read[key][1]

    def _nodes(self) -> str:
        listed = [
            {
                "ID": node.id,
                "Spec": {"Role": "manager", "Availability": node.availability},
                "Status": {"State": node.state, "Addr": node.address},
                "Description": {
                    "Hostname": node.name,
                    "Resources": {"GenericResources": named(g.uuid for g in self.swarm.gpus if g.node == node.name)},
                },
            }
            for node in self.swarm.nodes.values()
        ]
        return json.dumps(listed)

    def _tasks(self) -> str:
        return f"[{','.join(task for _, task in self._all() if task)}]"

    def _services(self, label: str) -> str:
        return "[]" if "namespace" in label else f"[{','.join(service for service, _ in self._all())}]"

    def close(self) -> None:
        pass

    def _all(self) -> list[tuple[str, str]]:
        return [self._text(one) for one in list(self.swarm.containers.values())]

    def _text(self, one: FakeContainer) -> tuple[str, str]:
        key = (one.id, one.state, one.node, one.gpus)
        if key not in self._texts:
            spec = {**self.specs[one.name], "Mode": {"Replicated": {"Replicas": int(one.started_at is not None)}}}
            times = {"Version": {"Index": 100}, "CreatedAt": WHEN, "UpdatedAt": WHEN}
            service = {
                "ID": one.id,
                **times,
                "Spec": spec,
                "PreviousSpec": spec,
                "Endpoint": {"Spec": {"Mode": "dnsrr"}},
            }
            container = {"ContainerID": one.id, "PID": 4711, "ExitCode": 0}
            task = {
                "ID": f"t{one.id}",
                **times,
                "Labels": {},
                "Spec": spec["TaskTemplate"],
                "ServiceID": one.id,
                "Slot": 1,
                "NodeID": f"id-{one.node}",
                "Status": {"Timestamp": WHEN, "State": "running", "Message": "started", "ContainerStatus": container},
                "DesiredState": "running",
                "NetworksAttachments": [{**NETWORK, "Addresses": [f"{one.ip}/16"]}],
                "GenericResources": named(one.gpus),
            }
            self._texts[key] = json.dumps(service), json.dumps(task) if one.state.is_up else ""
        return self._texts[key]


def named(uuids: Iterable[str]) -> list[dict[str, dict[str, str]]]:
    return [{"NamedResourceSpec": {"Kind": GPU_KIND, "Value": uuid}} for uuid in uuids]


class ListedSwarm:
    """The real engine on a manager's lists; what it would have the manager do, the Swarm in memory does."""

    places: Places = "the engine's"

    def __init__(self, swarm: FakeSwarmEngine, calls: Counter[str]) -> None:
        self.manager = Manager(swarm, calls)
        self._real = SwarmEngine(self.manager, self.manager)  # type: ignore[arg-type]
        self._swarm = swarm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._swarm, name)

    async def observe(self, project: str, service_names: Collection[str], images: Collection[str]) -> EngineState:
        return await self._real.observe(project, service_names, images)

    def events(self, project: str) -> AsyncIterator[EngineEvent]:
        return self._real.events(project)

    async def perform(self, action: EngineAction, project: str) -> None:
        self.manager.calls["changes"] += 1
        if isinstance(action, CreateContainer):
            self.manager.create(action, project)
        await self._swarm.perform(action, project)

    async def close(self) -> None:
        await self._real.close()


class TextEdge(FakeEdge):
    """An edge whose state goes through the texts that HAProxy prints."""

    calls: ClassVar[Counter[str]]

    async def observe(self) -> RoutingState:
        state = await super().observe()
        self.calls["edges"] += 1
        rows = [_rows(number, server) for number, server in enumerate(state.servers, start=1)]
        stat = [
            STAT_HEAD,
            *(row[1] for row in rows),
            *(f"{name},BACKEND,0,0,0,0{',' * 96}\n" for name in state.backends),
        ]
        routing = f"proc.pierhead_routing: type=str value=<{state.routing_hash}>"
        return routing_state(INFO, routing, "", STATES_HEAD + "".join(row[0] for row in rows), "".join(stat), HELD_HEAD)


@cache
def _rows(number: int, server: Server) -> tuple[str, str]:
    """A server's lines of `show servers state` and `show stat`."""
    ip, _, port = server.address.rpartition(":")
    operation, status = (2, "UP") if server.up else (0, "DOWN")
    address = f"{server.backend} {number} {server.name} {ip}"
    traffic = (
        f"0,0,0,3,{server.limit},10000,12345678,98765,,0,,0,0,0,0,{status},1,1,0,0,0,3600,0,,1,7,{number},,10000,,2,3"
    )
    check = "21,L7OK,200,1,0,10000,0,0,0"
    return (
        f"7 {address} {operation} 0 {server.weight} 1 3 15 3 3 6 0 0 1 - {port} - 0 9100 - - 0\n",
        f"{server.backend},{server.name},{traffic},,{check}{',0' * MORE_COLUMNS},\n",
    )


class Edges(FakeEdges):
    """As many as there are nodes."""

    def __init__(self, names: Sequence[str], calls: Counter[str]) -> None:
        super().__init__(names)
        self.edges = {name: TextEdge(answers=lambda replica: True) for name in names}
        TextEdge.calls = calls


class ManyEdges:
    """The real router of many edges, and what the controller's tests ask of a router in memory."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges
        self._real = edges.router()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def ready(self, service: str) -> list[str]:
        """Names of the servers that get traffic at the first edge."""
        return next(iter(self._edges.edges.values())).ready(service)
