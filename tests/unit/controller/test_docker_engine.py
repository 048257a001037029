"""The Docker Engine's client against a daemon that answers as a test says: what a real one does too rarely."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from controller.engines.base import CONNECTED, EngineEvent
from controller.engines.docker import DockerEngine, is_orphaned
from controller.engines.docker_events import EventStream
from controller.engines.docker_machine import DockerMachine
from controller.engines.gpu_discovery import PROBE_LABEL, PROBE_VALUE, GpuSources
from controller.engines.labels import create_body
from controller.errors import EngineError, EngineSocketGone, EngineUnreachable, ImageNotFound
from controller.model.actions import (
    CreateContainer,
    PullImage,
    RemoveContainer,
    RestartRouter,
    SignalContainer,
    StartContainer,
)
from controller.model.machine import Footprint
from controller.model.observed import EngineState
from controller.model.spec import GpuSlot, ProbeSpec, ServiceSpec
from controller.model.world import ContainerState, Gpu, ReplicaContainer
from tests.harness.waiting import PATIENCE_S
from tests.unit.controller.docker_daemon import Answer, Daemon, Held, Stream, client_of

NETWORKS = {name: {"Aliases": ["ranker"]} for name in ("a", "b")}
CONTAINER = {"HostConfig": {"NetworkMode": "a"}, "NetworkingConfig": {"EndpointsConfig": NETWORKS}}
SPEC = ServiceSpec("ranker", "shop/ranker", "http", 8080, 1, ProbeSpec(9100, "/readyz"), container=CONTAINER)
CREATE = CreateContainer(target="shop-ranker-0a1b2c3d-1", service="ranker", version="0a1b2c3d", number=1, spec=SPEC)
LABELS = {
    "pierhead.project": "shop",
    "pierhead.service": "ranker",
    "pierhead.version": "0a1b2c3d",
    "pierhead.number": "1",
    "com.docker.compose.project": "shop",
}
LIST, INSPECT = "GET /containers/json", "GET /containers/c1/json"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(str(tmp_path / "docker.sock")).serving() as server:
        server.answers |= {"GET /info": (200, {}), LIST: (200, [])}
        yield server


@contextlib.asynccontextmanager
async def engine(daemon: Daemon) -> AsyncIterator[DockerEngine]:
    engine = DockerEngine(client_of(daemon.path), GpuSources(cdi_directories=()))
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield engine
    finally:
        await engine.close()


def summary(container_id: str = "c1", **changes: Any) -> dict[str, Any]:
    """One line of `GET /containers/json`."""
    return {
        "Id": container_id,
        "Names": ["/shop-ranker-0a1b2c3d-1"],
        "State": "running",
        "Status": "Up 2 minutes",
        "Labels": LABELS,
        "NetworkSettings": {"Networks": {"shop_default": {"IPAddress": "10.0.0.2"}}},
    } | changes


def inspected(**state: Any) -> dict[str, Any]:
    """The parts of `GET /containers/<id>/json` that are read."""
    default = {"Status": "running", "Running": True, "ExitCode": 0, "StartedAt": "2026-01-02T03:04:06.5Z"}
    config = {"Labels": LABELS, "Tty": False}
    return {"Created": "2026-01-02T03:04:05.123456789Z", "State": default | state, "Config": config}


def has(daemon: Daemon, *summaries: dict[str, Any], **state: Any) -> None:
    """List these containers; of each, `inspect` returns `state`."""
    daemon.answers[LIST] = (200, list(summaries))
    for each in summaries:
        daemon.answers[f"GET /containers/{each['Id']}/json"] = (200, inspected(**state))


# ------------------------------------------------------------------------------------------------------------- reading


async def observe(daemon: Daemon, *images: str) -> EngineState:
    async with engine(daemon) as docker:
        return await docker.observe("shop", ["ranker"], images)


async def read(daemon: Daemon, listed: dict[str, Any], **state: Any) -> ReplicaContainer:
    """The one replica that the engine lists."""
    has(daemon, listed, **state)
    (found,) = (await observe(daemon)).containers
    return found


async def test_a_world_at_rest_costs_one_call(daemon: Daemon) -> None:
    has(daemon, summary("c1"), summary("c2"))
    daemon.answers["GET /images/shop/ranker/json"] = (200, {"Id": "sha256:1"})
    async with engine(daemon) as docker:
        first = await docker.observe("shop", ["ranker"], ["shop/ranker"])
        daemon.calls.clear()
        second = await docker.observe("shop", ["ranker"], ["shop/ranker"])
        assert replace(second, machine=first.machine) == first
        assert daemon.calls == [LIST]
        assert all(one is before for one, before in zip(second.containers, first.containers, strict=True))
        has(daemon, summary("c1"), summary("c2", Status="Up 1 second"))
        daemon.calls.clear()
        await docker.observe("shop", ["ranker"], ["shop/ranker"])
        assert daemon.calls == [LIST, "GET /containers/c2/json"]
    assert first.containers[0].created_at == pytest.approx(1767323045.123456)
    assert first.containers[0].started_at == 1767323046.5


async def test_a_container_that_vanishes_while_being_read_is_gone(daemon: Daemon) -> None:
    daemon.answers[LIST] = (200, [summary()])
    assert (await observe(daemon)).containers == ()


@pytest.mark.parametrize(
    ("mode", "networks", "address"),
    [
        ("", {"a": {"IPAddress": "10.0.0.1"}, "shop_default": {"IPAddress": "10.0.0.2"}}, "10.0.0.2"),
        ("b", {"a": {"IPAddress": "10.0.0.1"}, "b": {"IPAddress": "10.0.0.2"}}, "10.0.0.2"),
        ("", {"shop_default": {"IPAddress": ""}, "z": {"IPAddress": "10.0.0.4"}}, "10.0.0.4"),
        ("", {"shop_default": None}, None),
        ("", None, None),
    ],
    ids=["the default network", "the one it was created in", "one with an address", "no address", "none"],
)
async def test_addresses(daemon: Daemon, mode: str, networks: Any, address: str | None) -> None:
    joined = summary(NetworkSettings={"Networks": networks}, HostConfig={"NetworkMode": mode})
    assert (await read(daemon, joined)).ip == address


SECONDS = [("605", 605.0), ("0.5", 0.5), ("", None), ("-1", None), ("inf", None), ("1e400", None), ("9" * 400, None)]
GPUS = [
    ("", ((), None)),
    ("GPU-1,GPU-2", (("GPU-1", "GPU-2"), None)),
    ("GPU-1=memory:1073741824", (("GPU-1",), GpuSlot(memory_bytes=1024**3))),
    ("0:1=fraction:0.5", (("0:1",), GpuSlot(fraction=0.5))),
    ("GPU-1=half", (("GPU-1",), None)),
]


@pytest.mark.parametrize(
    ("label", "text", "value"),
    [
        *[("port", text, value) for text, value in (("8081", 8081), ("x", None), ("", None))],
        *[("probe", text, value) for text, value in (("81/up", (81, "/up")), ("81", None), ("/up", None))],
        *[("graceful_shutdown_timeout_s", *each) for each in SECONDS],
        *[("stop_grace_period_s", *each) for each in SECONDS],
        *[("gpus", *each) for each in GPUS],
    ],
)
async def test_a_label_is_read_back(daemon: Daemon, label: str, text: str, value: object) -> None:
    found = await read(daemon, summary(Labels=LABELS | {f"pierhead.{label}": text}))
    assert ((found.gpus, found.gpu_slot) if label == "gpus" else getattr(found, label)) == value


async def test_a_replica_of_another_project_holds_its_gpu(daemon: Daemon) -> None:
    """Its labels are a replica's own, as any stack on this machine writes them."""
    made = create_body(SPEC, "lab-web-1", "1a2b3c4d", 1, (Gpu("GPU-0"),), "lab", "nvidia.com/gpu", "node")
    daemon.answers["GET /info"] = (200, {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=GPU-0"}]})
    probe = summary("p1", Names=["/probe"], Labels={PROBE_LABEL: PROBE_VALUE})
    theirs = summary("c1", Names=["/lab-web-1"], Labels=made["Labels"])
    daemon.answers[LIST] = (200, [theirs, probe])
    for container_id in ("c1", "p1"):
        daemon.answers[f"GET /containers/{container_id}/json"] = (200, inspected() | {"HostConfig": made["HostConfig"]})
    state = await observe(daemon)
    assert (state.containers, state.foreign_gpu_holders) == ((), {"GPU-0": "lab-web-1"})


@pytest.mark.parametrize(
    ("name", "changes"),
    [("shop-ranker-0a1b2c3d-1", {"Labels": LABELS | {"pierhead.number": "one"}}), ("hungry_hopper", {})],
    ids=["labels that were tampered with", "docker run of an image that was built with a replica's labels"],
)
async def test_a_container_that_is_no_replica_in_spite_of_its_labels_is_left_alone(
    daemon: Daemon, name: str, changes: dict[str, Any]
) -> None:
    has(daemon, summary("c1"), summary("c2", Names=[f"/{name}"], **changes))
    state = await observe(daemon)
    assert ([replica.id for replica in state.containers], state.strays) == (["c1"], ())
    assert f"container {name} carries the label pierhead.project=shop" in state.left_alone[name]
    assert f"docker rm -f {name}" in state.left_alone[name]


IMAGE_LABELS = {"com.docker.compose.project": "shop", "com.docker.compose.service": "ranker"}
"""What Compose writes into an image that it builds, and so into every container of it."""
COMPOSE_LABELS = IMAGE_LABELS | {"com.docker.compose.container-number": "2", "com.docker.compose.oneoff": "False"}


@pytest.mark.parametrize(
    ("name", "labels", "is_stray"),
    [
        ("shop-ranker-2", COMPOSE_LABELS, True),
        ("shop-ranker-run-8d2f", COMPOSE_LABELS | {"com.docker.compose.oneoff": "True"}, False),
        ("shop-ranker-2", COMPOSE_LABELS | {"com.docker.compose.oneoff": "True"}, False),
        ("hungry_hopper", IMAGE_LABELS, False),
        ("other-ranker-2", COMPOSE_LABELS | {"com.docker.compose.project": "other"}, False),
        ("shop-haproxy-2", COMPOSE_LABELS | {"com.docker.compose.service": "haproxy"}, False),
    ],
)
async def test_only_what_compose_started_as_a_service_s_container_is_a_stray(
    daemon: Daemon, name: str, labels: dict[str, str], is_stray: bool
) -> None:
    has(daemon, summary(Names=[f"/{name}"], Labels=labels))
    state = await observe(daemon)
    assert state.containers == ()
    assert [stray.name for stray in state.strays] == [name] * is_stray


# -------------------------------------------------------------------------------------------------------------- actions


async def test_a_name_whose_container_is_just_being_removed_is_for_the_next_plan(daemon: Daemon) -> None:
    daemon.answers["POST /containers/create"] = (409, {"message": "Conflict. The name is in use"})
    async with engine(daemon) as docker:
        with pytest.raises(EngineError, match=r"create of replica shop-ranker-0a1b2c3d-1 failed: .*Conflict"):
            await docker.perform(CREATE, "shop")


async def test_a_container_that_is_just_being_removed_needs_no_removal_and_has_no_logs(daemon: Daemon) -> None:
    has(daemon, summary())
    daemon.answers["DELETE /containers/c1"] = (409, {"message": "removal of container c1 is already in progress"})
    daemon.answers["GET /containers/c1/logs"] = (409, {"message": "can not get logs from container which is dead"})
    async with engine(daemon) as docker:
        await docker.perform(RemoveContainer(target="r", container_id="c1"), "shop")
        assert await docker.logs("c1", 20) == ""


@pytest.mark.parametrize(
    ("signal", "config", "sent"),
    [
        ("SIGTERM", {"StopSignal": "SIGQUIT"}, "SIGQUIT"),
        ("SIGTERM", {}, "SIGTERM"),
        ("SIGKILL", {"StopSignal": "SIGQUIT"}, "SIGKILL"),
    ],
)
async def test_a_replica_gets_the_signal_that_it_listens_to(
    daemon: Daemon, signal: Literal["SIGTERM", "SIGKILL"], config: dict[str, str], sent: str
) -> None:
    daemon.answers[INSPECT] = (200, {"Config": config})
    daemon.answers["POST /containers/c1/kill"] = (204, None)
    async with engine(daemon) as docker:
        await docker.perform(SignalContainer(target="r", container_id="c1", signal=signal), "shop")
        assert (daemon.calls[-1], daemon.bodies[-1]) == ("POST /containers/c1/kill", {"signal": [sent]})
        daemon.answers["POST /containers/c1/kill"] = (500, {"message": "tried to kill container, but did not receive"})
        with pytest.raises(EngineError, match=f"{signal} to replica r failed"):
            await docker.perform(SignalContainer(target="r", container_id="c1", signal=signal), "shop")


@pytest.mark.parametrize(("state", "kills"), [("running", 1), ("paused", 1), ("exited", 0)])
async def test_haproxy_s_container_is_killed_and_started(daemon: Daemon, state: str, kills: int) -> None:
    daemon.answers[LIST] = (200, [{"Id": "h1", "State": state}])
    daemon.answers["GET /containers/h1/top"] = (200, {"Processes": [["7", "Sl", "haproxy"], ["9", "Rs", "bash"]]})
    daemon.answers["POST /containers/h1/kill"] = (204, None)
    daemon.answers["POST /containers/h1/start"] = (204, None)
    async with engine(daemon) as docker:
        await docker.perform(RestartRouter(target="haproxy"), "shop")
    changes = [call for call in daemon.calls if call.startswith("POST ")]
    assert changes == ["POST /containers/h1/kill"] * kills + ["POST /containers/h1/start"]
    assert json.loads(daemon.bodies[daemon.calls.index(LIST)]["filters"][0])["label"] == [
        "com.docker.compose.project=shop",
        "com.docker.compose.service=haproxy",
        "com.docker.compose.oneoff=False",
    ]


@pytest.mark.parametrize("thread", ["R", "Rl", "D"])
async def test_a_haproxy_that_only_waits_for_cpu_time_is_not_killed(daemon: Daemon, thread: str) -> None:
    daemon.answers[LIST] = (200, [{"Id": "h1", "State": "running"}])
    threads = [["7", "Ss", "haproxy"], ["8", "Sl", "haproxy"], ["8", thread, "haproxy"]]
    daemon.answers["GET /containers/h1/top"] = (200, {"Titles": ["PID", "STAT", "COMMAND"], "Processes": threads})
    async with engine(daemon) as docker:
        with pytest.raises(EngineError, match="haproxy does not hang: it waits for CPU time or for the disk"):
            await docker.perform(RestartRouter(target="haproxy"), "shop")
    assert not any(call.startswith("POST ") for call in daemon.calls)


async def test_a_haproxy_that_compose_did_not_make_is_not_restarted(daemon: Daemon) -> None:
    async with engine(daemon) as docker:
        with pytest.raises(EngineError, match="Compose made no container of service haproxy in project shop"):
            await docker.perform(RestartRouter(target="haproxy"), "shop")


PULL = PullImage(target="ranker", service="ranker", image="shop/ranker:3", spec=SPEC)
PULLING = b'{"status": "Pulling from shop/ranker"}\n'


async def test_a_pull(daemon: Daemon) -> None:
    daemon.answers["POST /images/create"] = Stream(PULLING, b'{"status": "Download complete", "id": "1"}\n').end()
    async with engine(daemon) as docker:
        await docker.perform(PULL, "shop")
    assert daemon.bodies == [{"fromImage": ["shop/ranker"], "tag": ["3"]}]


@pytest.mark.parametrize(
    ("status", "said", "error"),
    [
        (404, "manifest for shop/ranker:3 not found: manifest unknown", ImageNotFound),
        (404, "pull access denied for shop/ranker", ImageNotFound),
        (500, 'Head "https://example/v2/shop/ranker/manifests/3": no basic auth credentials', ImageNotFound),
        (500, "unauthorized: authentication required", ImageNotFound),
        (500, "dial tcp: no such host", EngineError),
        (200, "unexpected EOF", EngineError),
    ],
)
async def test_a_pull_that_fails(daemon: Daemon, status: int, said: str, error: type[EngineError]) -> None:
    failing = Stream(PULLING, json.dumps({"error": said, "errorDetail": {"message": said}}).encode() + b"\n").end()
    daemon.answers["POST /images/create"] = failing if status == 200 else (status, {"message": said})
    async with engine(daemon) as docker:
        with pytest.raises(error) as raised:
            await docker.perform(PULL, "shop")
    assert type(raised.value) is error
    assert str(raised.value).startswith("pull of image shop/ranker:3 for service ranker failed: ")
    assert said in str(raised.value)
    assert ("`docker login` and `pierhead up`" in str(raised.value)) == (error is ImageNotFound)


async def test_the_world_is_seen_while_starts_take_long(daemon: Daemon) -> None:
    daemon.answers["POST /containers/slow/start"] = hanging = Held()
    async with engine(daemon) as docker:
        slow = StartContainer(target="slow", service="ranker", cause="x")
        starts = [asyncio.create_task(docker.perform(slow, "shop")) for _ in range(8)]
        for _ in starts:
            await hanging.request()
        assert (await docker.observe("shop", [], [])).containers == ()
        hanging.over.set()
        await asyncio.gather(*starts)


async def test_nothing_is_asked_about_a_container_before_its_first_start_has_ended(daemon: Daemon) -> None:
    """The engine would answer after the start."""

    async def seen() -> ReplicaContainer:
        (replica,) = (await docker.observe("shop", ["ranker"], [])).containers
        return replica

    has(daemon, summary(State="created", Status="Created", Created=1767323045), Status="created", ExitCode=128)
    daemon.answers["POST /containers/create"] = (201, {"Id": "c1"})
    daemon.answers[f"POST /containers/{CREATE.target}/start"] = start = Held()
    async with engine(daemon) as docker:
        assert (await seen()).exit_code == 128, "a replica that an earlier controller made"
        await docker.perform(CREATE, "shop")
        daemon.calls.clear()
        made = await seen()
        assert (made.state, made.created_at) == (ContainerState.CREATED, 1767323045.0)
        assert (made.started_at, made.exit_code, made.ip) == (None, None, None)
        starting = asyncio.create_task(docker.perform(StartContainer(target=CREATE.target, service="ranker"), "shop"))
        await start.request()
        assert await seen() == made
        assert INSPECT not in daemon.calls
        start.over.set()
        await starting
        assert (await seen()).exit_code == 128, "its start has failed"


# ----------------------------------------------------------------------------------------------------------------- logs


@pytest.mark.parametrize(("length", "kept"), [(64, 1024), (100, 655), (100_000, 0)])
async def test_a_long_log_is_cut_between_two_lines(daemon: Daemon, length: int, kept: int) -> None:
    lines = [f"{number:<{length - 1}}\n".encode() for number in range(2000 if kept else 2)]
    log = b"".join(b"\x01\0\0\0" + len(line).to_bytes(4, "big") + line for line in lines)
    has(daemon, summary())
    daemon.answers["GET /containers/c1/logs"] = Stream(log).end()
    async with engine(daemon) as docker:
        text = await docker.logs("c1", 2000)
    assert text == (b"".join(lines[-kept:]) if kept else lines[-1][-64 * 1024 :]).decode()


async def test_logs_that_do_not_come_hold_up_no_other_call(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.engines.docker_calls._MOST_LOG_READS", 9)
    has(daemon, summary())
    daemon.answers["GET /containers/c1/logs"] = hanging = Held()
    daemon.answers["DELETE /containers/c1"] = (204, None)
    async with engine(daemon) as docker:
        reads = [asyncio.create_task(docker.logs("c1", 20)) for _ in range(9)]
        await hanging.request()
        removal = RemoveContainer(target="r", service="ranker", cause="", container_id="c1", failed=True)
        await docker.perform(removal, "shop")
        assert "DELETE /containers/c1" in daemon.calls
        with pytest.raises(EngineError, match="9 other requests wait for logs"):
            await docker.logs("c1", 20)
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        with pytest.raises(TimeoutError):  # the threads still hang, and no other reader is refused
            async with asyncio.timeout(0.05):
                await docker.logs("c1", 20)


# --------------------------------------------------------------------------------------------------------------- events


def event(kind: str = "die", project: str = "shop") -> dict[str, Any]:
    attributes = {"name": "shop-ranker-1", "com.docker.compose.project": project}
    return {"Type": "container", "Action": kind, "Actor": {"ID": "c1", "Attributes": attributes}}


IMAGE_EVENT = {"Type": "image", "Action": "tag", "Actor": {"ID": "sha256:2", "Attributes": {"name": "shop/ranker"}}}


@contextlib.asynccontextmanager
async def following(docker: DockerEngine) -> AsyncIterator[Callable[[], Any]]:
    """The next event of an open stream, again and again."""
    events = aiter(docker.events("shop"))
    assert await anext(events) == CONNECTED
    yield lambda: anext(events)
    await events.aclose()  # type: ignore[attr-defined]


async def test_events_of_this_project_and_of_images(daemon: Daemon) -> None:
    whole, next_one = (json.dumps(event(kind)).encode() + b"\n" for kind in ("start", "die"))
    other = json.dumps(event("start", "other")).encode() + b"\n"
    daemon.answers["GET /events"] = stream = Stream(other, whole[:20], whole[20:] + next_one)
    daemon.answers["GET /images/shop/ranker/json"] = (200, {"Id": "sha256:1"})
    async with engine(daemon) as docker, following(docker) as next_event:
        assert await next_event() == EngineEvent("start", "c1", "shop-ranker-1")
        assert await next_event() == EngineEvent("die", "c1", "shop-ranker-1")
        for image_id in ("sha256:1", "sha256:2"):
            daemon.answers["GET /images/shop/ranker/json"] = (200, {"Id": image_id})
            assert (await docker.observe("shop", [], ["shop/ranker"])).images == {"shop/ranker": image_id}
            stream.say(**IMAGE_EVENT)
            assert await next_event() == EngineEvent("image tag", "", "shop/ranker")


async def test_while_events_are_followed_a_container_that_has_just_started_is_asked_about_once(daemon: Daemon) -> None:
    async def started_at() -> float | None:
        daemon.calls.clear()
        return (await docker.observe("shop", ["ranker"], [])).containers[0].started_at

    daemon.answers["GET /events"] = stream = Stream()
    has(daemon, summary(Status="Up 1 second"))
    async with engine(daemon) as docker:
        before = await started_at()
        async with following(docker) as next_event:
            assert await started_at() == before
            assert daemon.calls == [LIST, INSPECT], "what was read before may be old"
            has(daemon, summary(Status="Up 2 seconds"))
            assert await started_at() == before
            assert daemon.calls == [LIST]

            has(daemon, summary(Status="Up 2 seconds"), StartedAt="2026-01-02T04:00:00Z")
            stream.say(**event("restart"))
            assert (await next_event()).kind == "restart"
            assert await started_at() != before
            assert await started_at() != before
            assert daemon.calls == [LIST]

            stream.end()
            with pytest.raises(EngineUnreachable):
                await next_event()
            for _ in range(2):
                await started_at()
                assert daemon.calls == [LIST, INSPECT], "events may be missed"


async def test_an_event_during_a_read_of_its_container_causes_another_read(daemon: Daemon) -> None:
    daemon.answers["GET /events"] = stream = Stream()
    has(daemon, summary(Status="Up 1 second"))
    daemon.answers[INSPECT] = inspecting = Held(200, inspected())
    async with engine(daemon) as docker, following(docker) as next_event:
        reading = asyncio.ensure_future(docker.observe("shop", ["ranker"], []))
        await inspecting.request()
        stream.say(**event("restart"))
        assert (await next_event()).kind == "restart"
        inspecting.over.set()
        await reading
        daemon.calls.clear()
        await docker.observe("shop", ["ranker"], [])
        assert daemon.calls == [LIST, INSPECT]


async def test_closing_the_engine_ends_its_streams(daemon: Daemon) -> None:
    daemon.answers["GET /events"] = Stream()
    async with engine(daemon) as docker, following(docker) as next_event:
        waiting = asyncio.ensure_future(next_event())
        await asyncio.sleep(0)
        await docker.close()
        with pytest.raises(EngineUnreachable):
            await waiting


async def test_an_event_may_be_long_and_what_is_none_breaks_the_stream(daemon: Daemon) -> None:
    long = json.dumps(event("start") | {"more": "x" * 3_000_000}).encode() + b"\n"
    daemon.answers["GET /events"] = Stream(long, b"[]\n")
    async with engine(daemon) as docker, following(docker) as next_event:
        assert (await next_event()).kind == "start"
        with pytest.raises(EngineUnreachable, match="event stream: AttributeError"):
            await next_event()


@pytest.mark.parametrize("answer", [Stream().end(), (500, {"message": "shutting down"})], ids=["ends", "500"])
async def test_a_stream_that_ends_is_an_engine_that_is_away(daemon: Daemon, answer: Answer) -> None:
    daemon.answers["GET /events"] = answer
    async with engine(daemon) as docker:
        with pytest.raises(EngineUnreachable, match="event stream: the Docker Engine does not answer"):
            async for _ in docker.events("shop"):
                pass


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A socket file as a container has it: the same, whatever becomes of its name outside. It is silent."""
    listen_at(tmp_path / "docker.sock")
    descriptor = os.open(tmp_path / "docker.sock", os.O_PATH)
    with warnings.catch_warnings():  # docker-py leaves a socket that did not connect to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        yield Path(f"/proc/self/fd/{descriptor}")
        gc.collect()
    os.close(descriptor)


def listen_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


async def test_a_deleted_socket_file_differs_from_an_engine_that_is_down(mounted: Path, tmp_path: Path) -> None:
    async def how_events_end() -> type[BaseException]:
        with pytest.raises(EngineUnreachable, match="Connection refused") as ended:
            async for _ in docker.events("shop"):
                pass
        return ended.type

    docker = DockerEngine(client_of(mounted))
    assert await how_events_end() is EngineUnreachable
    path = tmp_path / "docker.sock"
    path.unlink()
    assert await how_events_end() is EngineSocketGone
    listen_at(path)  # the next engine's, of the same name
    assert await how_events_end() is EngineSocketGone
    await docker.close()
    assert [is_orphaned(one) for one in (mounted, path, tmp_path / "none")] == [True, False, False]


async def first_events(daemon: Daemon, count: int, quiet_s: float) -> list[EngineEvent]:
    async with (
        asyncio.timeout(PATIENCE_S),
        contextlib.aclosing(
            EventStream(Path(daemon.path), "1.45", lambda _: None, _quiet_s=quiet_s).events()
        ) as events,
    ):
        return [await anext(events) for _ in range(count)]


async def test_a_quiet_stream_is_opened_again(daemon: Daemon) -> None:
    daemon.answers["GET /events"] = Stream()
    for quiet_s in (0.05, 0.5, 5.0):  # also the limit of the daemon's answer, which takes longer on a busy machine
        with contextlib.suppress(EngineUnreachable):
            assert await first_events(daemon, 3, quiet_s) == [CONNECTED] * 3
            return
    pytest.fail("the daemon's answer took longer than 5 s")


# ------------------------------------------------------------------------------------------- what the machine has left

PROC = {
    "meminfo": "MemTotal:       25276502 kB\nMemFree:  100 kB\nMemAvailable:   24402264 kB\nHugePages_Total:       0\n",
    "loadavg": "17.65 3.41 0.50 12/1765 4242\n",
    "sys/kernel/pid_max": "32768\n",
    "sys/kernel/threads-max": "192730\n",
    "pressure/memory": "some avg10=21.50 avg60=0.04 avg300=0.27 total=51\nfull avg10=0.00 avg60=0.03 avg300=0 total=3",
}
UP_FOR_S = {"c1": 1000.0, "c2": 900.0, "c3": 800.0, "c4": 700.0, "c5": 5.0}
STATS = {"memory_stats": {"usage": 90 * 1024**2, "stats": {"active_file": 9 * 1024**2, "inactive_file": 1024**2}}}


def proc(path: Path, **changes: str | None) -> Path:
    for name, text in {**PROC, **{key.replace("__", "/"): value for key, value in changes.items()}}.items():
        if text is not None:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
    return path


def running(container_id: str, service: str = "web", up_for_s: float = 1000.0) -> ReplicaContainer:
    began = 10_000.0 - up_for_s
    return ReplicaContainer(
        container_id, container_id, service, "v", 1, ContainerState.RUNNING, created_at=began, started_at=began
    )


def test_what_the_machine_has_left_is_read_from_the_kernel(daemon: Daemon, tmp_path: Path) -> None:
    with contextlib.closing(client_of(daemon.server_address)) as client:
        machine = DockerMachine(client, proc(tmp_path / "proc")).read(())
    assert machine is not None
    assert (machine.memory_bytes, machine.free_bytes) == (25276502 * 1024, 24402264 * 1024)
    assert (machine.processes, machine.most_processes) == (1765, 32768)
    assert (machine.load, machine.stalled_percent) == (17.65, 21.5)


def test_a_kernel_without_pressure_is_read_and_one_without_memory_is_not_known(daemon: Daemon, tmp_path: Path) -> None:
    with contextlib.closing(client_of(daemon.server_address)) as client:
        without = DockerMachine(client, proc(tmp_path / "a", pressure__memory=None)).read(())
        assert without is not None
        assert without.stalled_percent == 0.0
        assert DockerMachine(client, proc(tmp_path / "b", meminfo=None)).read(()) is None
        assert DockerMachine(client, proc(tmp_path / "c", loadavg="nonsense")).read(()) is None


def test_what_a_replica_takes_is_that_of_those_that_have_run_for_longest(daemon: Daemon, tmp_path: Path) -> None:
    replicas = [running(name, up_for_s=up_for_s) for name, up_for_s in UP_FOR_S.items()]
    replicas.append(running("old", "at_rest"))
    for number, name in enumerate(UP_FOR_S, start=1):
        daemon.answers[f"GET /containers/{name}/stats"] = (200, {**STATS, "pids_stats": {"current": number}})
    daemon.answers["GET /containers/c2/stats"] = (404, {"message": "No such container: c2"})
    with contextlib.closing(client_of(daemon.server_address)) as client:
        machine = DockerMachine(client, proc(tmp_path / "proc"), clock=lambda: 10_000.0)
        daemon.calls.clear()
        first, second = machine.read(replicas), machine.read(replicas)
    assert first is not None
    assert first == second
    assert first.footprints == {"web": Footprint(memory_bytes=80 * 1024**2, processes=3)}
    assert [call for call in daemon.calls if "c2" not in call] == [
        f"GET /containers/{name}/stats" for name in ("c1", "c3")
    ]
