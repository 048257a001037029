"""The worst that somebody can type, next to honest clients: what is said, what runs, and that nobody else notices.

Each mistake is made on a running stack, stays for a while, and is taken back. The service that it is made in is `web`;
honest clients ask `echo`, 20 times a second over HTTP and as often over gRPC. `-s` prints the table.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from tests.harness.clients import Clients
from tests.harness.load import Load
from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import ROOT
from tests.harness.waiting import eventually, seconds_until

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(1500)]

ECHO = (ROOT / "compose/apps/echo-proto.yaml").read_text()
IMAGE = "pierhead/echo:${PIERHEAD_TAG:-latest}"
PER_S = 20
STAYS = 6 * PER_S
"""Honest requests that are answered, over HTTP and gRPC each, while the mistake is in force."""
WAITS = (
    r"replicas are starting, and at most|are not ready yet: no more|no time for a start|memory are free|process ids are"
)
"""Why a replica is PENDING that the machine has no room or time for."""


def web(environment: Mapping[str, str] | None = None, serve: Mapping[str, Any] | None = None, **words: Any) -> Any:
    """The service, with other words of Compose and of its x-serve block."""
    return {
        "image": IMAGE,
        "command": ["python", "/mistakes/service.py"],
        "scale": 0,
        "volumes": ["../tests/faults/mistakes:/mistakes:ro"],
        "environment": {"EDITION": "first", **(environment or {})},
        "x-serve": {"route": "/web", "rollout": {"bake_s": 0}, **(serve or {"replicas": 1})},
        **words,
    }


@dataclass(frozen=True)
class Mistake:
    """What is typed: services in the file, then a command. `asks`: a path of web that others ask by then."""

    said: str
    """A pattern in what validate, status, why, plan or events say of it."""
    services: Mapping[str, Any] = field(default_factory=lambda: {"web": web()})
    command: tuple[str, ...] = ()
    before: Mapping[str, Any] = field(default_factory=lambda: {"web": web()})
    """Services that run before."""
    asks: str = ""
    clients: int = 20
    most: int = 1000
    """Replicas of it."""
    works: bool = True
    """Whether those that ask web are answered."""
    replaces: bool = False
    """Whether it is in force when the replicas that ran before are gone; else when it is said."""


BUSY = {"min": 1, "max": 500, "target_ongoing_requests": 0.01, "upscale_delay_s": 0, "look_back_period_s": 1}
AT_ONCE = {"replicas": 6, "rollout": {"bake_s": 0, "max_surge": 1000}}
MISTAKES = {
    "scale web 1000": Mistake(WAITS, command=("scale", "web", "1000", "--no-wait")),
    "scale web 100000": Mistake("expected an integer from 0 to 1000", command=("scale", "web", "100000")),
    "replicas: 100000": Mistake(
        "expected at most 1000 replicas, found 100000", {"web": web(serve={"replicas": 100_000})}
    ),
    "replicas: 1000": Mistake(WAITS, {"web": web(serve={"replicas": 1000})}),
    "autoscale: {max: 500}, under load": Mistake(
        WAITS, {"web": web({"WORK_S": "0.2"}, {"autoscale": BUSY})}, asks="/web", before={"web": web({"WORK_S": "0.2"})}
    ),
    "rollout: {max_surge: 1000}, 6 replicas": Mistake(
        "rolled out|rollout|complete",
        {"web": web({"EDITION": "second"}, AT_ONCE)},
        before={"web": web(serve=AT_ONCE)},
        most=12,
        asks="/web",
    ),
    "rollout: {max_surge: 100000}": Mistake(
        "max_surge: expected an integer from 0 to 1000, found 100000",
        {"web": web(serve={"rollout": {"max_surge": 100_000}})},
    ),
    "max_ongoing_requests: 1000000, 400 clients": Mistake(
        "^web +HEALTHY",
        {"web": web({"WORK_S": "0.5"}, {"max_ongoing_requests": 1_000_000})},
        asks="/web",
        clients=400,
        replaces=True,
    ),
    "max_ongoing_requests: 10000000": Mistake(
        "max_ongoing_requests: expected an integer from 1 to 1000000",
        {"web": web(serve={"max_ongoing_requests": 10_000_000})},
    ),
    "@batch(max_batch_size=10**9, wait of a day)": Mistake("^web +HEALTHY", asks="/web/batch", works=False),
    "mem_limit: 160m, and it takes 512 MB": Mistake(
        "out of memory: the kernel killed", {"web": web(mem_limit="160m")}, asks="/web/eat", clients=1, works=False
    ),
    "mem_limit: 4m": Mistake("[Mm]inimum memory limit|out of memory", {"web": web(mem_limit="4m")}),
    "mem_limit: 100000g": Mistake("^web +HEALTHY", {"web": web(mem_limit="100000g")}, replaces=True),
    "reservations: {memory: 500g}": Mistake(
        "one replica takes 500 GiB and", {"web": web(deploy={"resources": {"reservations": {"memory": "500g"}}})}
    ),
    "cpus: 500": Mistake("CPUs", {"web": web(cpus=500)}),
    "200 services in one file": Mistake(
        WAITS, {f"web-{number}": web(serve={"route": f"/web-{number}"}) for number in range(200)}
    ),
}


@pytest.fixture
def stack(written: WrittenStack) -> WrittenStack:
    written.become(_file({"web": web()}), web=1, echo=1, **{"echo-child": 1})
    eventually(lambda: written.get("/echo?message=hi").status == 200, "it answers")
    return written


def _file(services: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump({"services": {**yaml.safe_load(ECHO)["services"], **services}}))


def _makes(stack: WrittenStack, name: str, mistake: Mistake) -> list[str]:
    """Make one, and take it back. The row of the table, and what is wrong with it."""
    _settled(stack, mistake.before)
    stack.forget_events()
    former = {one.id for one in stack.replicas("web").values()}
    urls = stack.url("/echo?message=hi"), f"grpc://{stack.grpc_address}"
    honest = [Load([url], connections=PER_S, pause_s=1.0, limit_s=600.0, answer_s=60.0) for url in urls]
    asking = Load([stack.url(mistake.asks or "/web")], connections=mistake.clients, pause_s=0.2, limit_s=600.0)
    with Clients(honest) as clients:
        with asking if mistake.asks else Clients([]):
            stack.write(_file(mistake.services))
            typed = stack.pierhead(*mistake.command) if mistake.command else None
            answer = typed.stdout + typed.stderr if typed else ""
            if mistake.replaces:
                eventually(lambda: not former & {one.id for one in stack.replicas("web").values()}, "it runs", 120)
            said = eventually(lambda: _said(stack, mistake.said, answer), f"{name}: it is said", 120)
            begun = clients.so_far()
            eventually(lambda: clients.so_far() >= begun + 2 * STAYS, "it is in force for a while", 120)
            most = len(stack.replicas()) - 2
            shown = stack.pierhead("status").stdout.rstrip() + "\n" + stack.plan_text()
        if mistake.command:
            stack.pierhead("scale", "web", "auto", "--no-wait")
        stack.write(_file({"web": web()}))
        took_s = seconds_until(
            lambda: stack.is_settled("web", 1) and len(stack.replicas()) == 3, f"{name}: undone", 180
        )
    others = asking.result if mistake.asks else None
    seen, times = clients.result, ", ".join(f"p99 {load.result.p99_ms:.0f} ms" for load in honest)
    print(f"\n### {name}\nsaid: {said}\nruns: {most} replicas of it; undone in {took_s:.0f} s")
    print(f"honest: {seen.requests} requests, {seen.failed} failed, {times}; web: {others or 'not asked'}")
    print("\n".join(shown.splitlines()[:14]), flush=True)
    wrong = [f"{name}: {failure}" for failure in clients.result.failures[:5]]
    wrong += [f"{name}: {most} replicas of it"] if most > mistake.most else []
    return wrong + [f"{name}: {failure}" for failure in (others.failures[:5] if others and mistake.works else ())]


def _settled(stack: WrittenStack, services: Mapping[str, Any]) -> None:
    stack.write(_file(services))
    eventually(lambda: stack.plan_text() == "nothing to do", "it runs as before", 120)
    stack.wait_settled(web=services["web"]["x-serve"].get("replicas", 1))


def _said(stack: WrittenStack, pattern: str, answer: str) -> str:
    """The line that says it, wherever that is."""
    places: list[Callable[[], str]] = [
        lambda: answer,
        lambda: stack.pierhead("validate").stdout,
        lambda: stack.pierhead("status").stdout,
        stack.plan_text,
        lambda: "\n".join(event["message"] for event in stack.events()),
    ]
    for place in places:
        for line in place().splitlines():
            if re.search(pattern, line):
                return line.strip()
    return ""


def test_no_typing_mistake_takes_the_machine_down(stack: WrittenStack) -> None:
    began = time.monotonic()
    wrong: list[str] = []
    for name, mistake in MISTAKES.items():
        try:
            wrong += _makes(stack, name, mistake)
        except AssertionError as error:  # the others are seen, too
            wrong.append(f"{name}: {error}")
            print(f"\n### {name}\nFAILED: {error}", flush=True)
    print(f"{len(MISTAKES)} mistakes in {time.monotonic() - began:.0f} s")
    assert wrong == []
    assert stack.api("/healthz").status == 200


def test_the_kernel_takes_memory_from_replicas_first(stack: WrittenStack) -> None:
    """Without a limit, a replica that takes all of it is killed before HAProxy, the controller and the engine."""

    def score(container: Any) -> int:
        return int(container.exec_run(["cat", "/proc/1/oom_score_adj"]).output)

    [replica] = stack.replicas("web").values()
    scores = {name: score(stack.container(name)) for name in ("haproxy", "controller", "prometheus")}
    assert all(score(replica) >= other + 500 for other in scores.values()), scores
