"""Which failures of a load a fault on a Swarm explains, and what several clients saw together."""

from __future__ import annotations

import pytest

from tests.harness.clients import merged
from tests.harness.load import Failure, FailureCount, LoadResult
from tests.harness.swarm_losses import BEGUN, EDGE, GOSSIP, NEVER_S, UNEXPLAINED, Lost, gossip_s, judged, unexplained

LOST, OTHER = "10.0.0.13", "10.0.0.14"
ERROR, REFUSED, SILENT = "503 b'no server'", "ConnectionRefusedError: [Errno 111]", "TimeoutError: "
CLOSED = "IncompleteReadError: 0 bytes read on a total of undefined expected bytes"


def failure(begun_at: float, edge: str = OTHER, what: str = ERROR) -> Failure:
    return Failure(begun_at + 0.1, f"http://{edge}:8000/echo", what, begun_at)


POWER = Lost("power off", LOST, 100.0, over_at=140.0)
CUT = Lost("cut off", LOST, 100.0, over_at=140.0, gossips_at=130.0)
DRAIN = Lost("drain", LOST, 100.0, over_at=140.0, others_for_s=NEVER_S)
REPLICA = Lost("kill of a replica", "", 100.0)


@pytest.mark.parametrize(
    ("fault", "failed", "of"),
    [
        (POWER, failure(97.9), UNEXPLAINED),
        (POWER, failure(98.5), BEGUN),
        (POWER, failure(104.9), BEGUN),
        (POWER, failure(105.1), UNEXPLAINED),
        (POWER, failure(139.0, LOST, REFUSED), EDGE),
        (POWER, failure(145.1, LOST), UNEXPLAINED),
        (POWER, failure(97.9, LOST), UNEXPLAINED),
        (CUT, failure(129.9), UNEXPLAINED),
        (CUT, failure(131.0), GOSSIP),
        (CUT, failure(219.0, what=SILENT), GOSSIP),
        (CUT, failure(131.0, what=CLOSED), GOSSIP),
        (CUT, failure(131.0, what=REFUSED), UNEXPLAINED),
        (CUT, failure(220.1), UNEXPLAINED),
        (CUT, failure(146.0, LOST), UNEXPLAINED),
        (DRAIN, failure(100.1), UNEXPLAINED),
        (DRAIN, failure(100.1, LOST), EDGE),
        (REPLICA, failure(100.1), BEGUN),
        (REPLICA, failure(100.1, LOST), BEGUN),
    ],
)
def test_what_a_fault_explains(fault: Lost, failed: Failure, of: str) -> None:
    (found,) = judged([failed], [fault])
    assert (found.of, found.kind) == (of, "" if of == UNEXPLAINED else fault.kind)
    assert unexplained([failed], [fault]) == ([failed] if of == UNEXPLAINED else [])


def test_a_gossip_window_is_the_last_explanation() -> None:
    failed = failure(131.0)
    assert [one.of for one in judged([failed], [CUT, Lost("power off", "10.0.0.15", 130.0)])] == [BEGUN]
    assert [one.of for one in judged([failed], [])] == [UNEXPLAINED]


def test_for_how_long_a_gossip_window_was_open() -> None:
    windows = [Lost("cut off", LOST, 0.0, gossips_at=at) for at in (100.0, 150.0, 400.0)]
    assert gossip_s([*windows, POWER], 1000.0) == 140.0 + 90.0
    assert gossip_s(windows, 410.0) == 140.0 + 10.0
    assert gossip_s([], 410.0) == 0.0


def test_what_several_clients_saw() -> None:
    first = LoadResult(10, 1, 5.0, 1.0, 9.0, 20.0, [failure(7.0)], 7.0, [FailureCount(7, "a", "503", 1)], 100)
    second = LoadResult(30, 1, 6.0, 2.0, 8.0, 10.0, [failure(3.0)], 3.0, [FailureCount(3, "a", "503", 1)], 100)
    both = merged([first, second])
    assert (both.requests, both.failed, both.seconds, both.keeps) == (40, 2, 6.0, 200)
    assert (both.p50_ms, both.p99_ms, both.max_ms) == (2.0, 9.0, 20.0)
    assert [one.begun_at for one in both.failures] == [3.0, 7.0]
    assert [one.second for one in both.counts] == [3, 7]
