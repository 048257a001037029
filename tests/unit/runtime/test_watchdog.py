"""Which code blocks the event loop: decided from looks, named from the stack."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pierhead.echo.v1 import echo_pb2, echo_pb2_grpc
from pierhead.metrics import RuntimeMetrics
from pierhead.replica.watchdog import BLOCKED_S, PERIOD_S, Block, Detector, RecentMax, Watchdog, line_of

from tests.unit.runtime.harness import Cluster, address, echo, until


class Simulation:
    """A loop that runs callbacks of given lengths, looked at every PERIOD_S. One step is a millisecond."""

    def __init__(self, callbacks: list[tuple[str, int]]) -> None:
        """`callbacks`: (name, milliseconds) one after another; name "" = the loop waits for so long."""
        self.blocks: list[Block] = []
        self.detector = detector = Detector()
        steps = [name for name, length in callbacks for _ in range(length)] + [""] * 1000
        starts = {0}
        for _, length in callbacks:
            starts.add(max(starts) + length)
        sent = answered = None
        for step, name in enumerate(steps):
            now = step / 1000
            if sent is not None and answered is None and (step in starts or not name):
                answered = now  # the loop gets to what is due between two callbacks
            if step % int(PERIOD_S * 1000) == 0:
                block = detector.check(now, name or None, answered)
                if block is not None:
                    self.blocks.append(block)
                if answered is not None:
                    sent = answered = None
                if detector.wants_probe(now, name or None):
                    sent = now

    @property
    def are_over(self) -> list[bool]:
        return [block.is_over for block in self.blocks]


class TestDetector:
    def test_a_long_callback_is_found_at_its_length_and_at_its_end(self) -> None:
        simulation = Simulation([("", 100), ("slow", 500), ("", 100)])
        began, ended = simulation.blocks
        assert simulation.are_over == [False, True]
        assert BLOCKED_S <= began.length_s <= BLOCKED_S + PERIOD_S
        assert 0.5 - PERIOD_S <= ended.length_s <= 0.5
        assert simulation.detector.total_s == ended.length_s

    def test_many_short_ones_in_a_row_are_lag_and_no_block(self) -> None:
        detector = Detector()
        for step in range(20):  # the probe waits behind hundreds of others, another one runs at each look
            assert detector.check(step * PERIOD_S, step, None) is None
            detector.wants_probe(step * PERIOD_S, step)
        assert detector.shown_lag_s(20 * PERIOD_S) == pytest.approx(20 * PERIOD_S)
        detector.check(20 * PERIOD_S, None, 20 * PERIOD_S)
        assert detector.total_s == 0
        assert detector.shown_lag_s(20 * PERIOD_S) == pytest.approx(20 * PERIOD_S)

    @given(st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.integers(1, 900)), max_size=12))
    def test_blocks_are_found_and_only_blocks(self, callbacks: list[tuple[str, int]]) -> None:
        simulation = Simulation(callbacks)
        period, limit = PERIOD_S * 1000, BLOCKED_S * 1000
        certain = sum(1 for name, length in callbacks if name and length >= limit + 2 * period)
        possible = sum(1 for name, length in callbacks if name and length >= limit - 1)
        assert certain <= simulation.are_over.count(True) <= possible
        assert simulation.are_over == [False, True] * simulation.are_over.count(True)
        blocked = sum(length for name, length in callbacks if name) / 1000
        assert 0 <= simulation.detector.total_s <= blocked + 1e-9


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


class TestNames:
    def test_the_service_s_own_line_is_named_not_the_library_it_calls(self) -> None:
        found = []

        def callback(value: int) -> int:
            found.append(line_of(sys._getframe()))
            return value

        sorted([2, 1], key=callback)
        assert re.fullmatch(rf"{re.escape(__file__)}:\d+ .*callback", found[0])


class TestWatchdog:
    async def test_a_blocking_method_is_named(self, cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
        def wait_until_logged() -> None:
            limit = time.monotonic() + 20
            while "has been blocked for" not in caplog.text:
                assert time.monotonic() < limit, "the watchdog says nothing"
                time.sleep(0.01)

        class Blocking(echo_pb2_grpc.EchoServicer):
            async def Echo(self, request: echo_pb2.EchoRequest, context: Any) -> echo_pb2.EchoReply:
                wait_until_logged()
                return echo_pb2.EchoReply()

            async def Generate(self, request: echo_pb2.GenerateRequest, context: Any) -> AsyncIterator[echo_pb2.Token]:
                yield echo_pb2.Token()

        metrics = RuntimeMetrics()
        watchdog = Watchdog(metrics)
        watchdog.start()
        server = await cluster.start(Blocking())
        async with grpc.aio.insecure_channel(address(server)) as channel:
            await echo_pb2_grpc.EchoStub(channel).Echo(echo())
        await until(lambda: "the event loop was blocked for" in caplog.text, "its end is logged")
        watchdog.stop()
        began, ended = [record.getMessage() for record in caplog.records if record.name == "pierhead"][-2:]
        so_far = re.match(r"the event loop has been blocked for ([\d.]+) s by ", began)
        assert so_far is not None
        assert float(so_far[1]) >= BLOCKED_S, "a busy machine looks later"
        assert f"{__file__}:" in began
        assert "wait_until_logged, and still is\n" in began
        assert "in Echo\n    wait_until_logged()" in began, "the stack is there"
        assert ended.endswith("wait_until_logged")
        assert metrics.loop_blocked.read() >= BLOCKED_S
        assert metrics.loop_lag.read() >= BLOCKED_S
