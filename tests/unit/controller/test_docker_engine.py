"""The Docker Engine's client against a daemon that answers what a test tells it to: what a real one does too rarely."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.server
import json
import logging
import os
import socket
import socketserver
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import pytest
from docker import APIClient

from controller.engines.base import CONNECTED, OVERFLOW, EngineEvent
from controller.engines.docker import DockerEngine, _end_of, is_orphaned
from controller.engines.docker_events import EventQueue, EventReader
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
from controller.model.spec import GpuSlot, ProbeSpec, ServiceSpec
from controller.model.world import ContainerState, Gpu, ReplicaContainer
from tests.harness.waiting import PATIENCE_S

SPEC = ServiceSpec("ranker", "shop/ranker", "http", 8080, 1, ProbeSpec(9100, "/readyz"))
CREATE = CreateContainer(target="shop-ranker-0a1b2c3d-1", service="ranker", version="0a1b2c3d", number=1, spec=SPEC)
LABELS = {
    "pierhead.project": "shop",
    "pierhead.service": "ranker",
    "pierhead.version": "0a1b2c3d",
    "pierhead.number": "1",
    "com.docker.compose.project": "shop",
}

Answer = tuple[int, Any] | Callable[["Handler"], None]


class Daemon(socketserver.ThreadingUnixStreamServer):
    """Answers by method and path (without the version); 404 where a test has set nothing."""

    daemon_threads = True

    def __init__(self, path: str) -> None:
        super().__init__(path, Handler)
        self.path = path
        self.answers: dict[str, Answer] = {
            "GET /info": (200, {}),
            "GET /containers/json": (200, []),
        }
        self.calls: list[str] = []
        self.bodies: list[Any] = []
        self.ending = threading.Event()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Daemon

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class's name)
        pass

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that hangs up is part of these tests
            super().handle_one_request()

    def respond(self) -> None:
        url = urlsplit(self.path)
        call = f"{self.command} /{url.path.split('/', 2)[2]}"
        length = int(self.headers.get("Content-Length") or 0)
        self.server.bodies.append(json.loads(self.rfile.read(length)) if length else parse_qs(url.query))
        self.server.calls.append(call)
        answer = self.server.answers.get(call, (404, {"message": f"no answer for {call}"}))
        if callable(answer):
            answer(self)
            # A client that was left without an answer would wait for it long after the test.
            self.close_connection = self.close_connection or self.server.ending.is_set()
            return
        status, body = answer
        data = b"" if status in (204, 304) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = respond  # noqa: N815  (the base class looks for these names)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def say(self, **event: Any) -> None:
        self.chunk(json.dumps(event).encode() + b"\n")

    def end_stream(self) -> None:
        self.chunk(b"")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    server = Daemon(str(tmp_path / "docker.sock"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.ending.set()
    server.shutdown()
    thread.join()
    server.server_close()


@contextlib.asynccontextmanager
async def engine(daemon: Daemon, version: str = "1.45") -> AsyncIterator[DockerEngine]:
    client = APIClient(base_url=f"unix://{daemon.path}", version=version)
    engine = DockerEngine(client, GpuSources(cdi_directories=()))
    try:
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
    return {"Created": "2026-01-02T03:04:05.123456789Z", "State": default | state, "Config": {"Labels": LABELS}}


# ------------------------------------------------------------------------------------------------------------- reading


def logs_of(*entries: bytes) -> bytes:
    """What the engine sends of a log: frames of standard output."""
    return b"".join(b"\x01\0\0\0" + len(entry).to_bytes(4, "big") + entry for entry in entries)


async def read(daemon: Daemon, listed: dict[str, Any], told: dict[str, Any] | None = None) -> ReplicaContainer:
    """The one replica that the engine lists, and tells of, like this."""
    daemon.answers["GET /containers/json"] = (200, [listed])
    daemon.answers["GET /containers/c1/json"] = (200, told or inspected())
    async with engine(daemon) as docker:
        (found,) = (await docker.observe("shop", ["ranker"], [])).containers
    return found


async def test_a_long_log_is_cut_between_two_lines(daemon: Daemon) -> None:
    daemon.answers["GET /containers/c1/json"] = (200, {"Config": {"Tty": False}})
    lines = [f"{number} ".encode() + b"x" * 90 + b"\n" for number in range(2000)]

    def answer(handler: Handler) -> None:
        handler.begin_stream()
        handler.chunk(logs_of(*lines))
        handler.end_stream()

    daemon.answers["GET /containers/c1/logs"] = answer
    async with engine(daemon) as ours:
        text = await ours.logs("c1", 2000)
        assert text == b"".join(lines[-len(text.splitlines()) :]).decode()
        assert 64 * 1024 - 100 < len(text) <= 64 * 1024
        await ours.logs("c1", 2000, timed=True)
        asked = [query["timestamps"] for query in daemon.bodies if "tail" in query]
        assert asked == [["0"], ["1"]]


def test_the_end_of_a_log() -> None:
    assert _end_of(b"a\nb\n", 4) == b"a\nb\n"
    assert _end_of(b"aa\nb\n", 4) == b"b\n"
    assert _end_of(b"aa\nb\n", 2) == b"b\n", "cut between two lines, nothing of them is dropped"
    assert _end_of(b"x" * 9, 4) == b"xxxx", "a line that does not fit"


async def test_a_world_at_rest_costs_one_call(daemon: Daemon) -> None:
    daemon.answers["GET /containers/json"] = (200, [summary("c1"), summary("c2")])
    daemon.answers["GET /images/shop/ranker/json"] = (200, {"Id": "sha256:1"})
    for container_id in ("c1", "c2"):
        daemon.answers[f"GET /containers/{container_id}/json"] = (200, inspected())
    async with engine(daemon) as docker:
        first = await docker.observe("shop", ["ranker"], ["shop/ranker"])
        daemon.calls.clear()
        second = await docker.observe("shop", ["ranker"], ["shop/ranker"])
        assert second == first
        assert daemon.calls == ["GET /containers/json"]
        assert all(one is before for one, before in zip(second.containers, first.containers, strict=True))
        daemon.answers["GET /containers/json"] = (200, [summary("c1"), summary("c2", Status="Up 1 second")])
        daemon.calls.clear()
        await docker.observe("shop", ["ranker"], ["shop/ranker"])
        assert daemon.calls == ["GET /containers/json", "GET /containers/c2/json"]
    assert first.containers[0].created_at == pytest.approx(1767323045.123456)
    assert first.containers[0].started_at == 1767323046.5


async def test_a_container_that_vanishes_while_being_read_is_gone(daemon: Daemon) -> None:
    daemon.answers["GET /containers/json"] = (200, [summary()])
    async with engine(daemon) as docker:
        assert (await docker.observe("shop", ["ranker"], [])).containers == ()


@pytest.mark.parametrize(
    ("networks", "address"),
    [
        ({"a": {"IPAddress": "10.0.0.1"}, "shop_default": {"IPAddress": "10.0.0.2"}}, "10.0.0.2"),
        ({"b": {"IPAddress": "10.0.0.1"}, "a": {"IPAddress": "10.0.0.3"}}, "10.0.0.3"),
        ({"shop_default": {"IPAddress": ""}, "z": {"IPAddress": "10.0.0.4"}}, "10.0.0.4"),
        ({"shop_default": None}, None),
        ({}, None),
        (None, None),
    ],
)
async def test_addresses(daemon: Daemon, networks: Any, address: str | None) -> None:
    assert (await read(daemon, summary(NetworkSettings={"Networks": networks}))).ip == address


async def test_the_address_is_in_the_network_it_was_created_in(daemon: Daemon) -> None:
    networks = {"back": {"IPAddress": "10.0.0.1"}, "front": {"IPAddress": "10.0.0.2"}}
    joined = summary(NetworkSettings={"Networks": networks}, HostConfig={"NetworkMode": "front"})
    assert (await read(daemon, joined)).ip == "10.0.0.2"


@pytest.mark.parametrize(
    ("labels", "port"), [({"pierhead.port": "8081"}, 8081), ({"pierhead.port": "x"}, None), ({}, None)]
)
async def test_the_port_that_a_replica_was_made_for(daemon: Daemon, labels: dict[str, str], port: int | None) -> None:
    assert (await read(daemon, summary(Labels=LABELS | labels))).port == port


@pytest.mark.parametrize(
    ("label", "gpus", "slot"),
    [
        ("", (), None),
        ("GPU-1,GPU-2", ("GPU-1", "GPU-2"), None),
        ("GPU-1=memory:1073741824", ("GPU-1",), GpuSlot(memory_bytes=1024**3)),
        ("0:1=fraction:0.5", ("0:1",), GpuSlot(fraction=0.5)),
        ("GPU-1=half", ("GPU-1",), None),
    ],
)
async def test_what_a_replica_has_of_the_gpus(
    daemon: Daemon, label: str, gpus: tuple[str, ...], slot: GpuSlot | None
) -> None:
    found = await read(daemon, summary(Labels=LABELS | {"pierhead.gpus": label}))
    assert (found.gpus, found.gpu_slot) == (gpus, slot), "an amount that cannot be read is all of it"


async def test_a_replica_of_another_project_holds_its_gpu(daemon: Daemon) -> None:
    """Its labels are a replica's own, as any stack on this machine writes them."""
    made = create_body(SPEC, "lab-web-1", "1a2b3c4d", 1, (Gpu("GPU-0"),), "lab", "nvidia.com/gpu", "node")
    daemon.answers["GET /info"] = (200, {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=GPU-0"}]})
    probe = summary("p1", Names=["/probe"], Labels={PROBE_LABEL: PROBE_VALUE})
    theirs = summary("c1", Names=["/lab-web-1"], Labels=made["Labels"])
    daemon.answers["GET /containers/json"] = (200, [theirs, probe])
    for container_id in ("c1", "p1"):
        daemon.answers[f"GET /containers/{container_id}/json"] = (200, inspected() | {"HostConfig": made["HostConfig"]})
    async with engine(daemon) as docker:
        state = await docker.observe("shop", ["ranker"], [])
    assert (state.containers, state.foreign_gpu_holders) == ((), {"GPU-0": "lab-web-1"})


@pytest.mark.parametrize(("running", "state"), [(True, ContainerState.RUNNING), (False, ContainerState.EXITED)])
async def test_a_state_of_a_later_engine(daemon: Daemon, running: bool, state: ContainerState) -> None:
    assert (await read(daemon, summary(State="stopping"), inspected(Status="stopping", Running=running))).state is state


@pytest.mark.parametrize(
    ("label", "seconds"),
    [("605", 605.0), ("0.5", 0.5), ("", None), ("-1", None), ("inf", None), ("1e400", None), ("9" * 400, None)],
)
async def test_the_times_that_a_replica_was_made_with(daemon: Daemon, label: str, seconds: float | None) -> None:
    labels = {"pierhead.graceful_shutdown_timeout_s": label, "pierhead.stop_grace_period_s": label}
    replica = await read(daemon, summary(Labels=LABELS | labels))
    assert (replica.graceful_shutdown_timeout_s, replica.stop_grace_period_s) == (seconds, seconds)


async def test_labels_that_were_tampered_with_are_reported_once(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.answers["GET /containers/json"] = (200, [summary(Labels=LABELS | {"pierhead.number": "one"})])
    async with engine(daemon) as docker:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert (await docker.observe("shop", ["ranker"], [])).containers == ()
    (record,) = caplog.records
    assert "docker rm -f shop-ranker-0a1b2c3d-1" in record.message


async def test_a_container_with_a_replica_s_labels_and_another_name_is_left_alone(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """`docker run` of an image that was built with these labels; every container of it has them."""
    of_an_image = summary("c2", Names=["/hungry_hopper"], Image="hostile")
    daemon.answers["GET /containers/json"] = (200, [summary(), of_an_image])
    daemon.answers["GET /containers/c1/json"] = (200, inspected())
    async with engine(daemon) as docker:
        with caplog.at_level(logging.WARNING):
            state = await docker.observe("shop", ["ranker"], [])
    assert [replica.id for replica in state.containers] == ["c1"]
    assert state.strays == ()
    (record,) = caplog.records
    assert "container hungry_hopper" in record.message


IMAGE_LABELS = {"com.docker.compose.project": "shop", "com.docker.compose.service": "ranker"}
"""What Compose writes into an image that it builds, and so into every container of it."""
COMPOSE_LABELS = IMAGE_LABELS | {"com.docker.compose.container-number": "2", "com.docker.compose.oneoff": "False"}


@pytest.mark.parametrize(
    ("name", "labels", "is_stray"),
    [
        ("shop-ranker-2", COMPOSE_LABELS, True),
        ("shop_ranker_2", COMPOSE_LABELS, True),  # docker compose --compatibility
        ("shop-ranker-run-8d2f", COMPOSE_LABELS | {"com.docker.compose.oneoff": "True"}, False),
        ("hungry_hopper", IMAGE_LABELS, False),
        ("shop-ranker-2", IMAGE_LABELS, False),
        ("hungry_hopper", COMPOSE_LABELS, False),
        ("other-ranker-2", COMPOSE_LABELS | {"com.docker.compose.project": "other"}, False),
        ("shop-haproxy-2", COMPOSE_LABELS | {"com.docker.compose.service": "haproxy"}, False),
    ],
)
async def test_only_what_compose_started_as_a_service_s_container_is_a_stray(
    daemon: Daemon, name: str, labels: dict[str, str], is_stray: bool
) -> None:
    daemon.answers["GET /containers/json"] = (200, [summary(Names=[f"/{name}"], Labels=labels)])
    async with engine(daemon) as docker:
        state = await docker.observe("shop", ["ranker"], [])
    assert state.containers == ()
    assert [stray.name for stray in state.strays] == [name] * is_stray


async def test_an_engine_in_trouble_is_quoted(daemon: Daemon) -> None:
    daemon.answers["GET /containers/json"] = (500, {"message": "out of\nfile descriptors"})
    async with engine(daemon) as docker:
        with pytest.raises(EngineError, match=r"reading containers failed: .* out of file descriptors$"):
            await docker.observe("shop", [], [])


async def test_a_cancelled_call_returns_at_once_and_the_engine_goes_on(daemon: Daemon) -> None:
    asked = threading.Event()

    def hang(handler: Handler) -> None:
        asked.set()
        handler.server.ending.wait()

    daemon.answers["GET /containers/json"] = hang
    async with engine(daemon) as docker:
        task = asyncio.create_task(docker.exists("shop", "haproxy"))
        await asyncio.to_thread(asked.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        daemon.answers["GET /containers/json"] = (200, [summary()])
        assert await docker.exists("shop", "haproxy")


# -------------------------------------------------------------------------------------------------------------- actions


async def test_all_networks_go_into_the_create_call(daemon: Daemon) -> None:
    spec = with_networks("a", "b")
    daemon.answers["POST /containers/create"] = (201, {"Id": "c1"})
    async with engine(daemon) as docker:
        await docker.perform(replace(CREATE, spec=spec), "shop")
    assert daemon.calls == ["GET /info", "POST /containers/create"]
    assert list(daemon.bodies[-1]["NetworkingConfig"]["EndpointsConfig"]) == ["a", "b"]


async def test_replicas_are_told_the_machine_s_name(daemon: Daemon) -> None:
    daemon.answers["GET /info"] = (200, {"Name": "gpu-7"})
    daemon.answers["POST /containers/create"] = (201, {"Id": "c1"})
    async with engine(daemon) as docker:
        for _ in range(2):
            await docker.perform(replace(CREATE, spec=with_networks("a")), "shop")
    assert ["PIERHEAD_NODE=gpu-7" in sent["Env"] for sent in daemon.bodies if sent] == [True, True]
    assert daemon.calls.count("GET /info") == 1


def with_networks(*names: str) -> ServiceSpec:
    endpoints = {name: {"Aliases": ["ranker"]} for name in names}
    container = {
        "HostConfig": {"NetworkMode": names[0]},
        "NetworkingConfig": {"EndpointsConfig": endpoints},
    }
    return ServiceSpec("ranker", "shop/ranker", "http", 8080, 1, ProbeSpec(9100, "/readyz"), container=container)


async def test_a_name_whose_container_is_just_going_is_for_the_next_plan(daemon: Daemon) -> None:
    daemon.answers["POST /containers/create"] = (409, {"message": "Conflict. The name is in use"})
    async with engine(daemon) as docker:
        with pytest.raises(EngineError, match=r"create of replica shop-ranker-0a1b2c3d-1 failed: .*Conflict"):
            await docker.perform(CREATE, "shop")


async def test_a_removal_under_way_is_done(daemon: Daemon) -> None:
    said = {"message": "removal of container c1 is already in progress"}
    daemon.answers["DELETE /containers/c1"] = (409, said)
    async with engine(daemon) as docker:
        await docker.perform(RemoveContainer(target="r", container_id="c1"), "shop")


@pytest.mark.parametrize(
    ("signal", "config", "sent"),
    [
        ("SIGTERM", {"StopSignal": "SIGQUIT"}, "SIGQUIT"),
        ("SIGTERM", {"StopSignal": ""}, "SIGTERM"),
        ("SIGTERM", {}, "SIGTERM"),
        ("SIGKILL", {"StopSignal": "SIGQUIT"}, "SIGKILL"),
    ],
)
async def test_a_replica_is_asked_to_end_by_the_signal_that_it_listens_to(
    daemon: Daemon, signal: Literal["SIGTERM", "SIGKILL"], config: dict[str, str], sent: str
) -> None:
    daemon.answers["GET /containers/c1/json"] = (200, {"Config": config})
    daemon.answers["POST /containers/c1/kill"] = (204, None)
    async with engine(daemon) as docker:
        await docker.perform(SignalContainer(target="r", container_id="c1", signal=signal), "shop")
    assert daemon.calls[-1] == "POST /containers/c1/kill"
    assert daemon.bodies[-1] == {"signal": [sent]}


@pytest.mark.parametrize(("state", "kills"), [("running", 1), ("paused", 1), ("exited", 0)])
async def test_haproxy_s_container_is_killed_and_started(daemon: Daemon, state: str, kills: int) -> None:
    daemon.answers["GET /containers/json"] = (200, [{"Id": "h1", "State": state}])
    daemon.answers["POST /containers/h1/kill"] = (204, None)
    daemon.answers["POST /containers/h1/start"] = (204, None)
    async with engine(daemon) as docker:
        await docker.perform(RestartRouter(target="haproxy"), "shop")
    changes = [call for call in daemon.calls if call.startswith("POST ")]
    assert changes == ["POST /containers/h1/kill"] * kills + ["POST /containers/h1/start"]
    (looked,) = [body for call, body in zip(daemon.calls, daemon.bodies, strict=True) if "json" in call]
    assert json.loads(looked["filters"][0])["label"] == [
        "com.docker.compose.project=shop",
        "com.docker.compose.service=haproxy",
        "com.docker.compose.oneoff=False",
    ]


async def test_a_haproxy_that_compose_did_not_make_is_not_restarted(daemon: Daemon) -> None:
    async with engine(daemon) as docker:
        with pytest.raises(EngineError, match="Compose made no container of service haproxy in project shop"):
            await docker.perform(RestartRouter(target="haproxy"), "shop")


async def test_a_replica_that_is_gone_needs_no_signal(daemon: Daemon) -> None:
    async with engine(daemon) as docker:
        await docker.perform(SignalContainer(target="r", container_id="c1", signal="SIGTERM"), "shop")
    assert "POST /containers/c1/kill" not in daemon.calls


async def test_a_signal_that_the_engine_cannot_send_is_an_error(daemon: Daemon) -> None:
    daemon.answers["GET /containers/c1/json"] = (200, {"Config": {}})
    daemon.answers["POST /containers/c1/kill"] = (500, {"message": "tried to kill container, but did not receive"})
    async with engine(daemon) as docker:
        with pytest.raises(EngineError, match="SIGTERM to replica r failed"):
            await docker.perform(SignalContainer(target="r", container_id="c1", signal="SIGTERM"), "shop")


PULL = PullImage(target="ranker", service="ranker", image="shop/ranker:3", spec=SPEC)


async def test_a_pull(daemon: Daemon) -> None:
    def progress(handler: Handler) -> None:
        handler.begin_stream()
        handler.say(status="Pulling from shop/ranker")
        handler.say(status="Download complete", id="1")
        handler.end_stream()

    daemon.answers["POST /images/create"] = progress
    async with engine(daemon) as docker:
        await docker.perform(PULL, "shop")
    assert daemon.bodies == [{"fromImage": ["shop/ranker"], "tag": ["3"]}]


@pytest.mark.parametrize(
    ("status", "said", "error"),
    [
        (404, "manifest for shop/ranker:3 not found: manifest unknown", ImageNotFound),
        (404, "pull access denied for shop/ranker", ImageNotFound),
        (500, "dial tcp: no such host", EngineError),
        (200, "unexpected EOF", EngineError),
    ],
)
async def test_a_pull_that_fails(daemon: Daemon, status: int, said: str, error: type[EngineError]) -> None:
    def fail(handler: Handler) -> None:
        handler.begin_stream()
        handler.say(status="Pulling")
        handler.say(error=said, errorDetail={"message": said})
        handler.end_stream()

    daemon.answers["POST /images/create"] = fail if status == 200 else (status, {"message": said})
    async with engine(daemon) as docker:
        with pytest.raises(error) as raised:
            await docker.perform(PULL, "shop")
    assert type(raised.value) is error
    assert str(raised.value).startswith("pull of image shop/ranker:3 for service ranker failed: ")
    assert said in str(raised.value)


async def test_a_cancelled_pull_hangs_up(daemon: Daemon) -> None:
    begun, hung_up = threading.Event(), threading.Event()

    def endless(handler: Handler) -> None:
        handler.begin_stream()
        try:
            while not handler.server.ending.wait(0.01):
                handler.say(status="Downloading")
                begun.set()
        except OSError:
            hung_up.set()
            raise

    daemon.answers["POST /images/create"] = endless
    async with engine(daemon) as docker:
        task = asyncio.create_task(docker.perform(PULL, "shop"))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(hung_up.wait, 10)


# --------------------------------------------------------------------------------------------------------------- events


def event(kind: str = "die", **attributes: str) -> dict[str, Any]:
    labels = {"name": "shop-ranker-1", "com.docker.compose.project": "shop"} | attributes
    return {"Type": "container", "Action": kind, "Actor": {"ID": "c1", "Attributes": labels}}


async def test_events_of_this_project_and_of_images(daemon: Daemon) -> None:
    def stream(handler: Handler) -> None:
        handler.begin_stream()
        handler.say(**event("start", **{"com.docker.compose.project": "other"}))
        whole = json.dumps(event("start")).encode() + b"\n"
        handler.chunk(whole[:20])
        handler.chunk(whole[20:] + json.dumps(event("die")).encode() + b"\n")
        handler.say(Type="image", Action="tag", Actor={"ID": "sha256:1", "Attributes": {"name": "shop/ranker"}})
        handler.server.ending.wait()

    daemon.answers["GET /events"] = stream
    async with engine(daemon) as docker, asyncio.timeout(10):
        events = aiter(docker.events("shop"))
        assert [await anext(events) for _ in range(4)] == [
            CONNECTED,
            EngineEvent("start", "c1", "shop-ranker-1"),
            EngineEvent("die", "c1", "shop-ranker-1"),
            EngineEvent("image tag", "", "shop/ranker"),
        ]
        await events.aclose()  # type: ignore[attr-defined]


async def test_an_image_event_makes_its_id_be_read_again(daemon: Daemon) -> None:
    tell = threading.Event()

    def stream(handler: Handler) -> None:
        handler.begin_stream()
        tell.wait()
        handler.say(Type="image", Action="tag", Actor={"ID": "sha256:2", "Attributes": {"name": "shop/ranker"}})
        handler.server.ending.wait()

    daemon.answers["GET /events"] = stream
    daemon.answers["GET /images/shop/ranker/json"] = (200, {"Id": "sha256:1"})
    async with engine(daemon) as docker, asyncio.timeout(10):
        events = aiter(docker.events("shop"))
        assert await anext(events) == CONNECTED
        assert (await docker.observe("shop", [], ["shop/ranker"])).images == {"shop/ranker": "sha256:1"}
        daemon.answers["GET /images/shop/ranker/json"] = (200, {"Id": "sha256:2"})
        tell.set()
        assert (await anext(events)).kind == "image tag"
        assert (await docker.observe("shop", [], ["shop/ranker"])).images == {"shop/ranker": "sha256:2"}
        await events.aclose()  # type: ignore[attr-defined]


async def test_while_events_are_followed_a_container_that_has_just_started_is_asked_about_once(daemon: Daemon) -> None:
    restarted, over = threading.Event(), threading.Event()

    def stream(handler: Handler) -> None:
        handler.begin_stream()
        restarted.wait()
        handler.say(**event("restart"))
        over.wait()
        handler.end_stream()

    daemon.answers["GET /events"] = stream
    daemon.answers["GET /containers/json"] = (200, [summary("c1", Status="Up 1 second")])
    daemon.answers["GET /containers/c1/json"] = (200, inspected())

    async def started_at() -> float | None:
        daemon.calls.clear()
        return (await docker.observe("shop", ["ranker"], [])).containers[0].started_at

    async with engine(daemon) as docker, asyncio.timeout(10):
        before = await started_at()
        events = aiter(docker.events("shop"))
        assert await anext(events) == CONNECTED
        assert await started_at() == before
        assert daemon.calls == ["GET /containers/json", "GET /containers/c1/json"], "what was read before may be old"
        daemon.answers["GET /containers/json"] = (200, [summary("c1", Status="Up 2 seconds")])
        assert await started_at() == before
        assert daemon.calls == ["GET /containers/json"]

        daemon.answers["GET /containers/c1/json"] = (200, inspected(StartedAt="2026-01-02T04:00:00Z"))
        restarted.set()
        assert (await anext(events)).kind == "restart"
        assert await started_at() != before
        assert await started_at() != before
        assert daemon.calls == ["GET /containers/json"]

        over.set()
        with pytest.raises(EngineUnreachable):
            await anext(events)
        for _ in range(2):
            await started_at()
            assert daemon.calls == ["GET /containers/json", "GET /containers/c1/json"], "events may be missed"


async def test_a_start_that_fails_is_no_event_and_shows_in_the_code(daemon: Daemon) -> None:
    def stream(handler: Handler) -> None:
        handler.begin_stream()
        handler.server.ending.wait()

    def ended(code: int, age: str) -> None:
        daemon.calls.clear()
        daemon.answers["GET /containers/json"] = (200, [summary(State="exited", Status=f"Exited ({code}) {age} ago")])
        daemon.answers["GET /containers/c1/json"] = (200, inspected(Status="exited", Running=False, ExitCode=code))

    async def exit_code() -> int | None:
        return (await docker.observe("shop", ["ranker"], [])).containers[0].exit_code

    daemon.answers["GET /events"] = stream
    async with engine(daemon) as docker, asyncio.timeout(10):
        events = aiter(docker.events("shop"))
        assert await anext(events) == CONNECTED
        ended(1, "2 seconds")
        assert await exit_code() == 1
        ended(1, "3 seconds")
        assert await exit_code() == 1
        assert daemon.calls == ["GET /containers/json"]
        ended(128, "3 seconds")
        assert await exit_code() == 128
        await events.aclose()  # type: ignore[attr-defined]


async def test_what_happens_while_a_container_is_being_read_makes_it_be_read_again(daemon: Daemon) -> None:
    asked, told = threading.Event(), threading.Event()

    def stream(handler: Handler) -> None:
        handler.begin_stream()
        asked.wait()
        handler.say(**event("restart"))
        handler.server.ending.wait()

    def inspect(handler: Handler) -> None:
        asked.set()
        told.wait()
        body = json.dumps(inspected()).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    daemon.answers["GET /events"] = stream
    daemon.answers["GET /containers/json"] = (200, [summary("c1", Status="Up 1 second")])
    daemon.answers["GET /containers/c1/json"] = inspect
    async with engine(daemon) as docker, asyncio.timeout(10):
        events = aiter(docker.events("shop"))
        assert await anext(events) == CONNECTED
        reading = asyncio.ensure_future(docker.observe("shop", ["ranker"], []))
        assert (await anext(events)).kind == "restart"
        told.set()
        await reading
        daemon.calls.clear()
        await docker.observe("shop", ["ranker"], [])
        assert daemon.calls == ["GET /containers/json", "GET /containers/c1/json"]
        await events.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("status", [200, 500])
async def test_a_stream_that_ends_is_an_engine_that_is_away(daemon: Daemon, status: int) -> None:
    def end(handler: Handler) -> None:
        handler.begin_stream()
        handler.end_stream()

    daemon.answers["GET /events"] = end if status == 200 else (status, {"message": "shutting down"})
    async with engine(daemon) as docker, asyncio.timeout(10):
        with pytest.raises(EngineUnreachable, match="event stream: the Docker Engine does not answer"):
            async for _ in docker.events("shop"):
                pass


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A socket file as a container has it: the same, whatever becomes of its name outside. Nobody listens there."""
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


async def test_a_socket_file_that_is_deleted_is_told_from_an_engine_that_is_away(mounted: Path, tmp_path: Path) -> None:
    docker = DockerEngine(APIClient(base_url=f"unix://{mounted}", version="1.45"))
    assert await how_events_end(docker) is EngineUnreachable
    path = tmp_path / "docker.sock"
    path.unlink()
    assert await how_events_end(docker) is EngineSocketGone
    listen_at(path)  # the next engine's, of the same name
    assert await how_events_end(docker) is EngineSocketGone
    await docker.close()
    assert [is_orphaned(one) for one in (mounted, path, tmp_path / "none", None)] == [True, False, False, False]


async def how_events_end(docker: DockerEngine) -> type[BaseException]:
    with pytest.raises(EngineUnreachable, match="Connection refused") as ended:
        async for _ in docker.events("shop"):
            pass
    return ended.type


async def test_a_quiet_stream_is_opened_anew(daemon: Daemon) -> None:
    def quiet(handler: Handler) -> None:
        handler.begin_stream()
        handler.server.ending.wait()

    daemon.answers["GET /events"] = quiet

    async def opened(quiet_s: float) -> bool:
        client = APIClient(base_url=f"unix://{daemon.path}", version="1.45")
        queue = EventQueue(asyncio.get_running_loop())
        reader = EventReader(client, queue, lambda _: None, quiet_s=quiet_s)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return [await queue.get() for _ in range(3)] == [CONNECTED] * 3
        except EngineUnreachable:  # it is also as long as the daemon may take to answer, which a busy machine needs
            return False
        finally:
            reader.close()
            reader.join(PATIENCE_S)
            client.close()

    assert await opened(0.05) or await opened(0.5) or await opened(5.0)


async def test_a_daemon_that_takes_the_call_and_says_nothing_is_away(daemon: Daemon) -> None:
    def silent(handler: Handler) -> None:
        handler.server.ending.wait()

    daemon.answers["GET /events"] = silent
    client = APIClient(base_url=f"unix://{daemon.path}", version="1.45")
    queue = EventQueue(asyncio.get_running_loop())
    reader = EventReader(client, queue, lambda _: None, quiet_s=0.05)
    async with asyncio.timeout(10):
        with pytest.raises(EngineUnreachable):
            await queue.get()
    reader.join(10)
    client.close()


async def test_more_events_than_the_queue_holds_become_one() -> None:
    queue = EventQueue(asyncio.get_running_loop(), limit=3)
    for number in range(100):
        queue.put(EngineEvent("start", str(number), "x"))
    queue.fail(EngineUnreachable("gone"))
    got = [event async for event in until_unreachable(queue)]
    assert got[0] == OVERFLOW
    assert len(got) <= 3


async def until_unreachable(queue: EventQueue) -> AsyncIterator[EngineEvent]:
    with contextlib.suppress(EngineUnreachable):  # the end that is waited for
        while True:
            yield await queue.get()


async def test_a_full_queue_wakes_a_waiting_reader_from_another_thread() -> None:
    def fill() -> None:
        for _ in range(10):
            queue.put(EngineEvent("start", "c", "x"))

    queue = EventQueue(asyncio.get_running_loop(), limit=3)
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await asyncio.to_thread(fill)
        assert (await waiting).kind in ("start", "overflow")


async def test_the_world_is_seen_while_starts_take_long(daemon: Daemon) -> None:
    asked: list[Handler] = []

    def hang(handler: Handler) -> None:
        asked.append(handler)
        handler.server.ending.wait()

    daemon.answers["POST /containers/slow/start"] = hang
    daemon.answers["GET /containers/json"] = (200, [])
    async with engine(daemon) as docker:
        starting = StartContainer(target="slow", service="ranker", cause="x")
        starts = [asyncio.create_task(docker.perform(starting, "shop")) for _ in range(8)]
        async with asyncio.timeout(10):
            while len(asked) < 8:  # noqa: ASYNC110 - a thread fills it
                await asyncio.sleep(0.01)
            assert (await docker.observe("shop", [], [])).containers == ()
        for task in starts:
            task.cancel()
        await asyncio.gather(*starts, return_exceptions=True)


async def test_a_container_that_is_just_going_has_no_logs_and_is_no_error(daemon: Daemon) -> None:
    said = {"message": "can not get logs from container which is dead or marked for removal"}
    daemon.answers["GET /containers/c1/json"] = (200, {"Config": {"Tty": False}})
    daemon.answers["GET /containers/c1/logs"] = (409, said)
    async with engine(daemon) as docker:
        assert await docker.logs("c1", 20) == ""


async def test_logs_that_do_not_come_keep_nobody_from_the_engine(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.engines.docker._MOST_LOG_READS", 9)
    asked = threading.Event()

    def hang(handler: Handler) -> None:
        asked.set()
        handler.server.ending.wait()

    daemon.answers["GET /containers/c1/json"] = (200, {"Config": {"Tty": False}})
    daemon.answers["GET /containers/c1/logs"] = hang
    daemon.answers["DELETE /containers/c1"] = (204, None)
    async with engine(daemon) as docker, asyncio.timeout(10):
        reads = [asyncio.create_task(docker.logs("c1", 20)) for _ in range(9)]
        await asyncio.to_thread(asked.wait)
        removal = RemoveContainer(target="r", service="ranker", cause="", container_id="c1", failed=True)
        await docker.perform(removal, "shop")
        assert "DELETE /containers/c1" in daemon.calls
        with pytest.raises(EngineError, match="9 others wait for logs already"):
            await docker.logs("c1", 20)
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        with pytest.raises(TimeoutError):  # the threads still hang, and nobody else is turned away
            async with asyncio.timeout(0.05):
                await docker.logs("c1", 20)


async def test_nobody_asks_about_a_container_before_its_first_start_has_ended(daemon: Daemon) -> None:
    """The engine would answer after the start."""
    begun, over = threading.Event(), threading.Event()

    def start(handler: Handler) -> None:
        begun.set()
        over.wait()
        handler.send_response(204)
        handler.end_headers()

    async def seen() -> ReplicaContainer:
        (replica,) = (await docker.observe("shop", ["ranker"], [])).containers
        return replica

    name = CREATE.target
    listed = summary(Names=[f"/{name}"], State="created", Status="Created", Created=1767323045)
    daemon.answers["POST /containers/create"] = (201, {"Id": "c1"})
    daemon.answers[f"POST /containers/{name}/start"] = start
    daemon.answers["GET /containers/json"] = (200, [listed])
    daemon.answers["GET /containers/c1/json"] = (200, inspected(Status="created", ExitCode=128))
    async with engine(daemon) as docker, asyncio.timeout(10):
        assert (await seen()).exit_code == 128, "one that an earlier controller made"
        await docker.perform(replace(CREATE, spec=with_networks("a")), "shop")
        daemon.calls.clear()
        made = await seen()
        assert (made.state, made.created_at) == (ContainerState.CREATED, 1767323045.0)
        assert (made.started_at, made.exit_code, made.ip) == (None, None, None)
        starting = asyncio.create_task(docker.perform(StartContainer(target=name, service="ranker"), "shop"))
        await asyncio.to_thread(begun.wait)
        assert await seen() == made
        assert "GET /containers/c1/json" not in daemon.calls
        over.set()
        await starting
        assert (await seen()).exit_code == 128, "its start has failed"
