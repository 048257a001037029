"""Who blocks the event loop: decided from looks, named from the stack."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, web
from hypothesis import given
from hypothesis import strategies as st
from pierhead.echo.v1 import echo_pb2, echo_pb2_grpc
from pierhead.metrics import RuntimeMetrics
from pierhead.replica.blame import place_of, request_of, stack_of
from pierhead.replica.watchdog import BLOCKED_S, PERIOD_S, Detector, Finding, Look, Quiet, RecentMax, Watchdog

from tests.unit.runtime.harness import Cluster, address, echo, until


class Simulation:
    """A loop that runs callbacks of given lengths, looked at every PERIOD_S. One step is a millisecond."""

    def __init__(self, callbacks: list[tuple[str, int]]) -> None:
        """`callbacks`: (who, milliseconds) one after another; who "" = the loop waits for so long."""
        self.findings: list[Finding] = []
        self.detector = detector = Detector()
        steps = [who for who, length in callbacks for _ in range(length)] + [""] * 1000
        starts = {0}
        for _, length in callbacks:
            starts.add(max(starts) + length)
        sent = answered = None
        for step, who in enumerate(steps):
            now = step / 1000
            if sent is not None and answered is None and (step in starts or not who):
                answered = now  # the loop gets to what is due between two callbacks
            if step % int(PERIOD_S * 1000) == 0:
                finding = detector.look(Look(now, not who, who, answered, cpu_s=now))
                if finding is not None:
                    self.findings.append(finding)
                if answered is not None:
                    sent = answered = None
                if detector.wants_probe():
                    sent = now

    @property
    def kinds(self) -> list[str]:
        return [finding.kind for finding in self.findings]


class TestDetector:
    def test_a_long_callback_is_told_at_its_length_and_at_its_end(self) -> None:
        simulation = Simulation([("", 100), ("slow", 500), ("", 100)])
        began, ended = simulation.findings
        assert (began.kind, ended.kind) == ("began", "ended")
        assert BLOCKED_S <= began.length_s <= BLOCKED_S + PERIOD_S
        assert 0.5 - PERIOD_S <= ended.length_s <= 0.5
        assert simulation.detector.total_s == ended.length_s

    def test_short_ones_are_not(self) -> None:
        assert Simulation([("", 100), ("short", 190)] * 5).findings == []

    def test_many_short_ones_in_a_row_are_lag_and_nobody_s_fault(self) -> None:
        looks = Detector()
        for step in range(20):  # the probe waits behind hundreds of others, another one runs at each look
            looks.look(Look(step * PERIOD_S, waits=False, who=step))
            looks.wants_probe()
        assert looks.shown_lag_s(20 * PERIOD_S) == pytest.approx(20 * PERIOD_S)
        looks.look(Look(20 * PERIOD_S, waits=True, answered_at=20 * PERIOD_S))
        assert looks.total_s == 0
        assert looks.shown_lag_s(20 * PERIOD_S) == pytest.approx(20 * PERIOD_S)

    def test_two_blocks_are_two(self) -> None:
        assert Simulation([("a", 400), ("b", 400)]).kinds == ["began", "ended"] * 2

    @given(st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.integers(1, 900)), max_size=12))
    def test_blocks_are_found_and_only_blocks(self, callbacks: list[tuple[str, int]]) -> None:
        simulation = Simulation(callbacks)
        period, limit = PERIOD_S * 1000, BLOCKED_S * 1000
        certain = sum(1 for who, length in callbacks if who and length >= limit + 2 * period)
        possible = sum(1 for who, length in callbacks if who and length >= limit - 1)
        assert certain <= simulation.kinds.count("ended") <= possible
        assert simulation.kinds == ["began", "ended"] * simulation.kinds.count("ended")
        blocked = sum(length for who, length in callbacks if who) / 1000
        assert 0 <= simulation.detector.total_s <= blocked + 1e-9

    def test_code_that_keeps_the_interpreter_is_found_afterwards(self) -> None:
        detector = Detector()
        detector.look(Look(0.0, waits=True, cpu_s=1.0))
        finding = detector.look(Look(0.5 + PERIOD_S, waits=False, who="c", cpu_s=1.5))
        assert finding is not None
        assert finding.kind == "stood still"
        assert finding.length_s == pytest.approx(0.5)
        assert detector.total_s == pytest.approx(0.5)
        assert detector.shown_lag_s(0.7) == pytest.approx(0.5)

    def test_a_process_that_got_no_processor_is_nobody_s_fault(self) -> None:
        detector = Detector()
        detector.look(Look(0.0, waits=True, cpu_s=1.0))
        assert detector.look(Look(30.0, waits=False, who="c", cpu_s=1.01)) is None
        assert detector.total_s == 0


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 5), st.booleans()), max_size=20))
def test_the_largest_of_the_last_while(steps: list[tuple[float, float, bool]]) -> None:
    recent, now, added = RecentMax(10), 0.0, [(0.0, 0.0)]
    for pause, value, is_read in steps:
        now += pause
        if is_read:
            assert recent.value(now) >= max((one for at, one in added if at > now - 10), default=0.0)
            assert recent.value(now) <= max((one for at, one in added if at >= now - 20), default=0.0)
        else:
            recent.add(now, value)
            added.append((now, value))


def test_each_place_is_told_once_a_minute_and_counted_meanwhile() -> None:
    quiet = Quiet(60)
    place = place_of(sys._getframe())
    other = place_of(sys._getframe())
    assert place != other
    assert [quiet.held_back(place, at) for at in (0, 1, 59)] == [0, None, None]
    assert quiet.held_back(other, 2) == 0
    assert quiet.held_back(place, 61) == 2
    assert quiet.held_back(place, 130) == 0


class TestNames:
    def test_the_service_s_own_line_is_named_not_the_library_it_calls(self) -> None:
        found = []

        def callback(value: int) -> int:
            found.append((place_of(sys._getframe()), stack_of(sys._getframe())))
            return value

        sorted([2, 1], key=callback)
        place, stack = found[0]
        assert place is not None
        assert place.file == __file__
        assert place.function.endswith("callback")
        assert "sorted([2, 1]" in stack

    def test_a_stack_without_own_code_is_named_by_its_top(self) -> None:
        event = threading.Event()
        thread = threading.Thread(target=event.wait)
        thread.start()
        try:
            place = place_of(sys._current_frames()[thread.ident or 0])
            assert place is not None
            assert place.file.endswith("threading.py")
        finally:
            event.set()
            thread.join()

    def test_no_stack_no_name(self) -> None:
        assert (place_of(None), request_of(None), stack_of(None)) == (None, "", "no Python code")


@pytest.fixture
async def metrics() -> Any:
    """The metrics of a watchdog that watches the test's own loop."""
    found = RuntimeMetrics()
    watchdog = Watchdog(found)
    watchdog.start()
    yield found
    watchdog.stop()


@pytest.fixture
def block(caplog: pytest.LogCaptureFixture) -> Callable[[], None]:
    """Blocks until the watchdog has said so."""

    def wait_until_told() -> None:
        limit = time.monotonic() + 20
        while "has been blocked for" not in caplog.text:
            assert time.monotonic() < limit, "the watchdog says nothing"
            time.sleep(0.01)

    return wait_until_told


class TestWatchdog:
    async def test_a_method_that_blocks_is_named_with_its_length(
        self,
        cluster: Cluster,
        metrics: RuntimeMetrics,
        block: Callable[[], None],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        class Blocking(echo_pb2_grpc.EchoServicer):
            async def Echo(self, request: echo_pb2.EchoRequest, context: Any) -> echo_pb2.EchoReply:
                block()
                return echo_pb2.EchoReply()

            async def Generate(self, request: echo_pb2.GenerateRequest, context: Any) -> AsyncIterator[echo_pb2.Token]:
                yield echo_pb2.Token()

        server = await cluster.start(Blocking())
        async with grpc.aio.insecure_channel(address(server)) as channel:
            await echo_pb2_grpc.EchoStub(channel).Echo(echo())
        await until(lambda: "the event loop was blocked for" in caplog.text, "its end is told")
        began, ended = [record.getMessage() for record in caplog.records if record.name == "pierhead"][-2:]
        so_far = re.match(r"the event loop has been blocked for ([\d.]+) s by ", began)
        assert so_far is not None
        assert float(so_far[1]) >= BLOCKED_S, "a busy machine looks later"
        assert f"{__file__}:" in began
        assert "wait_until_told (pierhead.echo.v1.Echo/Echo), and still is\n" in began
        assert "in Echo\n    block()" in began, "the stack is there"
        assert "wait_until_told (pierhead.echo.v1.Echo/Echo)" in ended
        assert metrics.loop_blocked.read() >= BLOCKED_S
        assert metrics.loop_lag.read() >= BLOCKED_S

    async def test_a_route_that_blocks_is_named(
        self,
        cluster: Cluster,
        metrics: RuntimeMetrics,
        block: Callable[[], None],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        async def get(_: web.Request) -> web.Response:
            block()
            return web.Response()

        app = web.Application()
        app.router.add_get("/items/{number}", get)
        server = await cluster.start(app)
        async with ClientSession() as client:
            await client.get(f"http://127.0.0.1:{server.http_port}/items/7")
        assert "wait_until_told (GET /items/{number})" in caplog.text

    async def test_a_plain_callback_that_blocks_is_named(
        self, metrics: RuntimeMetrics, block: Callable[[], None], caplog: pytest.LogCaptureFixture
    ) -> None:
        asyncio.get_running_loop().call_soon(block)
        await until(lambda: "the event loop was blocked for" in caplog.text, "its end is told")
        assert "wait_until_told, and still is" in caplog.text

    async def test_a_loop_that_waits_is_left_alone(
        self, metrics: RuntimeMetrics, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked = threading.Event()
        looks = 0
        before = Detector.look

        def count(self: Detector, look: Look) -> Finding | None:
            nonlocal looks
            if looks or look.waits:  # the first looks may find the loop on its way there
                looks += 1
            if looks > 3:
                looked.set()
            return before(self, look)

        monkeypatch.setattr(Detector, "look", count)
        probes = 0
        loop = asyncio.get_running_loop()
        ring = loop.call_soon_threadsafe

        def note(*args: Any, **kwargs: Any) -> Any:
            nonlocal probes
            probes += looks > 0 and "_answer" in repr(args[0])
            return ring(*args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", note)
        await loop.run_in_executor(None, looked.wait)
        assert probes == 0
        assert metrics.loop_blocked.read() == 0
