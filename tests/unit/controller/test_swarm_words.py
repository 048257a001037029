"""What keeps a replica of a Swarm from running, as users read it: in the status, in `why`, while `make up` waits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from controller.model.world import FailureRecord, ReplicaContainer
from controller.plan import plan
from controller.status.documents import plan_document
from controller.status.records.answers import LatestTraffic, Traffic
from controller.status.services import service_rows
from controller.status.view import View
from controller.swarm.up.swarm_calls import Swarm
from controller.swarm.up.up import tell_trouble
from controller.tool import tables
from controller.tool.output import plain
from controller.tool.wait import WaitVerdict, judge_all
from controller.tool.why import Case, page
from tests.unit.controller.cli_documents import document
from tests.unit.controller.test_preflight import node as listed_node
from tests.unit.controller.test_preflight import task as listed_task
from tests.unit.controller.test_swarm_reader import NO_IMAGE, read, task
from tests.unit.controller.worlds import NOW, desired, observed, replica, service, version

WEB = service("web")
V = version(WEB)
WIDTH = 400
UNFIT = "no suitable node (scheduling constraints not satisfied on 3 nodes)"
NO_LABEL = (
    f"{UNFIT}: no node fulfils 'node.labels.zone==mars': `pierhead node label NODE zone=mars` gives a node that label, "
    "or change deploy.placement.constraints"
)


def waiting(*constraints: str) -> dict[str, Any]:
    """The task of a service with these constraints, for which Swarm has found no node."""
    made = task("pending", node="", error=UNFIT)
    return {**made, "Spec": {**made["Spec"], "Placement": {"Constraints": list(constraints)}}}


def of_web(one: ReplicaContainer) -> ReplicaContainer:
    """What the engine tells of a replica, told of web's first."""
    ours = replica(WEB, 1)
    return replace(one, id=ours.id, name=ours.name, service=ours.service, version=ours.version)


@dataclass(frozen=True)
class Told:
    """What the commands print of a world in which web is to have one replica."""

    status: str
    why: str
    up: WaitVerdict

    @classmethod
    def of(cls, *containers: ReplicaContainer, **changes: Any) -> Told:
        wanted, world = desired(WEB, web=1), observed(*containers, specs=(WEB,), **changes)
        made = plan(wanted, world, NOW)
        services = service_rows(View(NOW, "p", wanted, world, made))
        view = View(NOW, "p", wanted, world, made, services, engine_reachable=True, haproxy_reachable=True)
        shown = document(*services)
        case = Case(services[0], plan_document(view, ()), (), LatestTraffic())
        return cls(
            plain(tables.status(shown, Traffic(0.0, 5.0, {}, ""), WIDTH), WIDTH),
            plain(page(case, WIDTH), WIDTH),
            judge_all(shown),
        )

    @property
    def reasons(self) -> list[str]:
        """What `make up` says of its wait."""
        return [reason.words for part in self.up.parts for reason in part.reasons]


def test_a_label_that_no_node_has() -> None:
    told = Told.of(of_web(read(1, waiting("node.labels.zone==mars"))))
    assert told.reasons == [f"p-web-{V}-1: {NO_LABEL}"]
    assert NO_LABEL in told.status
    assert f"What is in the way\n  p-web-{V}-1: {NO_LABEL}" in told.why


def test_an_image_that_no_node_can_pull() -> None:
    failed = of_web(read(1, task("rejected", 1, 5, error="No such image: a:1"), task("ready", 5, node="")))
    told = Told.of(failed)
    assert NO_IMAGE in told.status
    assert any(NO_IMAGE in words for words in told.reasons)
    again = Told.of(failures={("web", V): FailureRecord(6, NOW - 1, NO_IMAGE)})
    assert f"last: {NO_IMAGE}" in again.status
    assert NO_IMAGE in again.why
    assert (again.up.hopeless, NO_IMAGE in again.up.message) == (True, True), "waiting changes nothing"


@pytest.mark.parametrize("told_at", [122, 2])
def test_a_clock_that_is_two_minutes_off_is_the_last_word_of_up(told_at: float) -> None:
    said = list[str]()
    tasks = [listed_task(1, 0, 2, 2), listed_task(2, 0, 2, told_at)]
    listed = [listed_node(1), listed_node(2)]
    client: Any = SimpleNamespace(nodes=lambda: listed, tasks=lambda _: tasks, services=lambda *_, **__: [])
    tell_trouble(Swarm(client, "shop"), said.append)
    words = (
        "Warning: the clock of n2 is 120 s ahead of that of the Swarm's leader: certificates and measurements go by "
        "it; set it (timedatectl set-ntp true)."
    )
    assert said == ([words] if told_at > 100 else [])


@pytest.mark.parametrize("running", [0, 1])
def test_so_is_a_service_without_x_serve_that_swarm_cannot_start(running: int) -> None:
    said = list[str]()
    db = {"Spec": {"Name": "shop_db"}, "ServiceStatus": {"RunningTasks": running, "DesiredTasks": 1}}
    rejected = {"NodeID": "id1", "Status": {"State": "rejected", "Err": "bind source path does not exist: /data"}}
    client: Any = SimpleNamespace(
        nodes=lambda: [listed_node(1)],
        tasks=lambda filters: [rejected] if "service" in filters else [],
        services=lambda *_, **__: [db],
    )
    tell_trouble(Swarm(client, "shop"), said.append)
    words = "shop_db on n1: bind source path does not exist: /data."
    assert said == ([] if running else [f"Warning: not all of the stack runs, and Swarm keeps trying: {words}"])


@pytest.mark.parametrize(("update", "running", "is_over"), [("updating", 2, False), ("completed", 3, True)])
def test_up_waits_for_the_last_node_of_a_service_on_every_node(update: str, running: int, is_over: bool) -> None:
    """Swarm counts its task in when the former one has ended, so two of two run while the third is replaced."""
    template = {"ContainerSpec": {"Image": "haproxy:2"}}
    status = {"DesiredTasks": running, "RunningTasks": running}
    edge: dict[str, Any] = {"Spec": {"Name": "shop_haproxy", "TaskTemplate": {**template, "Runtime": "container"}}}
    edge |= {"UpdateStatus": {"State": update}, "ServiceStatus": status}
    up = {"Spec": template, "Status": {"State": "running"}}
    client: Any = SimpleNamespace(tasks=lambda _: [up] * running, services=lambda *_, **__: [edge])
    assert Swarm(client, "shop").runs("haproxy") is is_over
