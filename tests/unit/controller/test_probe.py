"""Readings -> verdicts, and the tasks that ask."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import unused_port

from controller.errors import ReplicaError
from controller.model.phases import Phase, phase_of
from controller.model.spec import ProbeSpec, ServiceSpec
from controller.model.world import PublishedStats, ReplicaContainer, ReplicaHealth, SleepReport, UserConfigReport
from controller.observe.admin_pages import MOST_CONTRACT_BYTES, MOST_TRACES_BYTES, HttpProbe
from controller.observe.judge import ProbeJudge, ProbeReading
from controller.observe.prober import CONTRACT_UNREAD, Prober, Subject
from controller.outlive import Background
from tests.harness.waiting import PATIENCE_S
from tests.unit.controller.control import until
from tests.unit.controller.worlds import replica, service

SPEC = ProbeSpec(port=9100, path="/readyz", period_s=1.0, timeout_s=0.2, failures=3)
GOOD = ProbeReading(ok=True, detail="200 from :9100/readyz", ongoing=2, queued=0)
BAD = ProbeReading(ok=False, detail="503 from :9100/readyz: loading")
DRAINING = ProbeReading(ok=False, detail="503 from :9100/readyz", reported_draining=True, ongoing=1)


def judge(*readings: ProbeReading, was_ready: bool = False) -> ProbeJudge:
    """A judge with these readings, one a second from 0."""
    judge = ProbeJudge(SPEC, 0.0, was_ready=was_ready)
    for number, reading in enumerate(readings):
        judge.record(reading, float(number))
    return judge


UNKNOWN, READY, FAILED = ReplicaHealth.UNKNOWN, ReplicaHealth.READY, ReplicaHealth.FAILED
BROKEN = replace(BAD, reason="the engine has ended", broken=True)


@pytest.mark.parametrize(
    ("readings", "was_ready", "healths"),
    [
        pytest.param([BAD] * 10 + [GOOD], False, [UNKNOWN] * 10 + [READY], id="unknown until it was ready once"),
        pytest.param(
            [GOOD, BAD, BAD, GOOD, BAD, BAD, BAD, BAD, GOOD],
            False,
            [READY] * 6 + [FAILED] * 2 + [READY],
            id="failed after three bad answers in a row, ready again with the next good one",
        ),
        pytest.param([BAD] * 3, True, [READY, READY, FAILED], id="ready before this controller began"),
        pytest.param(
            [GOOD, BAD, BAD, DRAINING, BAD, BAD, DRAINING, DRAINING],
            False,
            [READY] * 8,
            id="draining is neither good nor bad",
        ),
        pytest.param([BROKEN, GOOD], False, [FAILED, READY], id="broken at its start"),
    ],
)
def test_health_after_each_reading(readings: list[ProbeReading], was_ready: bool, healths: list[ReplicaHealth]) -> None:
    seen = [judge(*readings[: count + 1], was_ready=was_ready).verdict.health for count in range(len(readings))]
    assert seen == healths


@pytest.mark.parametrize(
    ("readings", "detail"),
    [
        ([GOOD, BAD, BAD, BAD], "3 bad answers in a row, the last: 503 from :9100/readyz: loading"),
        ([GOOD, BROKEN], "the replica reports that it is broken: the engine has ended"),
    ],
)
def test_the_detail_says_why_a_replica_has_failed(readings: list[ProbeReading], detail: str) -> None:
    verdict = judge(*readings).verdict
    assert (verdict.health_detail, verdict.ready_since) == (detail, None)
    assert verdict.broken is (BROKEN in readings)


@pytest.mark.parametrize("retiring", [False, True])
def test_how_long_it_may_fail_for_does_not_depend_on_how_often_it_is_asked(retiring: bool) -> None:
    judge, now = ProbeJudge(SPEC, 0.0, was_ready=True), 10.0
    judge.record(GOOD, now)
    while judge.verdict.health is READY:
        now += judge.pause_s(now, retiring=retiring)
        judge.record(BAD, now)
    least_s = 0.9 * (SPEC.failures - 1) * SPEC.period_s
    assert least_s <= now - 10.0 <= SPEC.failures * SPEC.period_s


def test_a_contract_that_comes_later_is_news_and_stays() -> None:
    one = judge(was_ready=True)
    assert one.record(GOOD, 1.0) is False
    one.contract = b"contract"
    assert one.record(GOOD, 2.0) is True
    assert one.record(GOOD, 3.0) is False
    assert one.verdict.contract == b"contract"


AWAKE, TURNING, ASLEEP = (SleepReport(True, *state) for state in ((False, False), (True, False), (True, True)))
REFUSED = replace(TURNING, error="no room in host memory")


def test_the_report_of_a_sleep_stays_while_it_does_not_answer() -> None:
    assert judge(replace(GOOD, sleep=ASLEEP), BAD).verdict.sleep == ASLEEP


@pytest.mark.parametrize(("sleep", "pause_s"), [(AWAKE, 60.0), (TURNING, 1.0), (ASLEEP, 60.0), (REFUSED, 60.0)])
def test_one_that_falls_asleep_is_asked_again_soon(sleep: SleepReport, pause_s: float) -> None:
    one = ProbeJudge(replace(SPEC, period_s=60.0), 0.0)
    one.record(replace(GOOD, sleep=sleep), 0.0)
    assert one.pause_s(0.0, retiring=False) == pause_s


# ----------------------------------------------------------------------------------------------------- over HTTP

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def listening(answer: Answer, timeout_s: float = PATIENCE_S) -> AsyncIterator[Subject]:
    """A replica on 127.0.0.1 that answers like that."""
    app = web.Application()
    app.router.add_get("/readyz", answer)
    app.router.add_get("/contract", answer)
    app.router.add_get("/traces", answer)
    app.router.add_put("/user-config", answer)
    app.router.add_put("/sleep", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = unused_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield Subject("c1", 0.0, "127.0.0.1", replace(SPEC, port=port, timeout_s=timeout_s), managed=True)
    finally:
        await runner.cleanup()


@pytest.fixture
def probe() -> HttpProbe:
    return HttpProbe()


def says(report: dict[str, Any], status: int = 200) -> Answer:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(report, status=status)

    return answer


@pytest.mark.parametrize(
    ("status", "report", "reading"),
    [
        (
            200,
            {"state": "ready", "ongoing": 3, "queued": 1, "stats": {"running": 3, "odd": "text"}, "stats_version": 7},
            ProbeReading(True, "200", ongoing=3, queued=1, stats=PublishedStats({"running": 3.0}, 7)),
        ),
        (
            503,
            {"state": "starting", "ongoing": 0, "detail": "loading weights", "progress": 12},
            ProbeReading(False, "503: loading weights", ongoing=0, reason="loading weights", progress=12),
        ),
        (503, {"state": "draining", "ongoing": 4}, ProbeReading(False, "503", reported_draining=True, ongoing=4)),
        (
            503,
            {
                "detail": "reading\n  caf\udce9.bin\x1b[0m",
                "waiting": {"r\udce9": 1},
                "unreached": {"r\udce9": {"r\udce9-1": "no\nconnection", "r-2": 1}, "s": []},
                "user_config": {"wanted": "a\udce9", "applied": "b\udce9", "error": "no such file:\n  caf\udce9.bin"},
                "sleep": {"can": True, "wanted": True, "asleep": False, "error": "no file:\n  caf\udce9.bin"},
            },
            ProbeReading(
                False,
                "503: reading caf\\udce9.bin [0m",
                reason="reading caf\\udce9.bin [0m",
                waiting={"r\\udce9": 1},
                unreached={"r\\udce9": {"r\\udce9-1": "no connection"}},
                user_config=UserConfigReport("a\\udce9", "b\\udce9", "no such file: caf\\udce9.bin"),
                sleep=SleepReport(True, True, False, "no file: caf\\udce9.bin"),
            ),
        ),
    ],
    ids=["ready", "starting", "draining", "words that cannot be stored as they are"],
)
async def test_a_report_is_read(probe: HttpProbe, status: int, report: dict[str, Any], reading: ProbeReading) -> None:
    async with listening(says(report, status)) as target:
        where = f"{status} from :{target.spec.port}/readyz"
        assert await probe(target) == replace(reading, detail=reading.detail.replace(str(status), where))
        assert await probe(replace(target, managed=False)) == ProbeReading(status == 200, where), (
            "a foreign image's is not"
        )


@pytest.mark.parametrize("managed", [True, False])
async def test_no_connection_is_kept(probe: HttpProbe, managed: bool) -> None:
    """Triton waits for every open connection before it ends, and drops what is in flight after that time."""
    clients = set()

    async def answer(request: web.Request) -> web.Response:
        clients.add(request.transport)
        return web.Response()

    async with listening(answer) as target:
        for _ in range(3):
            assert (await probe(replace(target, managed=managed))).ok
    assert len(clients) == 3


ANSWERED = b'{"state": "ready", "ongoing": 3}'


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(ANSWERED), ANSWERED), (True, 3)),
        (b"HTTP/1.1 200 OK\r\n\r\n" + ANSWERED, (True, 3)),
        (b"HTTP/1.1 200 OK\nContent-Type: application/json\n\n" + ANSWERED, (True, 3)),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + ANSWERED, (False, None)),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10", (False, None)),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 40_000, (False, None)),
        (b"", (False, None)),
    ],
    ids=["its length", "to the end", "bare newlines", "a short body", "a short head", "an endless head", "nothing"],
)
async def test_what_counts_as_an_answer(probe: HttpProbe, answer: bytes, found: tuple[bool, int | None]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        subject = Subject("c1", 0.0, "127.0.0.1", replace(SPEC, port=port, timeout_s=PATIENCE_S), managed=True)
        reading = await probe(subject)
        assert (reading.ok, reading.ongoing) == found
        assert (await probe.contract(subject) is None) is not found[0]


async def test_a_replica_that_would_answer_in_chunks_is_understood(probe: HttpProbe) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in (ANSWERED[:9], ANSWERED[9:]):
            await response.write(part)
        return response

    async with listening(answer) as target:
        assert (await probe(target)).ongoing == 3


PUTS: dict[str, Callable[[HttpProbe, str], Awaitable[object]]] = {
    "user-config": lambda probe, address: probe.give(address, "{}", ""),
    "sleep": lambda probe, address: probe.put_to_sleep(address, True, ""),
}


@pytest.mark.parametrize("path", PUTS)
async def test_a_refused_put_has_its_reason_on_one_line(probe: HttpProbe, path: str) -> None:
    async with listening(says({"error": "no such file:\n  caf\udce9.bin"}, 400)) as target:
        address = f"127.0.0.1:{target.spec.port}"
        with pytest.raises(ReplicaError, match=rf"/{path} refused it with 400: no such file: caf\\udce9\.bin$"):
            await PUTS[path](probe, address)
    with pytest.raises(ReplicaError, match=rf"/{path} does not answer: .*; it is tried again"):
        await PUTS[path](probe, address)


@pytest.mark.parametrize("path", PUTS)
async def test_a_put_without_a_report_is_refused(probe: HttpProbe, path: str) -> None:
    odd = {"user_config": {"wanted": 1}, "sleep": {"can": 1, "wanted": True, "asleep": False, "error": ""}}
    async with listening(says(odd)) as target:
        with pytest.raises(ReplicaError, match="refused it with 200: no reason is given"):
            await PUTS[path](probe, f"127.0.0.1:{target.spec.port}")


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (200, b'{"traces": [{"trace": "a"}]}', [{"trace": "a"}]),
        (404, b"{}", ()),
        (500, b'{"traces": []}', None),
        (200, b"<!doctype html>", None),
        (200, b'{"traces": {}}', None),
        (200, b'{"traces": ["' + bytes(MOST_TRACES_BYTES) + b'"]}', None),
    ],
    ids=["traces", "an earlier runtime", "a fault", "another program", "another shape", "too large"],
)
async def test_the_traces_of_a_replica(probe: HttpProbe, status: int, body: bytes, told: object) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, content_type="application/json")

    async with listening(answer) as target:
        assert await probe.traces(target) == told
    assert await probe.traces(target) is None, "nobody answers"


@pytest.mark.parametrize(
    ("status", "kind", "body", "told"),
    [
        (200, "application/x-protobuf", b"contract", b"contract"),
        (404, "application/json", b"{}", b""),
        (200, "text/html", b"<!doctype html>", b""),
        (200, "application/x-protobuf", bytes(MOST_CONTRACT_BYTES + 1), b""),
    ],
    ids=["a contract", "an earlier runtime", "another program", "too large"],
)
async def test_the_contract_of_a_replica(probe: HttpProbe, status: int, kind: str, body: bytes, told: bytes) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, content_type=kind)

    async with listening(answer) as target:
        assert await probe.contract(target) == told
    assert await probe.contract(target) is None, "nobody answers"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b'{"ongoing": -1}',
        b'{"ongoing": 1' + b"0" * 400 + b"}",
        b'{"user_config": 1, "sleep": 1, "waiting": [], "ongoing": null}',
        b"1" * 300_000,
        b"[" * 60_000,
    ],
    ids=lambda body: body[:24],
)
async def test_any_body_is_survived(probe: HttpProbe, body: bytes) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body)

    async with listening(answer) as target:
        reading = await probe(target)
        assert (reading.ok, reading.ongoing, reading.user_config, reading.waiting) == (True, None, None, {})


async def test_silence_refusal_and_redirects_are_no_good_answers(probe: HttpProbe) -> None:
    async def never(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async with listening(never, timeout_s=0.2) as target:
        assert (await probe(target)).detail == f"no answer from :{target.spec.port}/readyz within 0.2 s"

    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPFound("/elsewhere")

    async with listening(redirect) as target:
        assert (await probe(target)).detail == f"302 from :{target.spec.port}/readyz"
    assert (await probe(target)).detail.startswith(f"no connection to :{target.spec.port}/readyz: Connect")


# --------------------------------------------------------------------------------------------------------- the prober


class Replicas:
    """What each container answers, and the prober that asks."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        self.answers: dict[str, ProbeReading] = {}
        self.asked: list[Subject] = []
        self.wakes = 0
        self.noted: list[tuple[str, float]] = []
        self.contract: bytes | None = b""
        self.prober = Prober(
            self.ask,
            Background(spawn, self.wake),
            lambda one, at: False,
            lambda one, at: self.noted.append((one, at)),
            self.ask_contract,
        )

    async def ask_contract(self, target: Subject) -> bytes | None:
        return self.contract

    async def ask(self, target: Subject) -> ProbeReading:
        self.asked.append(target)
        await asyncio.sleep(0)
        if target.container_id not in self.answers:
            await asyncio.Event().wait()
        return self.answers[target.container_id]

    def wake(self) -> None:
        self.wakes += 1

    async def sync(self, *containers: ReplicaContainer, spec: ServiceSpec | None = None, **changes: Any) -> None:
        """Probe these containers of a service; return after the first round."""
        self.prober.sync(containers, {"web": spec or WEB}, **{"retiring": (), **changes})
        await self.prober.first_round(PATIENCE_S)

    async def becomes(self, health: ReplicaHealth, container: ReplicaContainer) -> ReplicaContainer:
        await until(lambda: self.prober.judged(container).health is health)
        return self.prober.judged(container)


@pytest_asyncio.fixture
async def world() -> AsyncIterator[Replicas]:
    async with asyncio.TaskGroup() as tasks:
        world = Replicas(tasks.create_task)
        yield world
        world.prober.sync((), {}, ())


WEB = service("web", probe=replace(SPEC, period_s=0.01))
SLOW = replace(WEB, probe=replace(SPEC, period_s=3600.0))
BARE = replica(WEB, 1, health=ReplicaHealth.UNKNOWN, ongoing=None, ongoing_at=None)


async def test_verdicts_reach_the_snapshot_and_wake_the_loop(world: Replicas) -> None:
    assert world.prober.judged(BARE) == BARE, "never asked: unknown"
    world.answers[BARE.id] = GOOD
    await world.sync(BARE)
    judged = world.prober.judged(BARE)
    assert (judged.health, judged.ongoing, judged.queued) == (READY, 2, 0)
    assert judged.ongoing_at is not None
    assert judged.ready_since is not None
    assert world.noted == [(BARE.id, BARE.started_at)]
    wakes = world.wakes
    world.answers[BARE.id] = BAD
    await world.becomes(FAILED, BARE)
    assert world.wakes > wakes
    assert world.prober.judged(BARE).ready_since is None


async def test_a_replica_is_ready_once_it_has_told_its_contract(world: Replicas) -> None:
    world.answers[BARE.id], world.contract = GOOD, None
    await world.sync(BARE)
    judged = world.prober.judged(BARE)
    assert (judged.health, judged.health_detail, judged.contract) == (UNKNOWN, CONTRACT_UNREAD, None)
    assert world.noted == []
    world.contract = b"contract"
    assert (await world.becomes(READY, BARE)).contract == b"contract"
    world.contract = b"another"
    asked = len(world.asked)
    await until(lambda: len(world.asked) > asked + 2)
    assert world.prober.judged(BARE).contract == b"contract", "it is asked once"


async def test_a_program_of_another_kind_has_no_contract(world: Replicas) -> None:
    world.answers[BARE.id], world.contract = GOOD, b"contract"
    await world.sync(BARE, spec=replace(WEB, managed=False))
    assert (await world.becomes(READY, BARE)).contract == b""


async def test_a_replica_that_loses_its_address_gets_no_question_and_fails(world: Replicas) -> None:
    world.answers[BARE.id] = GOOD
    await world.sync(BARE)
    await world.becomes(READY, BARE)
    lost = replace(BARE, ip=None)
    await world.sync(lost)
    asked = len(world.asked)
    assert world.prober.judged(lost).health is READY, "as a replica that does not answer: until it has failed"
    failed = await world.becomes(FAILED, lost)
    assert failed.health_detail == "3 bad answers in a row, the last: it has no network address"
    assert len(world.asked) == asked, "another container may have its address by now"


async def test_another_address_keeps_the_verdict_and_another_start_does_not(world: Replicas) -> None:
    world.answers[BARE.id] = GOOD
    await world.sync(BARE)
    moved = replace(BARE, ip="10.9.9.9")
    world.prober.sync([moved], {"web": WEB}, ())
    assert world.prober.judged(moved).health is READY
    await until(lambda: world.asked[-1].ip == "10.9.9.9")
    world.answers[BARE.id] = BAD
    restarted = replace(moved, started_at=5_000.0)
    await world.sync(restarted)
    assert world.prober.judged(restarted).health is UNKNOWN


async def test_new_health_settings_keep_the_verdict_and_the_progress(world: Replicas) -> None:
    """They change under running replicas: no start begins again for it, not even one that has loaded for hours."""
    world.answers[BARE.id] = replace(BAD, progress=7)
    await world.sync(BARE)
    moved_at = world.prober.judged(BARE).progressed_at
    asked = len(world.asked)
    await world.sync(BARE, spec=replace(WEB, probe=replace(WEB.probe, period_s=0.02, failures=1)))
    await until(lambda: len(world.asked) > asked + 3)
    assert {target.spec.failures for target in world.asked[asked + 1 :]} == {1}
    assert world.prober.judged(BARE).progressed_at == moved_at, "the same progress is none"
    world.answers[BARE.id] = GOOD
    await world.becomes(READY, BARE)
    world.answers[BARE.id] = BAD
    assert "1 bad answers in a row" in (await world.becomes(FAILED, BARE)).health_detail


async def test_the_deadline_of_a_start_counts_from_the_first_look(world: Replicas) -> None:
    """What the replica reported to an earlier controller is not known."""
    spec = replace(WEB, startup_deadline_s=60.0)
    world.prober.sync([BARE], {"web": spec}, ())
    begun = world.prober.judged(BARE)
    assert begun.progressed_at is not None
    for late_s, phase in ((59.0, Phase.STARTING), (61.0, Phase.FAILED)):
        assert phase_of(begun, spec, None, begun.progressed_at + late_s)[0] is phase


async def test_the_first_round_does_not_wait_for_a_silent_replica(world: Replicas) -> None:
    world.prober.sync([BARE], {"web": WEB}, ())
    await world.prober.first_round(0.05)


async def test_a_retiring_replica_is_asked_at_once_and_often(world: Replicas) -> None:
    world.answers[BARE.id] = GOOD
    await world.sync(BARE, spec=SLOW)
    await world.sync(BARE, spec=SLOW, retiring=[BARE.id])
    world.answers[BARE.id] = replace(GOOD, ongoing=0)
    await until(lambda: world.prober.judged(BARE).ongoing == 0)
    await until(lambda: len(world.asked) >= 4)


async def test_a_sleep_that_has_come_wakes_the_loop(world: Replicas) -> None:
    world.answers[BARE.id] = replace(GOOD, sleep=AWAKE)
    await world.sync(BARE, spec=SLOW)
    world.answers[BARE.id], wakes = replace(GOOD, sleep=ASLEEP), world.wakes
    world.prober.learn(BARE.id, TURNING)
    assert (world.prober.judged(BARE).sleep, world.prober.judged(BARE).health) == (TURNING, ReplicaHealth.UNKNOWN)
    await until(lambda: world.prober.judged(BARE).sleep == ASLEEP)
    assert world.wakes > wakes


async def test_an_outdated_or_removed_replica_is_asked_as_before(world: Replicas) -> None:
    world.answers[BARE.id] = GOOD
    moved = replace(WEB, probe=replace(SPEC, port=1234, period_s=0.01))
    await world.sync(BARE)
    await world.sync(BARE, spec=moved, outdated=[BARE.id])
    world.prober.sync([BARE], {}, ())
    asked = len(world.asked)
    await until(lambda: len(world.asked) > asked + 1)
    assert {target.spec.port for target in world.asked} == {9100}
    await world.sync(BARE, spec=moved)
    await until(lambda: world.asked[-1].spec.port == 1234)


async def test_a_replica_is_asked_at_the_port_of_its_label_and_else_of_its_service(world: Replicas) -> None:
    old, unlabelled = replace(BARE, port=8080, probe=(8080, SPEC.path)), replace(BARE, id="other")
    world.answers = {old.id: GOOD, "other": GOOD}
    await world.sync(old, unlabelled, spec=replace(WEB, port=9090, probe=replace(SPEC, port=9090)))
    assert {target.container_id: target.spec.port for target in world.asked} == {old.id: 8080, "other": 9090}


# ------------------------------------------------------------------------------------------------------------- progress


def busy(progress: int | None, ongoing: int | None = 1, queued: int = 0) -> ProbeReading:
    return ProbeReading(ok=True, detail="200", ongoing=ongoing, progress=progress, queued=queued)


@pytest.mark.parametrize(
    ("readings", "stalled_since"),
    [
        ([busy(7), busy(7), busy(7), busy(8), busy(8)], [None, 1.0, 1.0, None, 4.0]),
        ([busy(7), busy(7), busy(7, ongoing=0), busy(7), busy(7)], [None, 1.0, None, 3.0, 3.0]),
        ([busy(7), busy(7, queued=1), busy(7, queued=1)], [None] * 3),
        ([*[busy(None)] * 3, *[busy(1, ongoing=None)] * 3], [None] * 6),
    ],
    ids=["it moves", "it has no work", "it waits for another service", "it reports no progress"],
)
def test_since_when_a_busy_replica_has_not_moved(
    readings: list[ProbeReading], stalled_since: list[float | None]
) -> None:
    seen = [judge(*readings[: count + 1]).verdict.stalled_since for count in range(len(readings))]
    assert seen == stalled_since


def test_one_that_was_told_to_sleep_is_not_ready_until_it_is_awake_and_starts_then() -> None:
    one, now, said = ProbeJudge(SPEC, 0.0, was_ready=True, reports_progress=True), 0.0, []
    for retiring, wanted, asleep, error in [
        *[(False, False, False, ""), (True, True, False, ""), (True, True, True, ""), (False, True, True, "")],
        *[(False, False, True, ""), (False, False, False, "")],
        *[(True, True, True, ""), (False, False, True, "no memory")],
    ]:
        now += 10.0
        report = SleepReport(True, wanted, asleep, error)
        one.record(ProbeReading(ok=True, detail="200", sleep=report, progress=7), now, retiring=retiring)
        said.append((one.verdict.health, one.verdict.ready_since, one.verdict.progressed_at))
    ready, unknown, failed = ReplicaHealth.READY, ReplicaHealth.UNKNOWN, ReplicaHealth.FAILED
    assert said == [
        (ready, 0.0, 10.0),
        *[(unknown, None, 20.0), (unknown, None, 30.0), (unknown, None, 30.0), (unknown, None, 30.0)],
        *[(ready, 60.0, 30.0), (unknown, None, 70.0), (failed, None, 70.0)],
    ]
    assert one.verdict.health_detail == "it does not wake up: no memory"


@pytest.mark.parametrize("retiring", [True, False])
def test_one_that_sleeps_and_is_not_to_has_the_time_of_a_start_to_wake_up(retiring: bool) -> None:
    one = ProbeJudge(SPEC, 0.0, was_ready=True, reports_progress=True)
    for now in (100.0, 200.0, 300.0):
        one.record(replace(GOOD, sleep=ASLEEP, progress=7), now, retiring=retiring)
    assert one.verdict.progressed_at == (300.0 if retiring else 200.0)
