"""Language models under streams, on the real stack: replicas that die, hang, are replaced, do not start, or sleep.

The engine is the mock one; `-s` prints what clients saw.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from docker.models.containers import Container

from tests.harness.shared_stacks import WrittenStack
from tests.harness.stack import Stack, address_of, request
from tests.harness.streams import ERROR_EVENT, GIVEN_UP, Streams
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

LLM = (Path(__file__).parent / "apps" / "llm.yaml").read_text()
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


@pytest.fixture
def llm(written: WrittenStack) -> WrittenStack:
    """The models as they are written, and nothing to do."""
    zero = {"llm-stalling": 0, "llm-broken": 0, "llm-absent": 0, "llm-asleep": 0}
    written.become(LLM, llm=STEADY, **{"llm-gateway": 1}, **zero)
    eventually(lambda: chat(written, "steady")[0] == 200, "the model answers")
    return written


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


def test_a_stream_in_the_sample_has_one_trace(llm: WrittenStack) -> None:
    trace, body = "1af7651916cd43dd8448eb211c80319c", {"model": "steady", "max_tokens": 8, "stream": True}
    body["messages"] = [{"role": "user", "content": "hi"}]
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "content-type": "application/json"}
    answer = request(llm.url("/v1/chat/completions"), "POST", json.dumps(body).encode(), headers)
    assert answer.status == 200

    def kept() -> Any:
        found = llm.api(f"/api/v1/traces?trace={trace}").json["traces"]
        return found[0]["parts"] if found and len(found[0]["parts"]) == 2 else None

    gateway, engine = eventually(kept, "the gateway and the engine's replica keep it")
    assert [part["service"] for part in (gateway, engine)] == ["llm-gateway", "llm"]
    proxy, call, prefill, decode = gateway["spans"]
    assert [span["name"] for span in (proxy, prefill, decode)] == ["HAProxy", "prefill", "decode"]
    assert decode["attributes"]["tokens"] == "8"
    assert engine["parent"] == call["span"]


# ------------------------------------------------------------------------------------------------- replicas that fail


@pytest.mark.long
def test_a_replica_is_killed_under_streams(llm: WrittenStack) -> None:
    with streams(llm, seconds=LONG_S) as running:
        at_work = all_at_work(llm, running)
        victim = llm.replicas("llm")[max(at_work, key=lambda name: at_work[name])]
        llm.kill_process(victim)
        lost = at_work[str(victim.name)]
        eventually(lambda: len(running.not_well()) == lost, "every client that it worked for gets an error")
        # Before that the gateway does not know, and a call that a replica may have begun is not repeated.
        with streams(llm, seconds=2) as later:
            eventually(lambda: victim.id not in llm.replica_ids("llm"), "the dead replica's container is gone")
            llm.wait_settled(llm=STEADY)
    failed = llm.messages("replica_failed")
    print(f"\n  at work: {at_work}; killed: {victim.name}\n  then running: {running}\n  begun later: {later}")
    assert [each.how for each in running.not_well()] == [ERROR_EVENT] * lost
    assert not later.not_well(), "those go elsewhere"
    assert len(failed) == 1


def all_at_work(stack: Stack, running: Streams) -> dict[str, int]:
    """How many streams each replica works on, once all of them have begun and none has ended."""
    eventually(lambda: running.begun == STREAMS, "every stream has begun")
    at_work = spread(stack)
    assert sum(at_work.values()) == STREAMS
    assert not running.ended
    return at_work


@pytest.mark.long
def test_a_replica_is_frozen_under_streams(llm: WrittenStack) -> None:
    with streams(llm, seconds=LONG_S) as running:
        at_work = all_at_work(llm, running)
        victim = llm.replicas("llm")[max(at_work, key=lambda name: at_work[name])]
        llm.kill_process(victim, "STOP")
        eventually(lambda: victim.id not in llm.replica_ids("llm"), "the frozen replica's container is gone", 120)
        llm.wait_settled(llm=STEADY)
        with streams(llm, seconds=2) as later:
            pass
    print(f"\n  at work: {at_work}; frozen: {victim.name}\n  then running: {running}\n  begun later: {later}")
    assert [each.how for each in running.not_well()] == [ERROR_EVENT] * at_work[str(victim.name)]
    assert not later.not_well()
    assert len(llm.messages("replica_failed")) == 1


@pytest.mark.long
def test_an_engine_that_stalls_is_replaced_by_the_watchdog(llm: WrittenStack) -> None:
    """It answers that it is well all the time: what it is judged by are its tokens."""
    llm.scale("llm-stalling", 1)
    eventually(lambda: chat(llm, "stalling")[0] == 200, "it answers")
    llm.forget_events()
    before = llm.replica_ids("llm-stalling")
    with streams(llm, seconds=8, count=8) as others, streams(llm, "stalling", seconds=STALLING_S) as running:
        eventually(lambda: running.begun == STREAMS, "every stream has begun")
        eventually(lambda: llm.messages("replica_failed"), "the watchdog has seen it", 90)
        eventually(lambda: not before & llm.replica_ids("llm-stalling"), "the stalled replica's container is gone")
        llm.wait_settled(**{"llm-stalling": 1})
    print(f"\n  of the stalled one: {running}\n  of the other model: {others}")
    assert "made no token" in llm.messages("replica_failed")[0]
    assert [each.how for each in running.ended] == [ERROR_EVENT] * STREAMS
    assert sum(each.events for each in running.ended) >= STREAMS, "they had some tokens before"
    assert not others.not_well()
    assert chat(llm, "stalling")[0] == 200, "the new one works"


# ------------------------------------------------------------------------------------------------- what people ask for


def test_a_rolling_update_under_streams_breaks_none(llm: WrittenStack) -> None:
    before, offered = llm.replica_ids("llm"), llm.service("llm")["offered"]
    worker = llm.haproxy_worker()
    with streams(llm, seconds=3, again=True) as running:
        eventually(lambda: running.begun >= STREAMS, "every user has a stream")
        llm.write(LLM.replace("EDITION: first", "EDITION: second"))
        eventually(lambda: llm.service("llm")["offered"] != offered, "the new version is seen")
        eventually(lambda: not before & llm.replica_ids("llm"), "the old version is gone", within_s=120)
        llm.wait_settled(llm=STEADY)
    print(f"\n  {running}")
    assert not running.not_well()
    assert len(running.ended) > STREAMS
    assert len({each.events for each in running.ended}) == 1, "none lacks a part"
    assert llm.haproxy_worker() == worker


@pytest.mark.long
def test_scaling_down_and_up_under_streams_breaks_none(llm: WrittenStack) -> None:
    with streams(llm, seconds=3, again=True) as running:
        eventually(lambda: running.begun >= STREAMS, "every user has a stream")
        for replicas in (1, STEADY):
            llm.scale("llm", replicas)
            llm.wait_settled(llm=replicas)
    print(f"\n  {running}")
    assert not running.not_well()
    assert len(running.ended) > STREAMS
    assert len({each.events for each in running.ended}) == 1, "none lacks a part"


@pytest.mark.long
def test_clients_that_leave_end_their_work_in_the_engines(llm: WrittenStack) -> None:
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("service", "words"),
    [
        ("llm-broken", "CUDA out of memory: 80 GiB"),
        ("llm-absent", "/models/absent does not exist inside the container; mount it"),
    ],
)
def test_a_model_that_does_not_load_says_why_and_stops_no_other(llm: WrittenStack, service: str, words: str) -> None:
    before = llm.replica_ids("llm")
    with streams(llm, seconds=3, count=8, again=True) as others:
        llm.api(f"/api/v1/services/{service}/scale", "PUT", {"replicas": 1})
        row = eventually(
            lambda: _explained(llm, service, words), "the status says why, and when it is tried again", 120
        )
        why = llm.pierhead("why", service)
        status = llm.pierhead("status")
        eventually(lambda: len(others.ended) >= 8, "others are served while it waits")
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


@pytest.mark.long
def test_a_model_that_sleeps_is_listed_and_woken_by_its_first_request(llm: WrittenStack) -> None:
    listed = [model["id"] for model in llm.get("/v1/models").json["data"]]
    assert listed == ["steady", "stalling", "broken", "asleep"]
    status, body = chat(llm, "asleep")
    assert (status, body["usage"]["completion_tokens"]) == (200, 4)
    llm.wait_settled(**{"llm-asleep": 0})
    assert [model["id"] for model in llm.get("/v1/models").json["data"]] == listed
