"""The Swarm engine against a manager that answers as a test says: what a real one does too rarely."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.errors import EngineError
from controller.model.actions import CreateContainer, RemoveContainer, StartContainer
from controller.model.spec import ProbeSpec, ServiceSpec
from controller.model.world import EdgePlace
from controller.swarm.engine.engine import SwarmEngine
from controller.swarm.engine.lists import Lists
from controller.swarm.engine.service_spec import LIMIT_LABEL, NARROWED_LABEL
from tests.unit.controller.docker_daemon import Answer, Daemon, Handler, client_of

IMAGE = "shop/ranker:1"
SPEC = ServiceSpec("ranker", IMAGE, "http", 8080, 1, ProbeSpec(9100, "/readyz"), container={"Image": IMAGE})
NAME = "shop-ranker-0a1b2c3d-1"
CREATE = CreateContainer(target=NAME, service="ranker", version="0a1b2c3d", number=1, spec=SPEC)
START = StartContainer(target=NAME, service="ranker")
INSPECT, UPDATE, NEW = f"GET /services/{NAME}", "POST /services/s1/update", "POST /services/create"


LISTS: dict[str, Answer] = {call: (200, []) for call in ("GET /nodes", "GET /services", "GET /tasks")}


@contextlib.asynccontextmanager
async def manager(path: Path) -> AsyncIterator[tuple[Daemon, SwarmEngine]]:
    with Daemon(str(path / "docker.sock")).serving() as daemon:
        engine = SwarmEngine(client_of(daemon.path))
        try:
            yield daemon, engine
        finally:
            await engine.close()


def service(version: int) -> Any:
    return {"ID": "s1", "Version": {"Index": version}, "Spec": {"Labels": {}, "Mode": {"Replicated": {"Replicas": 0}}}}


@pytest.mark.parametrize("changes", [0, 2, 9])
async def test_an_update_is_repeated_while_others_change_the_service(tmp_path: Path, changes: int) -> None:
    async with manager(tmp_path) as (daemon, engine):
        left = changes

        def update(handler: Handler) -> None:
            nonlocal left
            left -= 1
            daemon.answers[INSPECT] = (200, service(changes - left))
            stale = (500, {"message": "rpc error: code = Unknown desc = update out of sequence"})
            handler.reply(*(stale if left >= 0 else (200, {"Warnings": None})))

        daemon.answers |= LISTS | {INSPECT: (200, service(0)), UPDATE: update}
        if changes > 4:
            with pytest.raises(EngineError, match="was changed 5 times while it was to be changed once"):
                await engine.perform(START, "shop")
        else:
            await engine.perform(START, "shop")
            assert daemon.bodies[-1]["Mode"] == {"Replicated": {"Replicas": 1}}
        assert daemon.calls.count(UPDATE) == min(changes + 1, 5)


async def test_a_service_is_removed_once_swarm_has_forgotten_its_task(tmp_path: Path) -> None:
    """The engine of Docker 26.1 panics where both happen at once."""
    remove = RemoveContainer(target=NAME, service="ranker", container_id=NAME)
    ended = {"DesiredState": "remove", "Status": {"State": "complete"}, "CreatedAt": "1", "ServiceID": "s1"}
    history = ended | {"DesiredState": "shutdown"}
    async with manager(tmp_path) as (daemon, engine):
        answers = [[history, ended], [history, ended], [history]]
        gone = f"DELETE /services/{NAME}"
        daemon.answers |= LISTS | {gone: (200, {})}
        daemon.answers["GET /tasks"] = lambda handler: handler.reply(200, answers.pop(0) if answers else [])
        await engine.perform(replace(remove, force=True), "shop")
        assert (daemon.calls[-1], answers) == (gone, [])


@pytest.mark.parametrize(
    ("digests", "image"),
    [
        ([], IMAGE),
        (["reg:5000/copy@sha256:2", "shop/ranker@sha256:1"], "shop/ranker@sha256:1"),
        (["reg:5000/copy@sha256:2"], "reg:5000/copy@sha256:2"),
    ],
    ids=["of no registry", "of its own repository", "of another name"],
)
async def test_every_node_gets_the_image_that_the_version_is_of(tmp_path: Path, digests: list[str], image: str) -> None:
    async with manager(tmp_path) as (daemon, engine):
        daemon.answers |= {f"GET /images/{IMAGE}/json": (200, {"Id": "sha256:0", "RepoDigests": digests})}
        daemon.answers[NEW] = (201, {"ID": "s1"})
        await engine.perform(CREATE, "shop")
        assert daemon.bodies[-1]["TaskTemplate"]["ContainerSpec"]["Image"] == image


async def test_an_image_named_by_its_digest_is_looked_up_nowhere(tmp_path: Path) -> None:
    image = "reg:5000/shop/ranker@sha256:7"
    async with manager(tmp_path) as (daemon, engine):
        daemon.answers |= LISTS
        daemon.answers[NEW] = (201, {"ID": "s1"})
        assert (await engine.observe("shop", (), (image,))).images == {image: image}
        assert await engine.has_image(image)
        await engine.perform(replace(CREATE, spec=replace(SPEC, container={"Image": image})), "shop")
        assert daemon.bodies[-1]["TaskTemplate"]["ContainerSpec"]["Image"] == image
        assert not any("/images/" in call for call in daemon.calls)


async def test_an_edge_that_is_to_end_is_among_the_edges_while_it_runs(tmp_path: Path) -> None:
    """Those that have ended are many, so the manager is asked for all of them only where an edge is missed."""
    given = [{"Network": {"Spec": {"Name": "shop_edges"}}, "Addresses": ["10.0.1.7/24"]}]
    runs = {"NodeID": "n1", "DesiredState": "running", "Status": {"State": "running"}, "NetworksAttachments": given}
    ends, ended = ({**runs, "DesiredState": "shutdown", "Status": {"State": one}} for one in ("running", "shutdown"))
    here = EdgePlace("10.0.1.7")
    async with manager(tmp_path) as (daemon, engine):
        asked = list[list[str]]()

        def tasks(handler: Handler) -> None:
            filters = json.loads(daemon.bodies[-1]["filters"][0])
            asked.append(sorted(filters))
            wanted = [one for one in listed if one["DesiredState"] == "running" or "desired-state" not in filters]
            handler.reply(200, wanted)

        daemon.answers |= {"GET /nodes": (200, [{"ID": "n1", "Spec": {}, "Description": {}}]), "GET /tasks": tasks}
        listed = [runs]
        assert await engine.edges("shop") == {"n1": here}
        listed = [ended, ends]
        assert await engine.edges("shop") == {"n1": replace(here, is_leaving=True)}
        listed = [ended]
        assert await engine.edges("shop") == await engine.edges("shop") == {}
        running, every = ["desired-state", "service"], ["service"]
        assert asked == [running, running, every, running, every, running]


async def test_a_machine_that_is_no_manager_says_so(tmp_path: Path) -> None:
    async with manager(tmp_path) as (daemon, engine):
        daemon.answers["GET /nodes"] = (503, {"message": "This node is not a swarm manager."})
        with pytest.raises(EngineError, match="the controller runs on a manager of the Swarm"):
            await engine.observe("shop", (), ())


def test_the_same_answer_is_the_same_list_also_over_a_connection_that_the_engine_has_ended(tmp_path: Path) -> None:
    path, nodes = tmp_path / "docker.sock", [{"ID": "n1"}]

    def hang_up(handler: Handler) -> None:
        handler.reply(200, nodes)
        handler.close_connection = True

    with (
        Daemon(str(path)).serving() as daemon,
        contextlib.closing(client_of(path)) as client,
    ):
        lists = Lists(client)
        daemon.answers["GET /nodes"] = hang_up
        first = lists.get("nodes")
        assert lists.get("nodes") is first
        daemon.answers["GET /nodes"] = (200, [])
        assert (first, lists.get("nodes")) == (nodes, [])
        assert daemon.bodies == [{"filters": ["{}"]}] * 3


async def test_secrets_are_found_by_their_names(tmp_path: Path) -> None:
    file = {"Name": "shop_token", "Target": "/run/secrets/token", "UID": "0", "GID": "0", "Mode": 0o444}
    create = replace(CREATE, spec=replace(SPEC, container={"Image": "r/i@sha256:7", "Secrets": [file]}))
    async with manager(tmp_path) as (daemon, engine):
        daemon.answers[NEW] = (201, {"ID": "s1"})
        daemon.answers["GET /secrets"] = (200, [{"ID": "x1", "Spec": {"Name": "shop_token-2"}}])
        with pytest.raises(EngineError, match="Swarm has no secrets shop_token: `pierhead deploy` makes those of"):
            await engine.perform(create, "shop")
        daemon.answers["GET /secrets"] = (200, [{"ID": "x2", "Spec": {"Name": "shop_token"}}])
        await engine.perform(create, "shop")
        assert daemon.bodies[-1]["TaskTemplate"]["ContainerSpec"]["Secrets"][0]["SecretID"] == "x2"


NO_NODE = "no suitable node (scheduling constraints not satisfied on 2 nodes)"
OURS = {"pierhead.project": "shop", "pierhead.service": "ranker"}
TEMPLATE: dict[str, Any] = {"ContainerSpec": {"Labels": OURS}}
RUNS = {"DesiredState": "running", "Status": {"State": "running"}, "Spec": TEMPLATE, "NodeID": "n1", "ServiceID": "s0"}
WAITS = {"CreatedAt": "1", "DesiredState": "running", "Status": {"State": "pending"}, "Spec": TEMPLATE}
WAITS |= {"ServiceID": "s1"}
HAS_NODE, HAS_NONE = {**WAITS, "NodeID": "n2"}, {**WAITS, "Status": {"State": "pending", "Err": NO_NODE}}
READY_SOON = {**WAITS, "DesiredState": "ready"}


class OneService:
    """Answers for two nodes and one service, which stays as the last update left it."""

    def __init__(self, daemon: Daemon, tasks: list[Any], limit: int = 0, refused: int = 0) -> None:
        """`tasks`: the answers to questions for tasks, in turn. `refused`: the number of an update that fails."""
        self.tasks, self._refused = tasks, refused
        limited = {LIMIT_LABEL: str(limit)} if limit else {}
        spec = {"Name": NAME, "Labels": OURS | limited, "Mode": {"Replicated": {"Replicas": 0}}}
        self._specs: list[Any] = [{**spec, "TaskTemplate": TEMPLATE}]
        nodes = [{"ID": one, "Status": {"State": "ready"}, "Spec": {"Availability": "active"}} for one in ("n1", "n2")]
        daemon.answers |= {"GET /nodes": (200, [{**node, "Description": {}} for node in nodes])}
        daemon.answers |= {INSPECT: lambda handler: handler.reply(200, self._now())}
        daemon.answers |= {"GET /services": lambda handler: handler.reply(200, [self._now()]), UPDATE: self._update}
        daemon.answers |= {"GET /tasks": lambda handler: handler.reply(200, self.tasks.pop(0))}

    @property
    def steps(self) -> list[tuple[int, list[str]]]:
        """How many tasks it was to have after each update, and its constraints."""
        return [
            (one["Mode"]["Replicated"]["Replicas"], one["TaskTemplate"]["Placement"]["Constraints"])
            for one in self._specs[1:]
        ]

    @property
    def is_narrowed(self) -> bool:
        return NARROWED_LABEL in self._specs[-1]["Labels"]

    def _now(self) -> Any:
        return {"ID": "s1", "Version": {"Index": len(self._specs)}, "Spec": self._specs[-1]}

    def _update(self, handler: Handler) -> None:
        self._refused -= 1
        if self._refused == 0:
            handler.reply(500, {"message": "rpc error: code = Unknown desc = The swarm does not have a leader."})
            return
        self._specs.append(handler.server.bodies[-1])
        handler.reply(200, {})


@pytest.mark.parametrize(
    ("limit", "last", "steps"),
    [
        (0, HAS_NODE, [(1, ["node.id!=n1"]), (1, [])]),
        (0, HAS_NONE, [(1, ["node.id!=n1"]), (1, [])]),
        (1, HAS_NODE, [(1, ["node.id!=n1"]), (1, [])]),
        (1, HAS_NONE, [(1, ["node.id!=n1"]), (0, [])]),
    ],
    ids=["preferred", "where there is room", "within the bound", "beyond the bound"],
)
async def test_a_start_leads_swarm_to_the_nodes_with_the_fewest_replicas(
    tmp_path: Path, limit: int, last: Any, steps: list[Any]
) -> None:
    """By constraints that are gone once the task has its node, or has found none."""
    async with manager(tmp_path) as (daemon, engine):
        world = OneService(daemon, [[RUNS], [READY_SOON], [last]], limit)
        if limit and last == HAS_NONE:
            with pytest.raises(
                EngineError, match=r"no node .* fewer than 1 replicas of the service \(max_replicas_per"
            ):
                await engine.perform(START, "shop")
        else:
            await engine.perform(START, "shop")
        assert (world.steps, world.tasks, world.is_narrowed) == (steps, [], False)


@pytest.mark.parametrize(
    ("tasks", "steps"),
    [
        ([[RUNS, HAS_NODE], [HAS_NODE]], [(1, [])]),
        ([[RUNS, HAS_NONE], [HAS_NONE], [HAS_NODE]], [(1, ["node.id!=n1"]), (1, [])]),
        ([[HAS_NONE], [HAS_NONE]], [(1, [])]),
    ],
    ids=["it has its node", "it has none", "and no node is better than another"],
)
async def test_a_start_that_was_interrupted_leaves_no_constraint_once_it_is_repeated(
    tmp_path: Path, tasks: list[Any], steps: list[Any]
) -> None:
    async with manager(tmp_path) as (daemon, engine):
        world = OneService(daemon, [[RUNS], [HAS_NODE]], refused=2)
        with pytest.raises(EngineError, match="does not have a leader"):
            await engine.perform(START, "shop")
        narrowed = [(1, ["node.id!=n1"])]
        assert (world.steps, world.is_narrowed) == (narrowed, True)
        world.tasks = tasks
        await engine.perform(START, "shop")
        assert (world.steps, world.tasks, world.is_narrowed) == (narrowed + steps, [], False)
        world.tasks = [[RUNS, HAS_NODE]]
        await engine.perform(START, "shop")
        assert world.steps == narrowed + steps, "a start that has ended changes nothing"
