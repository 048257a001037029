"""Language models under streams, on the real stack: replicas that die, hang, are replaced, do not start, or sleep.

The engine is the mock one; `-s` prints what clients saw.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docker.models.containers import Container

from tests.harness.machine import Pace, judge
from tests.harness.stack import ROOT, Stack, address_of, request
from tests.harness.streams import ERROR_EVENT, GIVEN_UP, Streams
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

APP = Path(__file__).parent / "apps" / "llm.yaml"
COPY = ROOT / ".state" / "llm.yaml"
STREAMS = 32
TOKENS_PER_S = 25
"""Of each stream: request_tokens_per_s in apps/llm.yaml."""
STEADY = 3
"""Replicas of `llm`."""
STALLING_S = 40.0
"""With it 32 streams want 32,000 tokens. The engine of `llm-stalling` makes 8,000, in ten seconds: on a slow
machine, too, every stream has its first before the last of those is made."""
LONG_S = 20.0
"""Streams that something happens to: none may end by itself before, on a machine that takes its time to begin them."""


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    COPY.parent.mkdir(exist_ok=True)
    shutil.copy(APP, COPY)
    try:
        with Stack("pierhead-test-llm", [str(COPY.relative_to(ROOT))]).running() as stack:
            stack.wait_settled(**{"llm-gateway": 1, "llm": STEADY})
            eventually(lambda: chat(stack, "steady")[0] == 200, "the model answers")
            yield stack
    finally:
        COPY.unlink()


@pytest.fixture
def llm(running: Stack) -> Stack:
    """The stack with its models as they are written, and nothing to do."""
    written = {"llm": STEADY, "llm-stalling": 0, "llm-broken": 0, "llm-absent": 0}
    for name, replicas in written.items():
        running.api(f"/api/v1/services/{name}/scale", "PUT", {"replicas": replicas})
    running.wait_settled(**written)
    return running


def chat(stack: Stack, model: str, tokens: int = 4) -> tuple[int, Any]:
    messages = [{"role": "user", "content": "hi"}]
    answer = stack.post("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": tokens})
    return answer.status, answer.json


def streams(
    stack: Stack, model: str = "steady", *, seconds: float, count: int = STREAMS, again: bool = False
) -> Streams:
    tokens = int(seconds * TOKENS_PER_S)
    return Streams(stack.url("/v1/chat/completions"), model, count=count, tokens=tokens, again=again)


def in_work(container: Container) -> int:
    """Requests that a replica's engine has, by its own gauges."""
    page = request(f"http://{address_of(container)}:9100/metrics").body.decode()
    kept = ("pierhead_llm_engine_running", "pierhead_llm_engine_waiting")
    return sum(int(float(line.rpartition(" ")[2])) for line in page.splitlines() if line.startswith(kept))


def spread(stack: Stack, service: str = "llm") -> dict[str, int]:
    """How many requests each of its replicas works on."""
    return {name: in_work(container) for name, container in stack.replicas(service).items()}


def last_event(stack: Stack) -> int:
    return max(int(event["seq"]) for event in stack.events())


def told(stack: Stack, since: int, kind: str, service: str) -> list[str]:
    """What events of a kind have said of a service since then."""
    return [
        event["message"]
        for event in stack.events()
        if event["seq"] > since and event["kind"] == kind and event["service"] == service
    ]


# ------------------------------------------------------------------------------------------------- replicas that fail


def test_a_replica_is_killed_under_streams(llm: Stack) -> None:
    since = last_event(llm)
    with streams(llm, seconds=LONG_S) as running:
        at_work = all_at_work(llm, running)
        victim = llm.replicas("llm")[max(at_work, key=lambda name: at_work[name])]
        with Pace() as pace:
            killed_at = llm.kill_process(victim)
            lost = at_work[str(victim.name)]
            eventually(lambda: len(running.not_well()) == lost, "everybody that it worked for is told")
        # Before that the gateway does not know, and a call that a replica may have begun is not repeated.
        with streams(llm, seconds=2) as later:
            eventually(lambda: victim.id not in llm.replica_ids("llm"), "the dead replica's container is gone")
            llm.wait_settled(llm=STEADY)
    failed = told(llm, since, "replica_failed", "llm")
    print(f"\n  at work: {at_work}; killed: {victim.name}\n  then running: {running}\n  begun later: {later}")
    print("  events: " + "\n    ".join(failed))
    assert [each.how for each in running.not_well()] == [ERROR_EVENT] * lost
    assert not later.not_well(), "those go elsewhere"
    assert len(failed) == 1
    told_s = max(each.ended_at for each in running.not_well()) - killed_at
    judge(told_s < 2, f"they are told at once, and it was {told_s:.1f} s", pace)


def all_at_work(stack: Stack, running: Streams) -> dict[str, int]:
    """How many streams each replica works on, once all of them have begun and none has ended."""
    eventually(lambda: running.begun == STREAMS, "every stream has begun")
    at_work = spread(stack)
    assert sum(at_work.values()) == STREAMS
    assert not running.ended
    return at_work


def test_a_replica_is_frozen_under_streams(llm: Stack) -> None:
    since = last_event(llm)
    with streams(llm, seconds=LONG_S) as running:
        at_work = all_at_work(llm, running)
        victim = llm.replicas("llm")[max(at_work, key=lambda name: at_work[name])]
        frozen_at = llm.kill_process(victim, "STOP")
        eventually(lambda: victim.id not in llm.replica_ids("llm"), "the frozen replica's container is gone", 120)
        llm.wait_settled(llm=STEADY)
        with streams(llm, seconds=2) as later:
            pass
    failed = told(llm, since, "replica_failed", "llm")
    told_s = max((each.ended_at for each in running.not_well()), default=frozen_at) - frozen_at
    print(f"\n  at work: {at_work}; frozen: {victim.name}\n  then running: {running}, told after {told_s:.1f} s")
    print(f"  begun later: {later}")
    print("  events: " + "\n    ".join(failed))
    assert [each.how for each in running.not_well()] == [ERROR_EVENT] * at_work[str(victim.name)]
    assert not later.not_well()
    assert len(failed) == 1


def test_an_engine_that_stalls_is_replaced_by_the_watchdog(llm: Stack) -> None:
    """It answers that it is well all the time: what it is judged by are its tokens."""
    llm.scale("llm-stalling", 1)
    eventually(lambda: chat(llm, "stalling")[0] == 200, "it answers")
    since, before = last_event(llm), llm.replica_ids("llm-stalling")
    with streams(llm, seconds=8, count=8) as others, streams(llm, "stalling", seconds=STALLING_S) as running:
        eventually(lambda: running.begun == STREAMS, "every stream has begun")
        eventually(lambda: told(llm, since, "replica_failed", "llm-stalling"), "the watchdog has seen it", 90)
        told_at = time.time()
        eventually(lambda: not before & llm.replica_ids("llm-stalling"), "the stalled replica's container is gone")
        llm.wait_settled(**{"llm-stalling": 1})
    failed = told(llm, since, "replica_failed", "llm-stalling")
    stood_s = told_at - max(each.last_part_at for each in running.ended)
    print(f"\n  replaced {stood_s:.1f} s after the last token\n  of the stalled one: {running}")
    print(f"  of the other model: {others}\n  events: " + "\n    ".join(failed))
    assert "made no token" in failed[0]
    assert [each.how for each in running.ended] == [ERROR_EVENT] * STREAMS
    assert sum(each.events for each in running.ended) >= STREAMS, "they had some tokens before"
    assert not others.not_well()
    assert chat(llm, "stalling")[0] == 200, "the new one works"


# ------------------------------------------------------------------------------------------------- what people ask for


def test_a_rolling_update_under_streams_breaks_none(llm: Stack) -> None:
    before, offered = llm.replica_ids("llm"), llm.service("llm")["offered"]
    worker = llm.haproxy_worker()
    with streams(llm, seconds=3, again=True) as running:
        eventually(lambda: running.begun >= STREAMS, "every user has a stream")
        COPY.write_text(APP.read_text().replace("EDITION: first", "EDITION: second"))
        eventually(lambda: llm.service("llm")["offered"] != offered, "the new version is seen")
        eventually(lambda: not before & llm.replica_ids("llm"), "the old version is gone", within_s=120)
        llm.wait_settled(llm=STEADY)
    print(f"\n  {running}")
    assert not running.not_well()
    assert len(running.ended) > STREAMS
    assert len({each.events for each in running.ended}) == 1, "none lacks a part"
    assert llm.haproxy_worker() == worker


def test_scaling_down_and_up_under_streams_breaks_none(llm: Stack) -> None:
    with streams(llm, seconds=3, again=True) as running:
        eventually(lambda: running.begun >= STREAMS, "every user has a stream")
        for replicas in (1, STEADY):
            llm.scale("llm", replicas)
            llm.wait_settled(llm=replicas)
    print(f"\n  {running}")
    assert not running.not_well()
    assert len(running.ended) > STREAMS
    assert len({each.events for each in running.ended}) == 1, "none lacks a part"


def test_clients_that_leave_end_their_work_in_the_engines(llm: Stack) -> None:
    with streams(llm, seconds=100) as running:
        eventually(lambda: sum(spread(llm).values()) == STREAMS, "the engines work for all of them")
        at_work = spread(llm)
        running.give_up()
        left_at = time.monotonic()
        eventually(lambda: sum(spread(llm).values()) == 0, "the engines work for nobody", within_s=30)
        took_s = time.monotonic() - left_at
    print(f"\n  at work: {at_work}\n  {running}\n  the engines had stopped after {took_s:.2f} s")
    assert {each.how for each in running.ended} == {GIVEN_UP}


# ----------------------------------------------------------------------------------------- models that are not there


@pytest.mark.parametrize(
    ("service", "words"),
    [
        ("llm-broken", "CUDA out of memory: 80 GiB"),
        ("llm-absent", "/models/absent does not exist inside the container; mount it"),
    ],
)
def test_a_model_that_does_not_load_says_why_and_leaves_the_others_alone(llm: Stack, service: str, words: str) -> None:
    before = llm.replica_ids("llm")
    with streams(llm, seconds=3, count=8, again=True) as others:
        llm.api(f"/api/v1/services/{service}/scale", "PUT", {"replicas": 1})
        row = eventually(
            lambda: _explained(llm, service, words), "the status says why, and when it is tried again", 120
        )
        why = llm.pierhead("why", service)
        status = llm.pierhead("status")
        eventually(lambda: len(others.ended) >= 8, "others are served meanwhile")
    print(f"\n  status: {row['state']}: {row['message']}\n  why: {why.stdout}\n  others: {others}")
    assert words in " ".join(why.stdout.split())
    assert service in status.stdout
    assert row["ready"] == 0
    assert not others.not_well()
    assert llm.replica_ids("llm") == before


def _explained(stack: Stack, service: str, words: str) -> Any:
    """Its row, once it has failed often enough that it is not started again at once."""
    row = stack.service(service)
    message = row["message"]
    return row if words in message and "times in a row, next try in" in message else None


def test_a_model_that_sleeps_is_listed_and_woken_by_its_first_request(llm: Stack) -> None:
    llm.wait_settled(**{"llm-asleep": 0})
    listed = [model["id"] for model in llm.get("/v1/models").json["data"]]
    assert listed == ["steady", "stalling", "broken", "asleep"]
    started = time.monotonic()
    status, body = chat(llm, "asleep")
    print(f"\n  answered after {time.monotonic() - started:.1f} s")
    assert (status, body["usage"]["completion_tokens"]) == (200, 4)
    llm.wait_settled(**{"llm-asleep": 0})
    assert [model["id"] for model in llm.get("/v1/models").json["data"]] == listed
