"""The Swarm engine on three nodes: what it reads while replicas find nodes, lose them and come back."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from docker import APIClient

from controller.engines.docker import open_client
from controller.errors import EngineError
from controller.model.actions import CreateContainer, RemoveContainer, StartContainer, replica_name
from controller.model.spec import GpuRequest, ProbeSpec, ServiceSpec
from controller.model.world import ContainerState, Gpu, ReplicaContainer
from controller.swarm.engine.engine import SwarmEngine
from tests.debian_image import debian_image
from tests.harness import swarm_rig
from tests.harness.swarm_rig import CONTROL, OVERLAY, Node, SwarmRig
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.long]

PROJECT, NETWORK, VERSION = "shop", "shop_default", "0a1b2c3d"
PATIENCE_S = 90.0


@pytest.fixture(scope="module")
def rig(docker_client: APIClient) -> Iterator[tuple[SwarmRig, str]]:
    image = debian_image(docker_client)
    swarm_rig.build_or_skip()
    with SwarmRig(nodes=3).running([image]) as running:
        running.nodes[0].cli("network", "create", "--driver", "overlay", "--attachable", NETWORK)
        yield running, image


class World:
    def __init__(self, rig: SwarmRig, image: str, client: APIClient) -> None:
        self.rig, self.image = rig, image
        self.engine = SwarmEngine(client)
        self.seen: dict[str, list[ReplicaContainer]] = {}
        """What each replica was, in the order of the readings."""

    async def start(
        self, service: str, number: int, gpus: int = 0, most: int | None = None, body: Any = None, **host: Any
    ) -> str:
        """`most`: max_replicas_per_node; `body` and `host`: more of the create body, and of its HostConfig."""
        name = replica_name(PROJECT, service, VERSION, number)
        container = {
            "Image": self.image,
            "Cmd": ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep infinity & wait; done"],
            "Labels": {},
            "HostConfig": {"NetworkMode": NETWORK, **host},
            "NetworkingConfig": {"EndpointsConfig": {NETWORK: {"Aliases": [service]}}},
            **(body or {}),
        }
        probe = ProbeSpec(9100, "/readyz")
        spec = ServiceSpec(service, self.image, "http", 8080, 1, probe, gpu=GpuRequest(gpus), container=container)
        spec = replace(spec, max_replicas_per_node=most)
        claimed = tuple(Gpu(f"GPU-{number}-{index}") for index in range(gpus))
        create = CreateContainer(target=name, service=service, version=VERSION, number=number, gpus=claimed, spec=spec)
        await self.engine.perform(create, PROJECT)
        await self.engine.perform(StartContainer(target=name, service=service), PROJECT)
        return name

    async def look(self) -> dict[str, ReplicaContainer]:
        found = {one.name: one for one in (await self.engine.observe(PROJECT, set(), [])).containers}
        for name, one in found.items():
            history = self.seen.setdefault(name, [])
            if not history or history[-1] != one:
                history.append(one)
        return found

    async def until(
        self, what: str, reached: Callable[[dict[str, ReplicaContainer]], object]
    ) -> dict[str, ReplicaContainer]:
        deadline = time.monotonic() + PATIENCE_S
        while not reached(found := await self.look()):
            assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {what}; last seen: {found}"
            await asyncio.sleep(0.1)
        return found

    async def clear(self) -> None:
        for one in (await self.engine.observe(PROJECT, set(), [])).containers:
            await self.engine.perform(RemoveContainer(target=one.name, container_id=one.id, force=True), PROJECT)


@pytest_asyncio.fixture
async def world(rig: tuple[SwarmRig, str]) -> AsyncIterator[World]:
    made = World(*rig, open_client(rig[0].nodes[0].url))
    try:
        yield made
    finally:
        await made.clear()
        await made.engine.close()


def up(found: dict[str, ReplicaContainer], node: str = "") -> set[str]:
    return {name for name, one in found.items() if one.state.is_up and node in (one.node, "")}


async def test_gpus_of_a_lost_node_wait_for_it_and_nothing_counts_as_failed(world: World) -> None:
    names = [await world.start("ranker", number, gpus=1) for number in range(1, 7)]
    placed = await world.until("six run", lambda found: len(up(found)) == 6)
    everything = {uuid for node in world.rig.nodes for uuid in node.gpus}
    assert {uuid for one in placed.values() for uuid in one.gpus} == everything
    assert {one.node for one in placed.values()} == {"n1", "n2", "n3"}
    seventh = await world.start("ranker", 7, gpus=1)
    no_room = "no suitable node (insufficient resources on 3 nodes)"
    await world.until("the seventh has no node", lambda found: found[seventh].engine_detail.startswith(no_room))
    await world.engine.perform(RemoveContainer(target=seventh, container_id=(await world.look())[seventh].id), PROJECT)

    lost = [name for name in names if placed[name].node == "n3"]
    kept = [name for name in names if name not in lost]
    await asyncio.to_thread(world.rig.nodes[2].power_off)
    no_room = "n3 is down; no suitable node"  # until Swarm has looked for one, it says that it is about to
    await world.until("two wait", lambda found: all(found[name].engine_detail.startswith(no_room) for name in lost))
    assert all(one[-1].state is ContainerState.PENDING for name, one in world.seen.items() if name in lost)
    holders = (await world.engine.observe(PROJECT, set(), [])).foreign_gpu_holders
    assert holders == dict.fromkeys(world.rig.nodes[2].gpus, "n3 (down)"), "no replica is planned there"
    await asyncio.to_thread(world.rig.nodes[2].power_on)
    back = await world.until("six run again", lambda found: len(up(found)) == 6)
    assert {back[name].node for name in lost} == {"n3"}
    for name in names:
        states = {one.state for one in world.seen[name]}
        assert ContainerState.EXITED not in states, (name, world.seen[name])
        if name in kept:
            assert back[name] == placed[name], "what was not on that node has not changed"


async def test_a_replica_goes_elsewhere_when_its_node_is_drained(world: World) -> None:
    name = await world.start("web", 1)
    before = (await world.until("it runs", lambda found: name in up(found)))[name]
    manager = world.rig.nodes[0]
    await asyncio.to_thread(manager.cli, "node", "update", "--availability", "drain", before.node)
    try:
        after = (await world.until("it runs elsewhere", lambda found: name in up(found) - up(found, before.node)))[name]
    finally:
        await asyncio.to_thread(manager.cli, "node", "update", "--availability", "active", before.node)
    assert (after.id, after.created_at) == (before.id, before.created_at)
    assert (after.ip, after.started_at) != (before.ip, before.started_at)
    assert ContainerState.EXITED not in {one.state for one in world.seen[name]}


async def test_a_cut_cuts_what_it_says_and_no_more_and_a_restart_ends_what_ran(world: World) -> None:
    for number in range(1, 4):
        await world.start("spread", number, gpus=2)
    placed = await world.until("one on each node", lambda found: len(up(found)) == 3)
    on = {one.node: one for one in placed.values()}
    first, _, last = world.rig.nodes

    def reaches(node: Node, other: str) -> bool:
        """Whether a refusal, or an answer, comes from a port of the replica on the other node."""
        container = node.cli("ps", "--quiet", "--filter", "label=pierhead.replica").split()[0]
        try_it = f"timeout 2 bash -c '</dev/tcp/{on[other].ip}/9'; test $? != 124"
        return "yes" in node.cli("exec", container, "sh", "-c", f"{try_it} && echo yes || true")

    async def becomes(what: str, reached: Callable[[], bool]) -> None:
        await asyncio.to_thread(eventually, reached, what, PATIENCE_S)

    await becomes("the overlay works", lambda: reaches(first, "n3"))
    last.cut(OVERLAY)
    await becomes("n3 is not reached", lambda: not reaches(first, "n3"))
    assert reaches(first, "n2")
    assert world.rig.states() == dict.fromkeys(("n1", "n2", "n3"), "ready")
    last.heal()
    await becomes("n3 is reached again", lambda: reaches(first, "n3"))
    for ports, peers in (((CONTROL,), []), ((), world.rig.nodes[:2])):
        last.cut(*ports, peers=peers)
        await becomes("n3 is down", lambda: world.rig.states() == {"n1": "ready", "n2": "ready", "n3": "down"})
        assert len(last.cli("ps", "--quiet", "--filter", "label=pierhead.replica").split()) == 1, "it runs on"
        last.heal()
        await world.until("one on each node again", lambda found: len(up(found)) == 3)
    before = last.cli("ps", "--quiet", "--filter", "label=pierhead.replica")
    await asyncio.to_thread(last.restart_engine)
    await world.until("one on each node after the restart", lambda found: len(up(found, "n3")) == 1)
    assert last.cli("ps", "--quiet", "--filter", "label=pierhead.replica") != before


async def test_what_a_node_cannot_start_says_why(world: World) -> None:
    mounts = [{"Type": "bind", "Source": "/nowhere", "Target": "/data"}]
    name = await world.start("bound", 1, Mounts=mounts)
    found = await world.until("it is rejected", lambda found: found[name].state is ContainerState.EXITED)
    assert "bind source path does not exist: /nowhere (make /nowhere on all nodes" in found[name].engine_detail


async def test_replicas_are_spread_over_nodes_and_zones_and_bounded_on_each_node(world: World) -> None:
    """Also while another service fills a node: Swarm alone would take the node with the fewest tasks of all."""
    manager = world.rig.nodes[0]
    for node, zone in {"n1": "a", "n2": "a", "n3": "b"}.items():
        await asyncio.to_thread(manager.cli, "node", "update", "--label-add", f"zone={zone}", node)
    only = {"Placement": {"Constraints": ["node.hostname==n1"]}}
    for number in range(1, 4):
        await world.start("ballast", number, body=only)
    for number in range(1, 4):
        await world.start("web", number, most=1)
    zones = {"Placement": {"Preferences": [{"Spread": {"SpreadDescriptor": "node.labels.zone"}}]}}
    for number in range(1, 5):
        await world.start("zoned", number, body=zones)
    found = await world.until("all run", lambda found: len(up(found)) == 10)

    def nodes_of(service: str) -> Counter[str]:
        return Counter(one.node for one in found.values() if one.service == service)

    assert nodes_of("web") == {"n1": 1, "n2": 1, "n3": 1}
    assert nodes_of("zoned") == {"n1": 1, "n2": 1, "n3": 2}
    with pytest.raises(EngineError, match="fewer than 1 replicas of the service"):
        await world.start("web", 4, most=1)
    refused = (await world.look())[replica_name(PROJECT, "web", VERSION, 4)]
    assert refused.state is ContainerState.CREATED
    services = {one["Spec"]["Name"]: one for one in await asyncio.to_thread(world.engine._client.services)}
    for name, one in found.items():
        task = services[name]["Spec"]["TaskTemplate"]
        assert (task.get("Placement") or {}).get("Constraints", []) == (
            ["node.hostname==n1"] if one.service == "ballast" else []
        )
        assert len(world.rig.tasks(service=name)) == 1, "no task was replaced when the constraints went"


async def test_each_node_has_the_volume_with_its_options_and_the_secret(world: World) -> None:
    manager = world.rig.nodes[0]
    (world.rig.work / "token").write_text("told")
    secret = (
        await asyncio.to_thread(manager.cli, "secret", "create", "shop_token", str(world.rig.work / "token"))
    ).strip()
    options = {"type": "tmpfs", "device": "tmpfs", "o": "mode=1733,size=1m,nosuid,nodev,noexec"}
    volume = {"NoCopy": True, "DriverConfig": {"Name": "local", "Options": options}}
    mount = {"Type": "volume", "Source": "shop_memory", "Target": "/memory", "VolumeOptions": volume}
    place = {"Name": "shop_token", "Target": "/run/secrets/token", "UID": "0", "GID": "0", "Mode": 0o400}
    try:
        for number in (1, 2, 3):
            await world.start("sharing", number, most=1, body={"Secrets": [place]}, Mounts=[mount])
        await world.until("three run", lambda found: len(up(found)) == 3)
        for node in world.rig.nodes:
            here = node.cli("ps", "--quiet", "--filter", "label=pierhead.service=sharing").strip()
            said = node.cli(
                "exec", here, "sh", "-c", "grep ' /memory ' /proc/mounts; stat -c %a /memory /run/secrets/token"
            )
            assert "tmpfs" in said, said
            assert "size=1024k" in said, said
            assert said.split()[-2:] == ["1733", "400"]
            assert node.cli("exec", here, "cat", "/run/secrets/token") == "told"
    finally:
        await world.clear()
        await asyncio.to_thread(manager.cli, "secret", "rm", secret)
