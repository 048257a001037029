"""What comes from outside (labels, replicas' answers, log lines) is parsed where it enters, whatever it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controller.daemon.apply import _gist
from controller.engines.docker import DockerEngine
from controller.engines.gpu_discovery import GpuSources
from controller.engines.labels import read_labels
from controller.errors import ReplicaError
from controller.model.spec import ProbeSpec
from controller.observe.admin_pages import HttpProbe
from controller.observe.judge import ProbeReading
from controller.observe.prober import Subject
from controller.status.documents import timed_lines
from controller.swarm.engine.placing import EVERY_NODE, narrowing
from controller.swarm.engine.reader import SwarmListing, left_alone, replicas
from controller.swarm.engine.service_spec import LIMIT_LABEL, NARROWED_LABEL, STOPPED_LABEL
from controller.swarm.state.lease import Claim
from controller.tool.feeds import readable
from tests.harness.waiting import PATIENCE_S
from tests.unit.controller import test_swarm_reader as swarm
from tests.unit.controller.docker_daemon import Daemon, client_of
from tests.unit.controller.test_docker_engine import LABELS, has, summary

NESTED = "[" * 60_000
HOSTILE = {
    "5,000 digits": "9" * 5000,
    "negative": "-1",
    "not a number": "NaN",
    "infinite": "inf",
    "beyond a port": "99999",
    "digits of another script": "٣",
    "no digit to int()": "²",
    "empty": "",
    "megabytes": "x" * 2_000_000,
    "control characters": "\x1b]0;owned\x07\r\nHost: other\x00",
    "not UTF-8": b"caf\xe9".decode(errors="surrogateescape"),
    "nested": NESTED,
}
by_value = pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
OURS = [f"pierhead.{key}" for key in ("number", "service", "version", "replica", "port", "probe", "gpus", "node")]
OURS += ["pierhead.graceful_shutdown_timeout_s", "pierhead.stop_grace_period_s"]


# -------------------------------------------------------------------------------------------------------------- labels


@by_value
@pytest.mark.parametrize("form", ["{}", "GPU-1=memory:{}", "GPU-1=fraction:{}", "{}/readyz", "9100/{}"])
def test_a_label_is_a_value_that_can_be_used_or_none(value: str, form: str) -> None:
    name = LABELS | {"pierhead.replica": "shop-ranker-0a1b2c3d-1"}
    for label in OURS:
        read = read_labels(name | {label: form.format(value)}, "shop-ranker-0a1b2c3d-1", "shop")
        if read is None:
            assert label in ("pierhead.number", "pierhead.service", "pierhead.version")
            continue
        assert read["number"] == 1
        assert read["port"] is None or 0 < read["port"] < 65536
        assert read["probe"] is None or (0 < read["probe"][0] < 65536 and read["probe"][1].isprintable())


@by_value
async def test_a_container_that_cannot_be_understood_is_left_alone(value: str, tmp_path: Path) -> None:
    """The others are read, and its name is reported with the reason."""
    value = value.encode(errors="replace").decode()  # the engine's answers are UTF-8
    strange = summary("c2", Labels=LABELS | {"pierhead.number": value})
    with Daemon(str(tmp_path / "docker.sock")).serving() as daemon:
        daemon.answers |= {"GET /info": (200, {})}
        has(daemon, summary("c1"), strange)
        engine = DockerEngine(client_of(daemon.path), GpuSources(cdi_directories=()))
        try:
            async with asyncio.timeout(PATIENCE_S):
                state = await engine.observe("shop", ["ranker"], [])
        finally:
            await engine.close()
    assert [one.id for one in state.containers] == ["c1"]
    assert set(state.left_alone) == {"shop-ranker-0a1b2c3d-1"}


@by_value
def test_a_service_of_a_swarm_that_cannot_be_understood_is_left_alone(value: str) -> None:
    ours, strange = swarm.service(1), swarm.service(1, (), **{"pierhead.number": value})
    listing = SwarmListing([ours, strange], [], swarm.READY)
    assert [one.name for one in replicas(listing, "shop")] == [swarm.NAME]
    assert set(left_alone(listing, "shop")) == {swarm.NAME}


@by_value
def test_the_labels_of_a_swarm_are_read_or_count_as_none(value: str) -> None:
    claim = Claim.of({"pierhead.epoch": value, "pierhead.beat": value})
    assert claim == Claim("unknown", *([int(value)] * 2 if value == "99999" else (0, 0)))
    one = swarm.service(0, (), **{STOPPED_LABEL: value, LIMIT_LABEL: value, NARROWED_LABEL: value})
    listing = SwarmListing([one], [], swarm.READY)
    assert [found.started_at for found in replicas(listing, "shop")] == [None]
    assert narrowing(one["Spec"], listing) == EVERY_NODE


# --------------------------------------------------------------------------------------------------- replicas' answers

_FIELDS = (
    "ongoing",
    "queued",
    "waiting",
    "answered",
    "errors",
    "progress",
    "user_config",
    "stats",
    "stats_version",
    "unreached",
)
_TEXTS = ("detail", "stage", "state")


def _reports(value: str) -> list[bytes]:
    """Bodies that have a value in every place of a report, as text and as a number."""
    text = json.dumps(dict.fromkeys((*_FIELDS, *_TEXTS), value)).encode(errors="replace")
    number = ", ".join(f'"{name}": {value}' for name in _FIELDS).encode(errors="surrogateescape")
    unreached = {value: {value: value, "name": 1}, "service": value}
    inner = json.dumps(
        {"waiting": {value: 1}, "stats": {value: 1}, "stats_version": 1, "unreached": unreached}
    ).encode()
    sleep = {"can": True, "wanted": True, "asleep": True, "error": value}
    config = json.dumps({"user_config": dict.fromkeys(("wanted", "applied", "error"), value), "sleep": sleep}).encode()
    return [text, b"{" + number + b"}", inner, config, value.encode(errors="surrogateescape")]


def _heads(value: str) -> list[bytes]:
    """Answers whose head has a value where HTTP has one."""
    raw = value.encode(errors="surrogateescape")
    names = (b"Content-Length", b"Content-Type", b"Content-Encoding", b"Transfer-Encoding", b"Connection")
    return [
        raw + b"\r\n\r\n",
        b"HTTP/1.1 " + raw + b" OK\r\n\r\n",
        *(b"HTTP/1.1 200 OK\r\n" + name + b": " + raw + b"\r\n\r\n{}" for name in names),
    ]


@contextlib.asynccontextmanager
async def raw_replica(answer: bytes) -> AsyncIterator[Subject]:
    """A replica on 127.0.0.1 that sends these bytes to each request and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(4096)
            writer.write(answer)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield Subject("c1", 0.0, "127.0.0.1", ProbeSpec(port, "/readyz", timeout_s=PATIENCE_S), managed=True)


@by_value
async def test_any_answer_of_a_replica_is_a_reading(value: str) -> None:
    ok = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nConnection: close\r\n\r\n"
    probe = HttpProbe()
    for answer in [*(ok + body for body in _reports(value)), *_heads(value)]:
        async with raw_replica(answer) as subject:
            reading = await probe(subject)
            assert isinstance(reading, ProbeReading)
            told = (reading.detail, reading.reason, reading.stage, *_config_texts(reading))
            assert all(len(text) <= 2000 and text.isprintable() for text in told)
            assert isinstance(await probe(_foreign(subject)), ProbeReading)
            assert isinstance(await probe.contract(subject), bytes | None)
            with contextlib.suppress(ReplicaError):
                await probe.give(f"127.0.0.1:{subject.spec.port}", "{}", "")
            with contextlib.suppress(ReplicaError):
                await probe.put_to_sleep(f"127.0.0.1:{subject.spec.port}", True, "")


def _foreign(subject: Subject) -> Subject:
    return Subject(subject.container_id, 0.0, subject.ip, subject.spec, managed=False)


def _config_texts(reading: ProbeReading) -> tuple[str, ...]:
    config, sleep = reading.user_config, reading.sleep
    return (*((config.wanted, config.applied, config.error) if config else ()), *((sleep.error,) if sleep else ()))


# ----------------------------------------------------------------------------------------------------------- log lines


@by_value
def test_any_log_line_is_read(value: str) -> None:
    record = dict.fromkeys(("time", "level", "logger", "message", "error", "request_id", "more"), value)
    deep = [f'{{"level": "info", "more": {"[" * depth}{"]" * depth}}}' for depth in (100, 900, 2_000, 9_000, 30_000)]
    for line in (value, json.dumps(record), f'{{"level": "info", "time": {value}, "message": {value}}}', *deep):
        assert list(timed_lines(line)) is not None
        assert _gist(line).isprintable()
        assert readable(line)
