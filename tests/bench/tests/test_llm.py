"""The bench of LLM serving: what it was asked for, what its users count, what it concludes."""

from __future__ import annotations

import asyncio
import json
import threading
from random import Random
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.bench.llm import measure
from tests.bench.llm.cases import FREE, SUBJECTS, WAYS
from tests.bench.llm.figures import Samples, lines, tables
from tests.bench.llm.load import WORKLOADS, Asking, Seen, http_user
from tests.bench.llm.measure import Sample
from tests.bench.processes import BenchError
from tests.bench.tests.worlds import histogram


def sample(part: str, case: str, variant: str = "", **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "round": 1,
        "seconds": 10.0,
        "tokens": 20_000,
        "good_tokens": 19_000,
        "answers": 100,
        "first_mean_ms": 50.0,
        "first": histogram(50.0),
        "whole": histogram(900.0),
        "cpu_s": {"gateway": 1.0, "replica": 1.0},
        "busy_cores": 0.5,
        "hit_rate": 0.5,
        "in_work": (10.0, 10.0),
    }
    return Sample(part=part, case=case, variant=variant, **(fields | changes))


def verdicts(*samples: Sample) -> dict[str, bool | None]:
    return {line.what: line.met for line in lines(Samples(samples), 2)}


@pytest.mark.parametrize(
    ("p50", "p99", "peer_cpu", "met"), [(52.9, 64.0, 2.0, [True] * 4), (53.5, 70.0, 1.9, [False] * 4)]
)
def test_what_the_way_adds(p50: float, p99: float, peer_cpu: float, met: list[bool]) -> None:
    floor = sample("overhead", "floor")
    ours = [sample("overhead", each, first=histogram(*[p50] * 98, p99, p99)) for each in ("gateway", "haproxy")]
    peer = sample("overhead", "peer", cpu_s={"ray": peer_cpu}, first=histogram(53.0))
    assert list(verdicts(floor, *ours, peer).values()) == met


def test_streams_as_fast_as_they_come_and_the_bare_chain_have_lines_of_their_own() -> None:
    found = [sample("overhead", "gateway"), sample("overhead", "haproxy"), sample("overhead", "haproxy", FREE)]
    found.append(sample("overhead", "peer", FREE, cpu_s={"ray": 1.0}))
    free = "64 streams as fast as they come: CPU per 1,000 streamed tokens, HAProxy, gateway and replica"
    assert verdicts(*found)[free] is False
    [table] = tables(Samples(found), 2)
    fastest = [f"{SUBJECTS[each]}, as fast as it goes" for each in ("haproxy", "peer")]
    assert [row[0] for row in table.rows] == [SUBJECTS["gateway"], SUBJECTS["haproxy"], *fastest]
    found += [sample("overhead", "bare", cpu_s={"gateway": 1.0}), sample("overhead", "peer", cpu_s={"rest": 5.0})]
    told = {line.what: (line.found, line.met) for line in lines(Samples(found), 2)}
    bare = "64 streams: the CPU of the same packages with nothing of ours, "
    assert told[f"{bare}of Ray Serve LLM's"] == ("1/5.0", None), "shown and not judged"
    assert told[f"{bare}and that of ours in it"] == ("2.00 x", None)


def test_linear_is_promised_until_the_cores_are_full() -> None:
    more = [sample("linear", "2", tokens=39_000), sample("linear", "4", tokens=70_000)]
    full = sample("linear", "8", tokens=90_000, busy_cores=1.98)
    assert list(verdicts(sample("linear", "1"), *more, full).values()) == [True, False, None]


@pytest.mark.parametrize(
    ("case", "changes", "met"),
    [
        ("8 system prompts", {"hit_rate": 0.7, "first_mean_ms": 40.0}, [True, True]),
        ("8 system prompts", {"hit_rate": 0.4, "first_mean_ms": 60.0}, [False, False]),
        ("nothing shared", {"tokens": 19_500, "first_mean_ms": 51.0}, [True, True]),
        ("nothing shared", {"tokens": 19_000, "first_mean_ms": 52.0}, [False, False]),
        ("one hot prefix", {"in_work": (10.0, 14.0)}, [True]),
        ("one hot prefix", {"in_work": (2.0, 14.0)}, [False]),
    ],
)
def test_what_routing_by_prefix_promises(case: str, changes: dict[str, Any], met: list[bool]) -> None:
    found = verdicts(sample("prefix", case, "power_of_two"), sample("prefix", case, "prefix", **changes))
    assert list(found.values()) == met


@pytest.mark.parametrize(("tokens", "met"), [([19_100, 19_300, 15_000], True), ([18_900, 19_300, 15_000], False)])
def test_a_real_vllm_is_compared_pair_by_pair(tokens: list[int], met: bool) -> None:
    alone = [sample("vllm", "8", "alone", round=number, tokens=20_000) for number in (1, 2, 3)]
    ours = [sample("vllm", "8", "ours", round=number, tokens=each) for number, each in enumerate(tokens, 1)]
    assert list(verdicts(*alone, *ours).values()) == [met]
    [table] = tables(Samples([*alone, *ours]), 2)
    assert [row[:2] for row in table.rows] == [["8", words] for words in WAYS.values()]


def test_an_engine_that_cannot_be_read_during_it_spoils_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def numbers(page: str) -> dict[str, float]:
        if threading.current_thread() is threading.main_thread():
            return {}  # at the begin and at the end it answers
        failed.set()
        raise BenchError(f"{page}: expected the engine's metrics, found status 503")

    monkeypatch.setattr(measure, "_numbers", numbers)
    with pytest.raises(BenchError, match="found status 503"), measure.Engines(["http://engine/metrics"]):
        assert failed.wait(10)


def event(content: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': {'content': content}}]})}\n\n".encode()


async def users_see(answer: list[bytes], status: int = 200, answers: int = 0) -> Seen:
    """What one user sees of a server that answers so, each part by itself, until two answers have ended.

    `answers`: how many the user asks for; 0: the user would continue.
    """
    done = asyncio.Event()
    asked = []

    async def chat(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for part in answer:
            await response.write(part)
            await asyncio.sleep(0)
        await response.write_eof()
        if len(asked) == 2:
            done.set()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    seen = Seen(begins=0.0, ends=float("inf"), slow_s=60.0)
    async with TestServer(app) as server:
        asking = Asking(seen, "m", 3, 0.0, answers)
        prompts = WORKLOADS["nothing shared"](0, Random(1))
        user = asyncio.create_task(http_user(asking, str(server.make_url("")), prompts, Random(1)))
        await asyncio.wait_for(user if answers else done.wait(), 10)
        user.cancel()
        await asyncio.gather(user, return_exceptions=True)
    assert {"model": "m", "stream": True, "max_tokens": 3}.items() <= asked[0].items()
    assert asked[0].get("ignore_eos", False) == bool(answers), "an answer of a real model has to have its length"
    return seen


def usage(tokens: int) -> bytes:
    return f'data: {{"choices":[],"usage":{{"prompt_tokens":9,"completion_tokens":{tokens}}}}}\n\n'.encode()


DONE = b"data: [DONE]\n\n"
WHOLE = [event(""), event("a"), event("b"), event("c"), event(""), DONE]
WITH_USAGE = [event(""), event("a b"), event("c"), usage(3), DONE]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_users_count_tokens_however_their_events_arrive(size: int) -> None:
    def parts(events: list[bytes]) -> list[bytes]:
        whole = b"".join(events)
        return [whole[start : start + size] for start in range(0, len(whole), size)]

    seen = await users_see(parts(WHOLE))
    assert not seen.errors
    assert 1 <= seen.answers <= seen.firsts
    assert seen.good_tokens == 3 * seen.answers <= seen.tokens <= 3 * (seen.answers + 1)
    seen = await users_see(parts(WITH_USAGE), answers=2)
    assert (seen.tokens, seen.answers, seen.firsts, dict(seen.errors)) == (6, 2, 2, {})


@pytest.mark.parametrize(
    ("answer", "status", "answers", "error"),
    [
        ([event(""), event("a"), event(""), DONE], 200, 0, "1 tokens in place of 3"),
        ([event(""), event("a"), usage(1), DONE], 200, 2, "1 tokens in place of 3"),
        (WHOLE, 503, 0, "status 503"),
    ],
)
async def test_a_short_answer_and_another_status_are_errors(
    answer: list[bytes], status: int, answers: int, error: str
) -> None:
    seen = await users_see(answer, status, answers)
    assert (set(seen.errors), seen.answers) == ({error}, 0)
