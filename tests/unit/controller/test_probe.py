"""Readings -> verdicts, and the tasks that ask."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port
from hypothesis import given
from hypothesis import strategies as st

from controller.errors import ReplicaError
from controller.model.phases import Phase, phase_of
from controller.model.spec import ProbeSpec
from controller.model.world import ContainerState, Health, PublishedStats, ReplicaContainer, UserConfigReport
from controller.observe.probe import EAGER_S, PATIENT_S, RETIRING_S, HttpProbe, Judge, Prober, Reading, Subject
from tests.unit.controller.control import until
from tests.unit.controller.worlds import replica, service

SPEC = ProbeSpec(port=9100, path="/readyz", period_s=1.0, timeout_s=0.2, failures=3)
GOOD = Reading(ok=True, detail="200 from :9100/readyz", ongoing=2, queued=0)
BAD = Reading(ok=False, detail="503 from :9100/readyz: loading")
DRAINING = Reading(ok=False, detail="503 from :9100/readyz", draining=True, ongoing=1)


def healths(*readings: Reading, was_ready: bool = False) -> list[Health]:
    judge = Judge(SPEC, 0.0, was_ready=was_ready)
    found = []
    for number, reading in enumerate(readings):
        judge.record(reading, float(number))
        found.append(judge.verdict.health)
    return found


def test_unknown_until_ready_first() -> None:
    assert healths(*[BAD] * 10, GOOD) == [Health.UNKNOWN] * 10 + [Health.READY]


def test_failed_after_that_many_in_a_row_and_ready_when_it_answers_again() -> None:
    seen = healths(GOOD, BAD, BAD, GOOD, BAD, BAD, BAD, BAD, GOOD)
    assert seen == [Health.READY] * 6 + [Health.FAILED] * 2 + [Health.READY]


def test_one_that_was_ready_before_this_controller_stays_so_until_it_has_failed() -> None:
    assert Judge(SPEC, 0.0, was_ready=True).verdict.health is Health.READY
    assert healths(BAD, BAD, BAD, was_ready=True) == [Health.READY, Health.READY, Health.FAILED]


@pytest.mark.parametrize("retiring", [False, True])
def test_how_long_it_may_fail_for_does_not_depend_on_how_often_it_is_asked(retiring: bool) -> None:
    judge, now = Judge(SPEC, 0.0, was_ready=True), 10.0
    judge.record(GOOD, now)
    while judge.verdict.health is Health.READY:
        now += judge.pause_s(now, retiring=retiring)
        judge.record(BAD, now)
    least_s = 0.9 * (SPEC.failures - 1) * SPEC.period_s
    assert least_s <= now - 10.0 <= SPEC.failures * SPEC.period_s


def test_draining_is_neither_good_nor_bad() -> None:
    assert healths(GOOD, BAD, BAD, DRAINING, BAD, BAD, DRAINING, DRAINING) == [Health.READY] * 8
    judge = Judge(SPEC, 0.0)
    judge.record(GOOD, 1.0)
    assert judge.record(DRAINING, 2.0), "somebody waits for that"
    assert judge.verdict.reading.draining
    assert judge.verdict.reading.ongoing == 1


@pytest.mark.parametrize("before", [[GOOD], [GOOD, BAD], []])
def test_one_that_says_that_it_is_broken_has_failed_at_once(before: list[Reading]) -> None:
    broken = replace(BAD, told="the engine has ended", broken=True)
    assert healths(*before, broken)[-1] is Health.FAILED
    assert healths(*before, broken, GOOD)[-1] is Health.READY, "unless it was replaced meanwhile"
    judge = Judge(SPEC, 0.0)
    judge.record(GOOD, 0.0)
    assert judge.record(broken, 1.0)
    assert judge.verdict.detail == "the replica gives itself up: the engine has ended"
    assert judge.verdict.fill_in(replica(service("web"), 1)).broken


def test_a_failure_is_told_in_words() -> None:
    judge = Judge(SPEC, 0.0)
    for number, reading in enumerate([GOOD, BAD, BAD, BAD]):
        judge.record(reading, float(number))
    assert judge.verdict.detail == "3 bad answers in a row, the last: 503 from :9100/readyz: loading"
    assert judge.verdict.ready_since is None


def test_ready_since_holds_while_it_is_ready() -> None:
    judge = Judge(SPEC, 0.0)
    for now in (1.0, 2.0, 3.0):
        judge.record(GOOD, now)
    judge.record(BAD, 4.0)
    assert judge.verdict.ready_since == 1.0


def test_the_pace() -> None:
    judge = Judge(SPEC, since=100.0)
    assert judge.pause_s(100.0, retiring=False) == EAGER_S
    assert judge.pause_s(131.0, retiring=False) == PATIENT_S
    judge.record(GOOD, 132.0)
    assert judge.pause_s(132.0, retiring=False) == SPEC.period_s
    assert judge.pause_s(132.0, retiring=True) == RETIRING_S


@given(st.lists(st.sampled_from([GOOD, BAD, DRAINING])), st.booleans())
def test_health_follows_from_the_readings_alone(readings: list[Reading], was_ready: bool) -> None:
    judge = Judge(SPEC, 0.0, was_ready=was_ready)
    seen: list[Reading] = []
    for number, reading in enumerate(readings):
        before = judge.verdict.health
        changed = judge.record(reading, float(number))
        seen.append(reading)
        health = judge.verdict.health
        assert (health is Health.READY) or reading is not GOOD
        if health is Health.FAILED and before is not Health.FAILED:
            assert seen[-SPEC.failures :] == [BAD] * SPEC.failures
        if health is Health.UNKNOWN:
            assert GOOD not in seen
        if before is not health:
            assert changed


# ----------------------------------------------------------------------------------------------------- over HTTP

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[Subject]:
    """A replica on 127.0.0.1 that answers like that."""
    app = web.Application()
    app.router.add_get("/readyz", answer)
    app.router.add_put("/user-config", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = unused_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield subject(port)
    finally:
        await runner.cleanup()


def subject(port: int, *, managed: bool = True) -> Subject:
    return Subject("c1", 0.0, "127.0.0.1", replace(SPEC, port=port), managed)


async def ask(target: Subject) -> Reading:
    probe = HttpProbe()
    try:
        return await probe(target)
    finally:
        await probe.close()


async def test_a_ready_replica_tells_its_numbers() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"state": "ready", "ongoing": 3, "queued": 1, "detail": ""})

    async with listening(answer) as target:
        reading = await ask(target)
        assert reading == Reading(True, f"200 from :{target.spec.port}/readyz", ongoing=3, queued=1)
        foreign = await ask(replace(target, managed=False))
        assert foreign == Reading(True, f"200 from :{target.spec.port}/readyz")


async def test_what_a_replica_publishes_is_passed_on_and_what_cannot_be_is_not() -> None:
    said: dict[str, Any] = {"running": 3, "kv_use": 0.5, "x" * 99: 1, "odd": "text", "on": True, "huge": 10**400}
    reports: list[dict[str, Any]] = [
        {"stats": said, "stats_version": 7},
        {"stats": {"running": 3}},
        {"stats": [3], "stats_version": 7},
        {"stats": {f"n{number}": 1 for number in range(17)}, "stats_version": 7},
    ]
    answers = iter(reports)

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"state": "ready", **next(answers)})

    async with listening(answer) as target:
        found = [(await ask(target)).stats for _ in reports]
    assert found == [PublishedStats({"running": 3.0, "kv_use": 0.5}, 7)] + [PublishedStats()] * 3


async def test_a_starting_one_says_why() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"state": "starting", "ongoing": 0, "detail": "loading weights"}, status=503)

    async with listening(answer) as target:
        reading = await ask(target)
        detail = f"503 from :{target.spec.port}/readyz: loading weights"
        assert reading == Reading(False, detail, ongoing=0, told="loading weights")


async def test_a_replica_s_words_are_one_line_that_can_be_kept() -> None:
    async def answer(request: web.Request) -> web.Response:
        config = {"wanted": "a\udce9", "applied": "b\udce9", "error": "no such file:\n  caf\udce9.bin"}
        report = {"detail": "reading\n  caf\udce9.bin\x1b[0m", "waiting": {"r\udce9": 1}, "user_config": config}
        return web.json_response(report, status=503)

    async with listening(answer) as target:
        reading = await ask(target)
        assert reading.told == "reading caf\\udce9.bin [0m"
        assert reading.detail == f"503 from :{target.spec.port}/readyz: {reading.told}"
        assert reading.waiting == {"r\\udce9": 1}
        assert reading.user_config == UserConfigReport("a\\udce9", "b\\udce9", "no such file: caf\\udce9.bin")


async def test_why_a_user_config_is_refused_is_one_line_that_can_be_shown() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": "no such file:\n  caf\udce9.bin"}, status=400)

    async with listening(refuse) as target:
        probe = HttpProbe()
        try:
            with pytest.raises(ReplicaError, match=r"refused it with 400: no such file: caf\\udce9\.bin$"):
                await probe.give(f"127.0.0.1:{target.spec.port}", "{}")
        finally:
            await probe.close()


async def test_a_draining_one_is_seen() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"state": "draining", "ongoing": 4}, status=503)

    async with listening(answer) as target:
        assert (await ask(target)).draining


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'{"ongoing": -1}',
        b'{"ongoing": true}',
        b'{"ongoing": "2"}',
        b'{"ongoing": 1' + b"0" * 400 + b"}",
        b'{"ongoing": 9007199254740993}',
        b"\xff\xfe",
        b"1" * 300_000,
        b"[" * 60_000,
    ],
)
async def test_any_body_is_survived(body: bytes) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body)

    async with listening(answer) as target:
        reading = await ask(target)
        assert reading.ok
        assert reading.ongoing is None


async def test_a_body_in_pieces_is_read_whole() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b'{"ongo', b'ing": 7', b"}"):
            await response.write(piece)
            await asyncio.sleep(0.01)
        return response

    async with listening(answer) as target:
        assert (await ask(target)).ongoing == 7


async def test_silence_and_refusal_are_told_apart() -> None:
    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async with listening(answer) as target:
        assert (await ask(target)).detail == f"no answer from :{target.spec.port}/readyz within 0.2 s"
    assert "Connect" in (await ask(target)).detail or "connect" in (await ask(target)).detail


async def test_a_redirect_is_not_ready() -> None:
    async def answer(request: web.Request) -> web.Response:
        raise web.HTTPFound("/elsewhere")

    async with listening(answer) as target:
        assert not (await ask(target)).ok


# --------------------------------------------------------------------------------------------------------- the prober


class Replicas:
    """What each container answers; the tests' end of the prober."""

    def __init__(self) -> None:
        self.answers: dict[str, Reading] = {}
        self.asked: list[Subject] = []
        self.wakes = 0
        self.noted: list[tuple[str, float]] = []

    async def ask(self, target: Subject) -> Reading:
        self.asked.append(target)
        await asyncio.sleep(0)
        if target.container_id not in self.answers:
            await asyncio.Event().wait()
        return self.answers[target.container_id]

    def wake(self) -> None:
        self.wakes += 1

    @contextlib.asynccontextmanager
    async def prober(self) -> AsyncIterator[Prober]:
        async with asyncio.TaskGroup() as tasks:
            prober = Prober(
                self.ask, tasks.create_task, self.wake, note_ready=lambda one, at: self.noted.append((one, at))
            )
            yield prober
            prober.sync((), {}, ())


WEB = service("web", probe=replace(SPEC, period_s=0.01))


def one(number: int = 1, **changes: object) -> ReplicaContainer:
    bare = {"health": Health.UNKNOWN, "ongoing": None, "ongoing_at": None}
    return replica(WEB, number, **{**bare, **changes})


async def test_verdicts_reach_the_snapshot_and_wake_the_loop() -> None:
    world = Replicas()
    container = one()
    world.answers[container.id] = GOOD
    async with world.prober() as prober:
        assert prober.judged(container) == container, "never asked: unknown"
        prober.sync([container], {"web": WEB}, ())
        await prober.first_round(1.0)
        judged = prober.judged(container)
        assert (judged.health, judged.ongoing, judged.queued) == (Health.READY, 2, 0)
        assert judged.ongoing_at is not None
        assert world.noted == [(container.id, container.started_at)]
        wakes = world.wakes
        world.answers[container.id] = BAD
        await until(lambda: prober.judged(container).health is Health.FAILED)
        assert world.wakes > wakes
        assert prober.ready_since(container.id) is None


async def test_what_is_judged_is_the_same_object_until_container_or_verdict_are_others() -> None:
    world = Replicas()
    container = one()
    world.answers[container.id] = GOOD
    spec = replace(WEB, probe=replace(SPEC, period_s=60.0))
    async with world.prober() as prober:
        prober.sync([container], {"web": spec}, ())
        await prober.first_round(1.0)
        judged = prober.judged(container)
        assert prober.judged(container) is judged
        assert prober.judged(replace(container, number=7)).number == 7
        prober.learn(container.id, UserConfigReport("a", "b", ""))
        assert prober.judged(container).user_config == UserConfigReport("a", "b", "")


async def test_only_replicas_that_are_up_are_asked() -> None:
    world = Replicas()
    containers = [one(1), one(2, ip=None), one(3, state=ContainerState.EXITED)]
    world.answers = {container.id: GOOD for container in containers}
    async with world.prober() as prober:
        prober.sync(containers, {"web": WEB}, ())
        await prober.first_round(1.0)
        assert {target.container_id for target in world.asked} == {containers[0].id}
        prober.sync([], {"web": WEB}, ())
        assert prober.judged(containers[0]).health is Health.UNKNOWN


async def test_one_that_has_lost_its_address_gets_no_question_and_fails() -> None:
    world = Replicas()
    container = one()
    world.answers[container.id] = GOOD
    async with world.prober() as prober:
        prober.sync([container], {"web": WEB}, ())
        await until(lambda: prober.judged(container).health is Health.READY)
        lost = replace(container, ip=None)
        prober.sync([lost], {"web": WEB}, ())
        asked = len(world.asked)
        assert prober.judged(lost).health is Health.READY, "as one that does not answer: until it has failed"
        await until(lambda: prober.judged(lost).health is Health.FAILED)
        assert prober.judged(lost).health_detail == "3 bad answers in a row, the last: it has no network address"
        assert len(world.asked) == asked, "another container may have its address by now"


async def test_another_address_changes_nothing_of_what_is_known() -> None:
    world = Replicas()
    container = one()
    world.answers[container.id] = GOOD
    async with world.prober() as prober:
        prober.sync([container], {"web": WEB}, ())
        await until(lambda: prober.judged(container).health is Health.READY)
        moved = replace(container, ip="10.9.9.9")
        prober.sync([moved], {"web": WEB}, ())
        assert prober.judged(moved).health is Health.READY
        await until(lambda: world.asked[-1].ip == "10.9.9.9")


async def test_another_start_is_judged_afresh() -> None:
    world = Replicas()
    container = one()
    world.answers[container.id] = GOOD
    async with world.prober() as prober:
        prober.sync([container], {"web": WEB}, ())
        await prober.first_round(1.0)
        world.answers[container.id] = BAD
        restarted = replace(container, started_at=5_000.0)
        prober.sync([restarted], {"web": WEB}, ())
        await prober.first_round(1.0)
        assert prober.judged(restarted).health is Health.UNKNOWN


async def test_one_that_is_asked_in_another_way_keeps_what_is_known_of_it() -> None:
    """Health settings change under those that run: nobody starts anew for it, least of all who has loaded for hours."""
    world = Replicas()
    container = one()
    world.answers[container.id] = replace(BAD, progress=7)
    async with world.prober() as prober:
        prober.sync([container], {"web": WEB}, ())
        await prober.first_round(1.0)
        moved_at = prober.judged(container).progressed_at
        asked = len(world.asked)
        prober.sync([container], {"web": replace(WEB, probe=replace(WEB.probe, period_s=0.02, failures=1))}, ())
        assert prober.judged(container).progressed_at == moved_at, "also before it is asked the first time"
        await until(lambda: len(world.asked) > asked + 3)
        assert {target.spec.failures for target in world.asked[asked + 1 :]} == {1}
        assert prober.judged(container).progressed_at == moved_at, "the same progress is none"
        world.answers[container.id] = GOOD
        await until(lambda: prober.judged(container).health is Health.READY)
        world.answers[container.id] = BAD
        await until(lambda: prober.judged(container).health is Health.FAILED)
        assert "1 bad answers in a row" in prober.judged(container).health_detail


async def test_a_start_counts_from_when_somebody_began_to_listen() -> None:
    """What it told an earlier controller nobody knows: one that has loaded for hours is not late at the first look."""
    spec = replace(WEB, startup_deadline_s=60.0)
    world = Replicas()
    container = one()
    async with world.prober() as prober:
        prober.sync([container], {"web": spec}, ())
        begun = prober.judged(container)
        assert begun.progressed_at is not None
        for late_s, phase in ((59.0, Phase.STARTING), (61.0, Phase.FAILED)):
            assert phase_of(begun, spec, None, begun.progressed_at + late_s)[0] is phase


def test_of_one_that_tells_no_progress_only_the_first_answer_is_waited_for() -> None:
    silent, telling = Judge(SPEC, 5.0), Judge(SPEC, 5.0, tells_progress=True)
    seen = [(silent.verdict.progressed_at, telling.verdict.progressed_at)]
    for judge in (silent, telling):
        judge.record(BAD, 6.0)  # as one that does not come in time
    seen.append((silent.verdict.progressed_at, telling.verdict.progressed_at))
    assert seen == [(5.0, 5.0), (None, 5.0)]


async def test_the_first_round_does_not_wait_for_the_silent() -> None:
    world = Replicas()
    async with world.prober() as prober:
        prober.sync([one()], {"web": WEB}, ())
        await prober.first_round(0.05)


async def test_a_retiring_replica_is_asked_at_once_and_often() -> None:
    world = Replicas()
    slow = replace(WEB, probe=replace(SPEC, period_s=3600.0))
    container = one()
    world.answers[container.id] = GOOD
    async with world.prober() as prober:
        prober.sync([container], {"web": slow}, ())
        await prober.first_round(1.0)
        prober.sync([container], {"web": slow}, [container.id])
        world.answers[container.id] = replace(GOOD, ongoing=0)
        await until(lambda: prober.judged(container).ongoing == 0)
        await until(lambda: len(world.asked) >= 4)


async def test_an_outdated_or_removed_one_is_asked_as_before() -> None:
    world = Replicas()
    container = one()
    world.answers[container.id] = GOOD
    moved = replace(WEB, probe=replace(SPEC, port=1234, period_s=0.01))
    async with world.prober() as prober:
        prober.sync([container], {"web": WEB}, ())
        await prober.first_round(1.0)
        prober.sync([container], {"web": moved}, (), outdated=[container.id])
        prober.sync([container], {}, ())
        await until(lambda: len(world.asked) > 3)
        assert {target.spec.port for target in world.asked} == {9100}
        prober.sync([container], {"web": moved}, ())
        await until(lambda: world.asked[-1].spec.port == 1234)


async def test_one_that_is_asked_at_its_port_of_requests_is_asked_at_its_own() -> None:
    world = Replicas()
    spec = replace(WEB, port=9090, probe=replace(SPEC, port=9090))
    old, unlabelled = replace(one(), port=8080, probe=(8080, SPEC.path)), replace(one(), id="other")
    async with world.prober() as prober:
        prober.sync([old, unlabelled], {"web": spec}, ())
        await prober.first_round(1.0)
    assert {target.container_id: target.spec.port for target in world.asked} == {old.id: 8080, "other": 9090}


# ------------------------------------------------------------------------------------------------------------- progress


def busy(progress: int | None, ongoing: int = 1, queued: int = 0) -> Reading:
    return Reading(ok=True, detail="200", ongoing=ongoing, progress=progress, queued=queued)


def stalled(*readings: Reading) -> list[float | None]:
    judge = Judge(SPEC, 0.0)
    found = []
    for number, reading in enumerate(readings):
        judge.record(reading, float(number))
        found.append(judge.verdict.stalled_since)
    return found


def test_it_stands_still_from_the_first_look_at_which_nothing_had_moved() -> None:
    assert stalled(busy(7), busy(7), busy(7), busy(8), busy(8)) == [None, 1.0, 1.0, None, 4.0]


def test_who_has_nothing_to_do_does_not_stand_still() -> None:
    assert stalled(busy(7), busy(7), busy(7, ongoing=0), busy(7), busy(7)) == [None, 1.0, None, 3.0, 3.0]


def test_who_waits_in_a_line_for_another_service_does_not_stand_still() -> None:
    assert stalled(busy(7), busy(7, queued=1), busy(7, queued=1)) == [None, None, None]


def test_of_who_does_not_tell_nothing_is_concluded() -> None:
    assert stalled(*[busy(None)] * 3, *[replace(busy(1), ongoing=None)] * 3) == [None] * 6


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1))
def test_nobody_stands_still_who_has_just_moved_or_has_nothing_to_do(seen: list[tuple[int, int]]) -> None:
    judge, last, moved_at = Judge(SPEC, 0.0), None, 0.0
    for number, (progress, ongoing) in enumerate(seen):
        now = float(number)
        judge.record(busy(progress, ongoing), now)
        moved_at = now if progress != last else moved_at
        last = progress
        assert judge.verdict.progressed_at == moved_at
        since = judge.verdict.stalled_since
        assert since is None if not ongoing or moved_at == now else since is not None and moved_at < since <= now


async def test_a_replica_s_own_words_and_progress_are_read() -> None:
    told = {"state": "starting", "detail": "loading weights, 37 %", "progress": 12, "ongoing": 0, "queued": 0}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(told, status=503)

    async with listening(answer) as target:
        reading = await ask(target)
    assert (reading.told, reading.progress) == ("loading weights, 37 %", 12)
