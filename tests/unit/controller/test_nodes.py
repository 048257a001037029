"""Replicas on several nodes, which leave, go down, come back and are not known for a while."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.daemon.callers import Gatekeeper
from controller.model.actions import (
    Action,
    BeginRetirement,
    CreateContainer,
    DeleteServer,
    RemoveContainer,
    SetServerState,
    SignalContainer,
    StartContainer,
    UpdateNode,
)
from controller.model.nodes import LEAVING_LABEL, Node
from controller.model.observed import Observed
from controller.model.phases import Phase
from controller.model.plan import Plan
from controller.model.spec import RolloutSpec, ServiceSpec
from controller.model.world import (
    ContainerState,
    Gpu,
    ReplicaContainer,
    ReplicaHealth,
    RoutingState,
    ServerState,
    current_version,
)
from controller.observe.node_losses import DOWN_S, FORGOTTEN_S, FOUND_OUT_S, SILENT_S, NodeLosses
from controller.plan import plan
from controller.status.metrics import ControllerMetrics
from controller.status.nodes import node_rows
from controller.status.records.services import Nodes, NodeStatus
from controller.status.view import View, notices
from controller.tool.wait import DrainWait, TargetMovedError
from tests.fakes.fake_swarm_engine import FakeSwarmEngine
from tests.harness.virtual_time import wall_clock
from tests.unit.controller.cli_documents import node
from tests.unit.controller.control import Control, until
from tests.unit.controller.test_api import Client, serving
from tests.unit.controller.test_plan_properties import World, check_safety
from tests.unit.controller.worlds import NOW, desired, gpu_service, observed, replica, routing, server, service, version

WEB = service()
V = version(WEB)
RANKER = gpu_service(replicas=3)
RV = version(RANKER)
NAMES = ("n1", "n2", "n3")
LEAVES: dict[str, Any] = {"availability": "pause", "labels": {LEAVING_LABEL: "1"}}
FORCED: dict[str, Any] = {"availability": "pause", "labels": {LEAVING_LABEL: "force"}}


def nodes(**changes: Any) -> tuple[Node, ...]:
    """Three; `n3={...}`: how that one is."""
    return tuple(Node(name, f"id-{name}", version=7, **changes.get(name, {})) for name in NAMES)


def card(number: int) -> Gpu:
    """The GPUs of n1 are 1 and 2, and so on."""
    return Gpu(f"GPU-{number}", "nvidia", node=NAMES[(number - 1) // 2])


def on_gpu(number: int, spec: ServiceSpec = RANKER, **changes: Any) -> ReplicaContainer:
    gpu = card(number)
    return replica(spec, number, node=gpu.node, gpus=(gpu.uuid,), **changes)


def on_gpus(*numbers: int, **changes: Any) -> Observed:
    """Rankers on these GPUs of six; a node that leaves holds its own."""
    these = nodes(**changes)
    cards = tuple(card(number) for number in range(1, 7))
    held = {
        gpu.uuid: f"{gpu.node} (leaving)" for gpu in cards for node in these if gpu.node == node.name if node.labels
    }
    return observed(
        *(on_gpu(number) for number in numbers), specs=(RANKER,), gpus=cards, foreign_gpu_holders=held, nodes=these
    )


def text(spec: ServiceSpec, target: int, world: Observed) -> str:
    return str(plan(desired(spec, **{spec.name: target}), world, NOW))


# ------------------------------------------------------------------------------------------------------------- examples

ONE, TWO, THREE = (replica(WEB, number, node=name) for number, name in ((1, "n1"), (2, "n3"), (3, "n2")))
INSTEAD = "in place of one on node n3, which leaves"
STAYS = "pending ranker: it asks for 1 GPU and 0 of 6 are free: 6 held by ranker"


def test_a_node_that_was_drained_is_told_from_a_lost_one() -> None:
    world = observed(specs=(WEB,), nodes=nodes(n2={"state": "down"}, n3={"state": "down", "availability": "drain"}))
    view = View(NOW, "p", desired(WEB), world, nodes=node_rows(world, Plan()))
    page = ControllerMetrics(lambda: view).page().decode()
    assert re.findall(r"^pierhead_node_ready\{(.*)\} (.*)$", page, re.MULTILINE) == [
        ('availability="active",node="n1",role="worker"', "1.0"),
        ('availability="active",node="n2",role="worker"', "0.0"),
        ('availability="drained",node="n3",role="worker"', "0.0"),
    ]


SILENT = "the HAProxy of n2: it does not answer"
MISSING = "the HAProxy of n3: it does not run, so the node takes no requests; `docker node ps n3` says why"


@pytest.mark.parametrize(
    ("edges", "n3", "expected", "gauges"),
    [
        ({"n1": "", "n2": "it does not answer", "n3": ""}, {}, [SILENT], {"n1": "0.0", "n2": "1.0", "n3": "0.0"}),
        ({"n1": "", "n2": "it does not answer"}, {}, [SILENT, MISSING], {"n1": "0.0", "n2": "1.0", "n3": "1.0"}),
        ({"n1": "", "n2": ""}, {"state": "down"}, [], {"n1": "0.0", "n2": "0.0"}),
        ({"n1": "", "n2": ""}, {"availability": "drain"}, [], {"n1": "0.0", "n2": "0.0"}),
        ({}, {}, [], {}),
    ],
)
def test_a_ready_node_without_a_haproxy_is_reported(
    edges: dict[str, str], n3: dict[str, Any], expected: list[str], gauges: dict[str, str]
) -> None:
    world = observed(specs=(WEB,), nodes=nodes(n3=n3), routing=replace(routing(), edges=edges))
    assert [notice for notice in notices(world, (), "", NOW) if "HAProxy" in notice] == expected
    page = ControllerMetrics(lambda: View(NOW, "p", desired(WEB), world)).page().decode()
    assert dict(re.findall(r'^pierhead_edge_differs\{node="(.*)"\} (.*)$', page, re.MULTILINE)) == gauges


FEW = replace(WEB, max_replicas_per_node=1)
TWO_NODES = "2 nodes take its replicas and max_replicas_per_node is 1"


@pytest.mark.parametrize(
    ("spec", "world", "target", "creates", "drains", "pending"),
    [
        (FEW, observed(specs=(FEW,), nodes=nodes()), 4, 3, 0, TWO_NODES.replace("2", "3")),
        (FEW, observed(ONE, specs=(FEW,), nodes=nodes(n3={"state": "down"})), 3, 1, 0, TWO_NODES),
        (FEW, observed(ONE, TWO, THREE, specs=(FEW,), nodes=nodes(n3=LEAVES)), 3, 0, 0, TWO_NODES),
        (FEW, observed(ONE, TWO, THREE, specs=(FEW,), nodes=nodes(n3=FORCED)), 3, 0, 1, TWO_NODES),
        (FEW, observed(ONE, TWO, specs=(FEW,), nodes=nodes(n3=LEAVES)), 2, 1, 0, ""),
        (
            replace(FEW, container={"Placement": {"Constraints": ["node.labels.zone==a"]}}),
            observed(specs=(FEW,), nodes=nodes(n1={"labels": {"zone": "a"}})),
            2,
            1,
            0,
            "1 node takes its replicas and max_replicas_per_node is 1",
        ),
    ],
    ids=["as many as nodes", "one is down", "it stays where it is", "unless at once", "there is room", "constraints"],
)
def test_max_replicas_per_node_counts_each_node(
    spec: ServiceSpec, world: Observed, target: int, creates: int, drains: int, pending: str
) -> None:
    found = plan(desired(spec, **{spec.name: target}), world, NOW)
    kinds = [type(step.action) for step in found.steps]
    assert (kinds.count(CreateContainer), kinds.count(BeginRetirement)) == (creates, drains), found
    assert [one.reason.partition(": ")[0] for one in found.pending] == ([pending] if pending else [])


def test_a_new_version_takes_the_places_of_the_old_one_node_after_node() -> None:
    old = [replica(FEW, number, version="0ld", node=name) for number, name in enumerate(NAMES, 1)]
    found = plan(desired(FEW, web=3), observed(*old, specs=(FEW,), nodes=nodes()), NOW)
    assert [step.action.target for step in found.steps if isinstance(step.action, BeginRetirement)] == [old[2].name]


def webs(*replicas: ReplicaContainer, **changes: Any) -> Observed:
    return observed(*replicas, specs=(WEB,), nodes=nodes(**changes))


GO = [f"#1 drain p-ranker-{RV}-6: node n3 leaves", f"#2 drain p-ranker-{RV}-5: node n3 leaves"]
LEAVING: dict[str, tuple[ServiceSpec, int, Observed, list[str]]] = {
    "another one comes first": (
        *(WEB, 2, webs(ONE, TWO, n3=LEAVES)),
        [f"#1 create p-web-{V}-3: {INSTEAD}", f"#2 after #1 start p-web-{V}-3: {INSTEAD}"],
    ),
    "then the one that leaves": (
        *(WEB, 2, webs(ONE, TWO, THREE, n3=LEAVES)),
        [f"#1 set server svc_web/p-web-{V}-2 to drain: node n3 leaves", f"#2 drain p-web-{V}-2: node n3 leaves"],
    ),
    "then what else is there": (
        *(WEB, 2, webs(ONE, THREE, n3=LEAVES)),
        ["#1 change node n3: drain: it leaves, and no replica is left on it"],
    ),
    "it has left": (WEB, 2, webs(ONE, THREE, n3={**LEAVES, "availability": "drain"}), ["nothing to do"]),
    "the engine got another order in between": (
        *(WEB, 2, webs(ONE, TWO, n3={"labels": {LEAVING_LABEL: "1"}}), ["nothing to do"]),
    ),
    "no room elsewhere: it stays": (RANKER, 6, on_gpus(1, 2, 3, 4, 5, 6, n3=LEAVES), [STAYS]),
    "the surplus is there": (RANKER, 4, on_gpus(1, 2, 3, 4, 5, 6, n3=LEAVES), GO),
    "no room elsewhere, at once": (RANKER, 6, on_gpus(1, 2, 3, 4, 5, 6, n3=FORCED), GO),
    "room for one, also at once": (
        *(RANKER, 5, on_gpus(1, 2, 3, 5, 6, n3=FORCED)),
        [f"#1 create p-ranker-{RV}-4 on GPU-4: {INSTEAD}", f"#2 after #1 start p-ranker-{RV}-4: {INSTEAD}"],
    ),
}


@pytest.mark.parametrize(("spec", "target", "world", "expected"), LEAVING.values(), ids=LEAVING)
def test_replicas_leave_a_node(spec: ServiceSpec, target: int, world: Observed, expected: list[str]) -> None:
    lines = dict.fromkeys(line.partition("; ")[0] for line in text(spec, target, world).splitlines())
    assert [line for line in lines if expected[0].startswith("pending") or not line.startswith("pending")] == expected


def test_a_replica_that_stays_for_want_of_room_is_not_one_that_is_missing() -> None:
    found = plan(desired(RANKER, ranker=7), on_gpus(1, 2, 3, 4, 5, 6, n3=LEAVES), NOW).pending
    assert [pending.replaces for pending in found] == ["", "n3"], "one at a time, as in a rolling update"


FAILED = {"health": ReplicaHealth.FAILED, "health_detail": "no answer within 2 s"}


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": nodes(n3={"state": "unknown"})},
        {"brake": "half of the nodes are gone"},
        {"unreached": frozenset({"n3"})},
    ],
)
def test_what_cannot_be_known_is_left_as_it_is(changes: Any) -> None:
    silent = replica(WEB, 2, node="n3", **FAILED)
    for target, other in ((2, silent), (1, replica(WEB, 2, node="n3", ongoing=0)), (2, TWO)):
        one = replica(WEB, 1, node="n1", ongoing=9)
        world = observed(one, other, specs=(WEB,), routing=routing(server(one), server(other)), **changes)
        assert text(WEB, target, world) == "nothing to do"
    assert "drain p-web" in text(WEB, 2, observed(ONE, silent, specs=(WEB,), nodes=nodes()))


def test_the_server_of_what_a_lost_node_had_stays_while_it_answers() -> None:
    moved = replace(TWO, state=ContainerState.PENDING, ip=None, node="", health=ReplicaHealth.UNKNOWN)
    for up, lost in ((True, "down"), (False, "down"), (True, "ready")):
        servers = routing(server(ONE), server(TWO, up=up))
        world = observed(ONE, moved, specs=(WEB,), routing=servers, nodes=nodes(n3={"state": lost}))
        assert (text(WEB, 2, world) == "nothing to do") == (up and lost == "down")


def test_half_of_the_nodes_at_once_are_not_believed_for_a_while() -> None:
    losses = NodeLosses()
    silent = [replica(WEB, number, node=name, **FAILED) for number, name in enumerate(NAMES, start=1)]
    well = [replace(one, health=ReplicaHealth.READY) for one in silent]
    down = {"state": "down"}
    assert losses.look(nodes(), well, 0) == ""
    assert losses.look(nodes(), [well[0], silent[1], well[2]], 1) == "", "one of three"
    assert "2 of 3 nodes seem to be lost at once (n2, n3)" in losses.look(nodes(), [well[0], *silent[1:]], 2)
    assert losses.look(nodes(), [well[0], *silent[1:]], 2 + SILENT_S) == "", "the engine would know by now"
    assert "(n2, n3)" in losses.look(nodes(n2=down, n3=down), [well[0]], 30)
    assert losses.look(nodes(n2=down, n3=down), [well[0]], 30 + DOWN_S) == "", "so it is"
    assert NodeLosses().look(nodes(n2=down, n3={"state": "unknown"}), [well[0]], 0) == ""
    assert NodeLosses().look(nodes(n2=down, n3={"availability": "drain"}), [], 0), "1 of 2 that are there"
    assert NodeLosses().look((), silent, 0) == "", "one machine"


def test_what_nothing_reaches_is_left_as_it_is_until_all_of_it_is_known_to_answer_again() -> None:
    losses, away = NodeLosses(), replace(routing(), away=frozenset({"n3"}))
    failed = [replica(WEB, 1, node="n3", **FAILED), replica(WEB, 2, node="n3", **FAILED)]
    well = [replace(one, health=ReplicaHealth.READY) for one in failed]

    def unreached(replicas: Sequence[ReplicaContainer], seen: RoutingState | None, now: float) -> set[str]:
        return set(losses.unreached(nodes(), replicas, seen, now))

    assert unreached([failed[0], well[1]], routing(), 0) == set(), "one that hangs"
    assert unreached([failed[0], well[1]], away, 1) == {"n3"}, "the others may be found out later"
    assert unreached([failed[0], well[1]], away, 3 * FOUND_OUT_S) == {"n3"}, "engines that forgot it learn one by one"
    over = FORGOTTEN_S + FOUND_OUT_S
    assert unreached([failed[0], well[1]], away, over) == set(), "the other one answers"
    starts = replace(failed[1], health=ReplicaHealth.UNKNOWN, ongoing=None)
    assert unreached([failed[0], replace(starts, ongoing=0)], away, over + 1) == set(), "it says that it loads"
    assert unreached([failed[0], starts], away, over + 2) == {"n3"}, "nothing is heard of the one that starts"
    assert unreached(failed, away, over + 3) == unreached(failed, None, 1000) == {"n3"}, "for however long"
    assert unreached(failed, routing(), 1001) == {"n3"}, "HAProxy was asked first"
    assert unreached(failed, routing(), 1000 + FOUND_OUT_S) == set(), "they were asked again since"
    assert unreached(failed, away, 2000) == {"n3"}
    assert unreached(well, routing(), 2001) == unreached(failed, routing(), 2002) == set(), "all was well in between"
    assert losses.unreached(nodes(), failed, routing(), 3000, "half of the nodes are gone") == {"n3"}
    assert unreached(failed, routing(), 3001) == {"n3"}


# ------------------------------------------------------------------------------------- a controller, and its commands


def swarm() -> FakeSwarmEngine:
    """Three managers with two GPUs each."""
    made = FakeSwarmEngine(wall_clock)
    for name in NAMES:
        made.add_node(name)
    return made


async def change(client: Client, method: str, path: str, **body: Any) -> str:
    """The API's answer to a change, or its refusal."""
    response = await client.request(method, f"/api/v1/nodes/{path}", json=body)
    document = await response.json()
    return str(document["message"] if response.status == 202 else document["error"]["message"])


@pytest.mark.virtual_time
async def test_a_node_is_drained_and_used_again(tmp_path: Path) -> None:
    control = Control.of(tmp_path, service("web", replicas=3), gpu_service(replicas=3), engine=swarm())
    engine = cast(FakeSwarmEngine, control.engine)
    async with serving(control, web=3, ranker=3) as client:
        least = {"web": 3, "ranker": 3}

        def drained() -> bool:
            for row in control.view.services:
                least[row.name] = min(least[row.name], row.ready)
            return engine.nodes["n3"].availability == "drain"

        message = await change(client, "POST", "n3/drain")
        assert message == "n3 leaves: 1 of ranker, 1 of web go elsewhere, new ones first"
        await until(drained, within_s=60)
        assert least == {"web": 3, "ranker": 3}, "never fewer than before"
        assert {one.node for one in engine.containers.values()} == {"n1", "n2"}
        await until(lambda: control.said("node_drained"))
        assert control.kinds("failed") == []
        assert "is drained already" in await change(client, "POST", "n3/drain")
        [row] = [row for row in control.view.nodes if row.name == "n3"]
        assert (row.availability, row.replicas, row.gpus_used) == ("drained", 0, 0)

        await change(client, "POST", "n3/activate")
        await until(lambda: "has room: no replica is here and 3 are on n" in control.view.nodes[2].message)
        engine.power_off("n2")
        await until(lambda: control.said("node_lost"), within_s=60)
        assert any(notice.startswith("2 of 3 managers are up and 2 are needed") for notice in control.view.notices)
        await until(lambda: {one.node for one in engine.containers.values()} == {"n1", "n3"}, within_s=60)
        engine.power_on("n2")
        await until(lambda: control.said("node_back"))
        await until(lambda: control.said("quorum_safe"))


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("days", "words"), [(31, ""), (29.5, " end on 2023-12-14, in 29 days"), (-1, " ended on 2023-11-13")]
)
async def test_certificates_that_end_soon_are_named_before_they_do(tmp_path: Path, days: float, words: str) -> None:
    control = Control.of(tmp_path, service("web"), engine=swarm())
    control.certificate_ends_at = wall_clock() + days * 86_400
    async with control.running(web=2) as controller:
        told = [notice for notice in control.view.notices if "certificates" in notice]
        found = [words in notice and notice.endswith("run `pierhead up`") for notice in told]
        assert found == ([True] if words else [])
        metric = "pierhead_edge_certificate_expiry_timestamp_seconds"
        assert controller.publisher.metrics.registry.get_sample_value(metric) == control.certificate_ends_at


@pytest.mark.virtual_time
async def test_what_has_no_room_elsewhere_stays_until_it_is_forced(tmp_path: Path) -> None:
    control = Control.of(tmp_path, gpu_service(replicas=6), engine=swarm())
    engine = cast(FakeSwarmEngine, control.engine)
    async with serving(control, ranker=6) as client:
        message = await change(client, "POST", "n3/drain")
        assert "no other node has room for 2 of ranker: they serve on n3 until one has" in message
        await until(lambda: control.view.nodes[2].blocked, within_s=60)
        assert control.row("ranker")[:2] == (6, 6)
        assert "2 replicas left, and no other node has room: ranker: it asks for 1 GPU" in control.view.nodes[2].message
        assert "PENDING from then on" in await change(client, "POST", "n3/drain", force=True)
        await until(lambda: engine.nodes["n3"].availability == "drain", within_s=60)
        assert control.row("ranker")[:2] == (6, 4)
        await change(client, "POST", "n3/activate")
        await until(lambda: control.row("ranker") == (6, 6, 6), within_s=60)


@pytest.mark.virtual_time
@pytest.mark.parametrize(("edge_is_missed", "off_s"), [(True, 60.0), (False, 60.0), (True, 5.0)])
async def test_what_failed_with_its_node_is_no_failure_of_the_version_that_bakes(
    tmp_path: Path, edge_is_missed: bool, off_s: float
) -> None:
    """Replicas fail their probes before the engine calls the node down, and maybe before its edge is missed."""
    old = service("web", rollout=RolloutSpec(bake_s=30.0))
    control = Control.of(tmp_path, old, engine=swarm())
    engine = cast(FakeSwarmEngine, control.engine)
    async with control.running(web=2) as controller:
        control.source.edit(replace(old, definition_hash="d2"))
        await until(lambda: "watched for" in control.view.services[0].message, within_s=20)
        made = current_version(control.source.services["web"], engine.images)
        [new] = [one for one in engine.containers.values() if one.version == made]
        node = new.node
        engine.power_off(node)
        control.router.mark_down(new.name, partial(control.router.answers, new.name))
        control.router.away = frozenset({node}) if edge_is_missed else frozenset()
        await asyncio.sleep(off_s)
        engine.power_on(node)
        await asyncio.sleep(1)  # the node's edge comes back later than its engine
        control.router.away = frozenset()
        await until(lambda: control.said("rolled_out") or control.said("rollback"), within_s=200)
        assert control.said("rollback") == []
        assert not controller.deployer.state("web").rejected


@pytest.mark.virtual_time
async def test_what_is_refused(tmp_path: Path) -> None:
    spec = service("web", replicas=1, container={"Placement": {"Constraints": ["node.labels.zone==a"]}})
    control = Control.of(tmp_path, spec, engine=swarm())
    engine = cast(FakeSwarmEngine, control.engine)
    engine.add_node("n4", is_manager=False, labels={"zone": "a"})
    for name in ("n2", "n3"):
        engine.forget(name)
    async with serving(control, Gatekeeper((), frozenset)) as client:
        await control.settled("web", 1)
        assert await change(client, "POST", "n44/drain") == "there is no node 'n44'; did you mean 'n4'? Nodes: n1, n4"
        assert "n1 is the only manager that takes tasks" in await change(client, "POST", "n1/drain")
        assert "force: expected true or false" in await change(client, "POST", "n4/drain", force=1)
        engine.containers[next(iter(engine.containers))].node = "n4"
        await until(lambda: control.view.nodes[1].replicas, within_s=30)  # the engine tells nothing of it
        for labels, words in (
            ({"zone": "b"}, "runs on n4 and has the constraint node.labels.zone==a: Swarm would end it at once"),
            ({"zone": None}, "has the constraint node.labels.zone==a"),
            ({"pierhead.leaving": "1"}, "pierhead.leaving is Pierhead's own"),
            ({"a b": "1"}, "expected a key of letters"),
            ({"rack": "{}"}, "expected a value of letters"),
            ({"rack": 1}, "labels.rack: expected text or null"),
            ({}, "labels: expected at least one"),
        ):
            assert words in await change(client, "PUT", "n4/labels", labels=labels)
        assert await change(client, "PUT", "n4/labels", labels={"rack": "7"}) == "n4 has the labels rack=7, zone=a"
        assert "no other node has room for 1 of web" in await change(client, "POST", "id-n4/drain")
    one = Control.of(tmp_path / "one", service("web"))
    (tmp_path / "one").mkdir()
    async with serving(one, web=2) as client:
        assert "this stack runs on one machine" in await change(client, "POST", "n1/drain")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (node("n3", availability="leaving", message="2 replicas left to go elsewhere"), "2 replicas left"),
        (node("n3", availability="leaving", message="no room", blocked="ranker: no GPU"), "--force"),
        (node("n3", availability="drained"), "is drained"),
    ],
)
def test_waiting_for_a_drain(row: NodeStatus, words: str) -> None:
    verdict = DrainWait("n3").judge(Nodes(NOW, (node("n1"), row), True))
    assert words in f"{verdict.message} {verdict.next_step}"
    assert (verdict.done, verdict.hopeless) == (row.availability == "drained", bool(row.blocked))
    for others in ((), (node("n3"),)):
        with pytest.raises(TargetMovedError):
            DrainWait("n3").judge(Nodes(NOW, others, True))


# ----------------------------------------------------------------------------------------------------------- properties

OPS = (
    *("tick", "tick", "hang", "crash", "busy", "idle", "scale", "version", "pace", "trial", "trial over"),
    *("leave", "leave", "activate", "down", "back", "unknown", "brake"),
)
KEPT = (BeginRetirement, SignalContainer, RemoveContainer, DeleteServer, SetServerState, UpdateNode)


@dataclass
class Cluster(World):
    """The world of the planner's properties, on three nodes of two GPUs where the engine places."""

    gpus: tuple[Gpu, ...] = tuple(card(number) for number in range(1, 7))
    nodes: dict[str, Node] = field(default_factory=lambda: {node.name: node for node in nodes()})
    brake: str = ""

    def snapshot(self, in_progress: tuple[Action, ...] = ()) -> Observed:
        shut = {name for name, node in self.nodes.items() if node.state == "down" or node.availability != "active"}
        holders = {gpu.uuid: f"{gpu.node} (x)" for gpu in self.gpus if gpu.node in shut}
        seen = super().snapshot(in_progress)
        return replace(seen, nodes=tuple(self.nodes.values()), foreign_gpu_holders=holders, brake=self.brake)

    def check_owners(self, actions: list[Action], removing: set[str]) -> None:
        """Until the engine has placed it, a replica has only as many GPUs as it is to get."""
        owners = [uuid for one in self.containers.values() if one.state.is_up for uuid in one.gpus]
        assert len(owners) == len(set(owners))

    def perform(self, action: Action) -> None:
        match action:
            case UpdateNode():
                node = self.nodes[action.target]
                assert (action.availability, action.version) == ("drain", node.version)
                assert not self.on(node.name), "Swarm ends what is left"
                self.nodes[node.name] = replace(node, availability="drain")
            case StartContainer():
                self.change(action.target, state=ContainerState.PENDING)
                self.place()
            case CreateContainer():
                super().perform(action)
                self.change(action.target, ip=None)
            case _:
                super().perform(action)
                self.place()

    def on(self, name: str) -> list[ReplicaContainer]:
        return [one for one in self.containers.values() if one.state.is_up and one.node == name]

    def place(self) -> None:
        for one in [one for one in self.containers.values() if one.state is ContainerState.PENDING]:
            for place in sorted(self.nodes.values(), key=lambda place: len(self.on(place.name))):
                taken = {uuid for other in self.on(place.name) for uuid in other.gpus}
                free = [gpu.uuid for gpu in self.gpus if gpu.node == place.name and gpu.uuid not in taken]
                if place.takes_replicas and len(free) >= len(one.gpus):
                    self.created += 1
                    ip, given = f"10.1.{self.created // 250}.{self.created % 250}", tuple(free[: len(one.gpus)])
                    running = {"state": ContainerState.RUNNING, "started_at": self.now}
                    self.change(one.name, **running, node=place.name, gpus=given, ip=ip)
                    break

    def disturb(self, op: str, pick: int) -> None:
        node = self.nodes[NAMES[pick % 3]]
        match op:
            case "leave" if sum(not other.labels for other in self.nodes.values()) > 1:
                self.nodes[node.name] = replace(node, **LEAVES)
            case "activate":
                self.nodes[node.name] = replace(node, availability="active", labels={})
            case "down":
                self.nodes[node.name] = replace(node, state="down")
                for one in self.on(node.name):
                    ended = one.id in self.retirements
                    away: dict[str, Any] = {"node": ""} if not ended else {}
                    state = ContainerState.EXITED if ended else ContainerState.PENDING
                    self.change(one.name, state=state, ip=None, started_at=None, health=ReplicaHealth.UNKNOWN, **away)
            case "back" | "unknown" if op == "back" or node.state == "ready":
                self.nodes[node.name] = replace(node, state="ready" if op == "back" else "unknown")
            case "brake":
                self.brake = "" if self.brake else "half of the nodes are gone"
            case _:
                super().disturb(op, pick)
        self.place()


def check_kept(world: Cluster, result: Plan) -> None:
    """What is not known, or may be wrong as a whole, is left alone; only what is ready gets its server."""
    unknown = {
        one.name for one in world.containers.values() if world.nodes.get(one.node, nodes()[0]).state == "unknown"
    }
    adds = {step.action.target for step in result.steps if not isinstance(step.action, KEPT)}
    for action in (step.action for step in result.steps if isinstance(step.action, KEPT)):
        assert action.target not in unknown
        moved = isinstance(action, DeleteServer | SetServerState) and action.target in adds
        gone = action.target not in world.containers
        assert not world.brake or moved or gone, action


steps = st.tuples(st.sampled_from(OPS), st.integers(0, 40), st.sets(st.integers(1, 8), max_size=2))


@settings(max_examples=100, deadline=None)
@given(st.lists(steps, max_size=60))
def test_nodes_leave_and_are_lost_and_nothing_that_serves_is_given_away(ops: list[tuple[str, int, set[int]]]) -> None:
    world = Cluster(specs={"web": service(), "ranker": gpu_service()}, targets={"web": 3, "ranker": 3})
    for op, pick, fails in ops:
        world.disturb(op, pick)
        step(world, set(fails))

    world.brake = ""
    world.kept.clear()
    for name in NAMES:
        world.disturb("back", NAMES.index(name))
    quiet = 0
    for _ in range(400):
        quiet = quiet + 1 if not step(world, set()) else 0
        if quiet == 150:  # longer than any backoff, drain or start
            break
        for name in list(world.containers):
            world.disturb("idle", sorted(world.containers).index(name))
    check_where_they_are(world)


def step(world: Cluster, fails: set[int]) -> bool:
    """One plan and what comes of it; return whether there was something to do."""
    result = world.plan()
    check_safety(world, result)
    check_kept(world, result)
    world.apply(result, fails)
    world.let_time_pass()
    return bool(result.steps)


def check_where_they_are(world: Cluster) -> None:
    assert "#" not in str(world.plan())
    leaving = {name for name, node in world.nodes.items() if node.labels}
    for name, target in world.targets.items():
        running = [
            one for one in world.containers.values() if one.service == name and world.phase(one) is Phase.RUNNING
        ]
        there = [one for one in running if one.node in leaving]
        room = target if name == "web" else min(target, 2 * (len(NAMES) - len(leaving)))
        assert len(running) - len(there) == room
        assert len(running) <= target
        assert not there or room < target
    for name in leaving:
        assert (world.nodes[name].availability == "drain") == (not world.on(name))
    assert {one.name for one in world.servers.values() if one.state is ServerState.READY} == {
        one.name for one in world.containers.values() if one.service == "web"
    }
