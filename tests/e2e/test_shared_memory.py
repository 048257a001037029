"""Large tensors between containers: which memory they take, who sees it, and what is left when a replica is killed."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from subprocess import PIPE

import pytest

from dashboards import build_overview
from tests.harness.load import Load
from tests.harness.prometheus import Prometheus, queries_of, traffic
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


def metrics(stack: Stack, service: str) -> str:
    """The metrics of a service's only replica."""
    (replica,) = stack.replicas(service).values()
    return request(f"http://{address_of(replica)}:9100/metrics").body.decode()


def ways(stack: Stack, service: str) -> Counter[str]:
    """How the large tensors that a service's only replica sent travelled."""
    pattern = r'^pierhead_shared_memory_tensors_total\{.*?way="(\w+)".*?\} (\S+)$'
    return Counter({way: int(float(n)) for way, n in re.findall(pattern, metrics(stack, service), re.MULTILINE)})


def kept(stack: Stack, service: str) -> float:
    """Bytes of shared memory that a service's only replica has made and not given back."""
    (found,) = re.findall(r"^pierhead_shared_memory_bytes\S* (\S+)$", metrics(stack, service), re.MULTILINE)
    return float(found)


def went_by_memory(stack: Stack, transport: str) -> bool:
    """Send one large tensor; whether it was shared. The first one on a connection travels as bytes."""
    before = ways(stack, "front")["shared"]
    assert stack.get(f"/negate?size={TENSOR}&transport={transport}").status == 200
    return ways(stack, "front")["shared"] > before


def in_use() -> int:
    """Bytes of shared memory on this machine, as the kernel counts them."""
    (kib,) = re.findall(r"^Shmem: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(kib) * 1024


def sockets(stack: Stack, service: str, user: str = "root") -> str:
    """What `ls` says of the directory in a service's replica."""
    (replica,) = stack.replicas(service).values()
    return str(replica.exec_run(["ls", SOCKETS], user=user).output, "utf-8").strip()  # type: ignore[arg-type]


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

    assert sockets(tensors, "front") == "", "one that has its caller is removed"
    assert "Permission denied" in sockets(tensors, "front", user=""), "the replica's own user cannot find another one's"
    assert "No such file" in sockets(tensors, "outsider")


def test_panels_of_large_tensors_show_what_is_shared(tensors: WrittenStack) -> None:
    """Where nothing is shared they show zeros, which a test that wants data only would take for some."""
    queries = queries_of((build_overview.LARGE_TENSORS,))
    shown = {name: expr for name, expr in queries.items() if not name.endswith("elsewhere")}
    assert len(shown) == len(queries) - 1
    prometheus = Prometheus(tensors)
    with traffic(lambda: tensors.get(f"/negate?size={TENSOR}&count=12")):
        for name, expr in shown.items():
            eventually(lambda: max(prometheus.numbers(expr), default=0) > 0, f"{name} is above 0")  # noqa: B023


@contextmanager
def held(stack: Stack) -> Iterator[None]:
    """Within: the back works on a request with a large tensor. How it ends does not count."""
    eventually(partial(went_by_memory, stack, "lane"), "the two have met on this connection")
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
def test_a_killed_replica_leaves_no_memory(tensors: WrittenStack, killed: str) -> None:
    former = tensors.replica_ids(killed)
    # Memory that is kept for the next request would hide what this one takes.
    eventually(lambda: kept(tensors, "front") == kept(tensors, "back") == 0, "earlier requests' memory is given back")
    before = in_use()
    with held(tensors):
        tensors.kill_process(next(iter(tensors.replicas(killed).values())))
        if killed == "front":
            eventually(lambda: in_use() < before + OTHERS, "the kernel has all of it back", within_s=30)
        eventually(lambda: tensors.replica_ids(killed).isdisjoint(former), "it is replaced")
        tensors.wait_settled(front=1, back=1)
    eventually(lambda: tensors.get(f"/negate?size={TENSOR}").status == 200, "it answers again")


@pytest.mark.long
def test_the_called_service_is_scaled_under_load_without_a_failure(tensors: WrittenStack) -> None:
    with Load([tensors.url(f"/negate?size={MIB}")], connections=8) as load:
        for replicas in (3, 1):
            tensors.scale("back", replicas)
            tensors.wait_settled(back=replicas)
    load.assert_no_failure()
    assert ways(tensors, "front")["shared"] > load.result.requests / 2


class Killed:
    """A container whose processes are killed: tests/e2e/apps/tensors/killed.py."""

    def __init__(self, role: str, project: str, stack: ExitStack) -> None:
        name = f"{project}-{role}"
        command = ["docker", "run", "--rm", "-i", "--name", name, "--network", project, "--network-alias", role]
        command += ["-v", f"{project}:{SOCKETS}", "-v", f"{ROOT}/tests/e2e/apps/tensors:/tensors:ro", "--user", "0"]
        variables = {"PIERHEAD_PORT": "9000", "PIERHEAD_SHARED_MEMORY_DIR": SOCKETS}
        variables |= {"PIERHEAD_SHARED_MEMORY_BYTES": str(HELD), "PIERHEAD_LOG_LEVEL": "error"}
        for variable in variables.items():
            command += ["-e", "=".join(variable)]
        command += [f"pierhead/recsys:{os.environ.get('PIERHEAD_TAG', 'latest')}", "python", "/tensors/killed.py", role]
        self._process = stack.enter_context(subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True))
        stack.callback(docker, "rm", "-f", name)

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def docker(*arguments: str) -> None:
    subprocess.run(["docker", *arguments], check=False, capture_output=True, timeout=60)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_killed_senders_and_receivers_leave_no_memory() -> None:
    """PIERHEAD_TEST_KILLS: how many are killed, half of them senders."""
    kills = int(os.environ.get("PIERHEAD_TEST_KILLS", "1000"))
    project = f"pierhead-killed-{os.getpid()}"
    with ExitStack() as stack:
        for kind in ("network", "volume"):
            docker(kind, "create", project)
            stack.callback(docker, kind, "rm", project)
        pair = [Killed(role, project, stack) for role in ("back", "front")]

        def shared() -> list[int]:
            """MiB: of the machine, of the receivers' container, of the senders'."""
            for each in pair:
                each.tell("count")
            return [count // MIB for count in (in_use(), *(int(each.said()) for each in pair))]

        before = shared()
        print(f"\nshared memory in MiB (machine, receivers, senders) before: {before}")
        for number in range(kills // 2):
            for each in pair:
                each.tell("start")
            assert [each.said() for each in pair] == ["held", "held"]
            if number in (0, kills // 4):
                print(f"while pair {number} is held: {shared()}")
            for each in pair if number % 2 else reversed(pair):
                each.tell("kill")
                assert each.said() == "killed"
        eventually(lambda: all(now < then + OTHERS // MIB for now, then in zip(shared(), before, strict=True)), "freed")
        print(f"after {kills} killed: {shared()}")
