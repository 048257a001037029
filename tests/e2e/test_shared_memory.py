"""Large tensors between containers: which memory they take, who sees it, and what is left when a replica is killed."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.harness.load import Load
from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import ROOT, Stack, address_of, request
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

APP = (ROOT / "tests" / "e2e" / "apps" / "tensors.yaml").read_text()
SOCKETS = "/run/pierhead/memory"
MIB = 1024**2
TENSOR = 16 * MIB
HELD = 128 * MIB
OTHERS = 48 * MIB
"""What the rest of the machine may add to the kernel's count, or take from it, during a test."""


@pytest.fixture
def tensors(written: WrittenStack) -> WrittenStack:
    """Front, back and outsider, which answer."""
    written.become(APP, front=1, back=1, outsider=1)
    eventually(lambda: written.get("/negate?size=10").status == 200, "it answers")
    return written


def ways(stack: Stack, service: str) -> Counter[str]:
    """How the large tensors that a service's only replica sent travelled."""
    (replica,) = stack.replicas(service).values()
    page = request(f"http://{address_of(replica)}:9100/metrics").body.decode()
    found = re.findall(r'^pierhead_shared_memory_tensors_total\{.*?way="(\w+)".*?\} (\S+)$', page, re.MULTILINE)
    return Counter({way: int(float(count)) for way, count in found})


def went_by_memory(stack: Stack, transport: str) -> bool:
    """Send one large tensor; whether it was shared. The first one on a connection travels as bytes."""
    before = ways(stack, "front")["shared"]
    assert stack.get(f"/negate?size={TENSOR}&transport={transport}").status == 200
    return ways(stack, "front")["shared"] > before


def in_use() -> int:
    """Bytes of shared memory on this machine, as the kernel counts them."""
    (kib,) = re.findall(r"^Shmem: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(kib) * 1024


def sockets(stack: Stack, service: str) -> list[str]:
    (replica,) = stack.replicas(service).values()
    listed = replica.exec_run(["ls", SOCKETS])
    return str(listed.output, "utf-8").split() if listed.exit_code == 0 else []  # type: ignore[arg-type]


def test_large_tensors_travel_in_memory_that_only_these_services_share(tensors: WrittenStack) -> None:
    for transport in ("lane", "grpc"):
        eventually(partial(went_by_memory, tensors, transport), "the two have met on this connection")
    before = {service: ways(tensors, service) for service in ("front", "back")}
    for transport in ("lane", "grpc"):
        for route in ("negate", "count"):
            answer = tensors.get(f"/{route}?size={TENSOR}&transport={transport}")
            assert (answer.status, answer.body) == (200, b"right: True"), (transport, route)
    sent, answered = (ways(tensors, service) - before[service] for service in ("front", "back"))
    assert sent["shared"] + sent["copied"] == sent.total() == 4
    assert answered["shared"] + answered["copied"] == answered.total() == 2 * (1 + 4)

    # A request whose tensors do not fit: the rest travels as bytes.
    assert tensors.get(f"/negate?size={TENSOR}&count=12").status == 200
    assert (ways(tensors, "front") - before["front"])["full"] >= 12 - 160 // 16

    assert len(sockets(tensors, "front")) == 2
    assert sockets(tensors, "back") == sockets(tensors, "front")
    assert not sockets(tensors, "outsider")


@contextmanager
def held(stack: Stack) -> Iterator[None]:
    """Within: the back works on a request with a large tensor. How it ends does not count."""
    before = in_use()

    def ask() -> None:
        with suppress(OSError):
            stack.get(f"/hold?size={HELD}")

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: in_use() > before + HELD - OTHERS, "the tensor is in memory")
    yield
    asking.join()


@pytest.mark.parametrize("killed", ["front", "back"])
def test_a_killed_replica_leaves_no_memory_and_no_socket(tensors: WrittenStack, killed: str) -> None:
    (other,) = {"front", "back"} - {killed}
    former = tensors.replica_ids(killed)
    before = in_use()
    with held(tensors):
        tensors.kill_process(next(iter(tensors.replicas(killed).values())))
        if killed == "front":
            eventually(lambda: in_use() < before + OTHERS, "the kernel has all of it back", within_s=30)
        eventually(lambda: tensors.replica_ids(killed).isdisjoint(former), "it is replaced")
        tensors.wait_settled(front=1, back=1)
    eventually(lambda: tensors.get(f"/negate?size={TENSOR}").status == 200, "it answers again")
    eventually(lambda: len(sockets(tensors, other)) == 2, "the former one's socket is gone")


@pytest.mark.long
def test_the_called_service_is_scaled_under_load_without_a_failure(tensors: WrittenStack) -> None:
    with Load([tensors.url(f"/negate?size={MIB}")], connections=8) as load:
        for replicas in (3, 1):
            tensors.scale("back", replicas)
            tensors.wait_settled(back=replicas)
    load.assert_no_failure()
    assert ways(tensors, "front")["shared"] > load.result.requests / 2
