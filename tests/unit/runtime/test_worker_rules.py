"""What a supervisor decides, and how the numbers of several workers become those of one replica."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from pierhead import Settings
from pierhead.errors import Backpressure
from pierhead.metrics import RuntimeMetrics
from pierhead.replica.user_config import ConfigReport
from pierhead.workers.board import DETAIL_BYTES, Board, Seen, WorkerState
from pierhead.workers.pages import Ledger, Page, read_page
from pierhead.workers.place import Place
from pierhead.workers.seat import SharedAdmission
from pierhead.workers.supervision import HUNG_S, LONGEST_S, SHORTEST_S, WELL_S, Backoff, config_of, hung, verdict
from pierhead.workers.supervisor import read_settings, settings_text
from prometheus_client.parser import text_string_to_metric_families

ABSENT, READY, ILL, BROKEN = WorkerState.ABSENT, WorkerState.READY, WorkerState.ILL, WorkerState.BROKEN


def seen(*states: WorkerState, detail: str = "") -> list[Seen]:
    return [Seen(state, 0, 0, 100.0, detail) for state in states]


class TestVerdict:
    @pytest.mark.parametrize(
        ("states", "was_ready", "expected"),
        [
            ((ABSENT, ABSENT), False, ("starting", "0 of 2 workers are ready")),
            ((READY, ABSENT), False, ("starting", "1 of 2 workers is ready")),
            ((READY, READY), False, ("ready", "")),
            ((READY, ABSENT), True, ("ready", "")),
            ((ABSENT, ABSENT), True, ("starting", "no worker is left; they are being started again")),
            ((READY, ILL), True, ("starting", "worker 2: no GPU")),
            ((READY, BROKEN), True, ("starting", "worker 2: no GPU")),
        ],
    )
    def test_what_the_replica_says(
        self, states: tuple[WorkerState, ...], was_ready: bool, expected: tuple[str, str]
    ) -> None:
        assert verdict(seen(*states, detail="no GPU"), was_ready=was_ready, draining=False) == expected

    @given(st.lists(st.sampled_from(list(WorkerState)), min_size=1, max_size=6), st.booleans(), st.booleans())
    def test_ready_is_said_only_with_a_worker_that_is(
        self, states: list[WorkerState], was_ready: bool, draining: bool
    ) -> None:
        state, detail = verdict(seen(*states), was_ready=was_ready, draining=draining)
        assert (state == "ready") == (detail == "")
        if draining:
            assert state == "draining"
        if state == "ready":
            assert READY in states
            assert ILL not in states
            assert BROKEN not in states
            assert was_ready or set(states) == {READY}


class TestUserConfig:
    OLD, NEW = "00000000000a", "00000000000b"

    @pytest.mark.parametrize(
        ("told", "expected"),
        [
            ([None, None], ConfigReport(NEW, "")),
            ([ConfigReport(NEW, NEW), None], ConfigReport(NEW, NEW)),
            ([ConfigReport(NEW, NEW), ConfigReport(OLD, OLD)], ConfigReport(NEW, OLD)),
            ([ConfigReport(NEW, NEW), ConfigReport(NEW, NEW)], ConfigReport(NEW, NEW)),
            ([ConfigReport(NEW, NEW), ConfigReport(NEW, OLD, "no")], ConfigReport(NEW, OLD, "worker 2: no")),
            ([ConfigReport(OLD, OLD, "no"), ConfigReport(NEW, NEW)], ConfigReport(NEW, OLD)),
        ],
    )
    def test_a_replica_has_it_once_every_worker_has(
        self, told: list[ConfigReport | None], expected: ConfigReport
    ) -> None:
        workers = [Seen(READY, 0, 0, 100.0, "", config=config) for config in told]
        assert config_of(self.NEW, workers) == expected

    def test_the_board_carries_a_worker_s_report(self) -> None:
        board = Board.make(2)
        other = Board(board.descriptor, 2)
        report = ConfigReport(self.NEW, self.OLD, "Part.reconfigure raised ValueError: no")
        other.configure(1, report)
        other.tell(1, ILL, "no GPU")
        assert [one.config for one in board.seen()] == [None, report]
        assert board.seen()[1].detail == "no GPU"
        board.clear(1)
        assert board.seen()[1].config is None
        board.close()


def test_one_whose_loop_stands_still_hangs_but_not_one_that_loads() -> None:
    now = 1000.0
    still = now - HUNG_S
    assert hung(Seen(READY, 0, 0, still, ""), now, 0)
    assert hung(Seen(WorkerState.DRAINING, 0, 0, still, ""), now, 0)
    assert not hung(Seen(READY, 0, 0, still + 0.1, ""), now, 0)
    assert not hung(Seen(ABSENT, 0, 0, still, ""), now, 0)
    assert not hung(Seen(READY, 0, 0, still, ""), now, now - 1), "the supervisor itself did not run"


@given(st.lists(st.floats(0, 2 * WELL_S), min_size=1, max_size=20))
def test_pauses_grow_to_a_bound_and_begin_anew_after_a_good_life(lives: list[float]) -> None:
    backoff, last = Backoff(), 0.0
    for lived in lives:
        pause = backoff.after(lived)
        assert SHORTEST_S <= pause <= LONGEST_S
        assert pause == (SHORTEST_S if lived >= WELL_S or not last else min(LONGEST_S, 2 * last))
        last = pause


ANY_TEXT = st.text(st.characters(categories=("L", "N", "P", "S", "Z", "C")))
"""With lone surrogates, which `st.text()` leaves out: names of files have them where they are no UTF-8."""


class TestBoard:
    def test_what_is_told_is_seen_by_others(self) -> None:
        board = Board.make(3)
        other = Board(board.descriptor, 3)
        other.tell(1, ILL, "keine GPU übrig")
        other.beat(1, 12.5)
        other.ongoing[1], other.queued[1] = 7, 2
        assert board.seen()[1] == Seen(ILL, 7, 2, 12.5, "keine GPU übrig")
        assert board.seen()[0] == board.seen()[2] == Seen(ABSENT, 0, 0, 0.0, "")
        board.clear(1)
        board.close()
        assert other.seen()[1] == Seen(ABSENT, 0, 0, 0.0, "")

    @given(ANY_TEXT, ANY_TEXT)
    @example("no such file: '/models/\udcff'", "")
    def test_any_detail_can_be_told(self, first: str, second: str) -> None:
        board = Board.make(2)
        for detail in (first, second):
            board.tell(0, ILL, detail)
            raw = detail.encode(errors="backslashreplace")[:DETAIL_BYTES]
            assert board.seen()[0].detail == raw.partition(b"\0")[0].decode(errors="replace")
            assert board.seen()[1].detail == ""
        board.close()

    def test_a_place_is_read_as_it_was_written(self) -> None:
        place = Place(1, 4, 8080, 5, 9)
        assert Place.read(place.text()) == place


def test_settings_reach_the_supervisor_as_they_are() -> None:
    for environ in (
        {},
        {"PIERHEAD_STATIC_RANKER": "10.0.0.1:1,10.0.0.2:2", "PIERHEAD_PORT": "0", "PIERHEAD_DEBUG": "1"},
    ):
        settings = Settings.from_env(environ)
        assert read_settings(settings_text(settings)) == settings
    assert read_settings(settings_text(Settings())) == Settings()


@given(
    workers=st.integers(1, 4),
    bound=st.integers(1, 10),
    steps=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60),
)
def test_admission_is_bounded_over_all_workers(workers: int, bound: int, steps: list[tuple[int, bool]]) -> None:
    board = Board.make(workers)
    admissions = [SharedAdmission(bound, "web-1", Board(board.descriptor, workers), index) for index in range(workers)]
    board.close()
    held = [0] * workers
    for worker, enters in steps:
        worker %= workers
        if enters:
            refusal = admissions[worker].enter()
            assert (refusal is None) == (sum(held) < bound), "room anywhere is room"
            if refusal is None:
                held[worker] += 1
            else:
                assert isinstance(refusal, Backpressure)
                assert f"already works on {bound} requests" in refusal.message
        elif held[worker]:
            admissions[worker].leave()
            held[worker] -= 1
        assert [admission.ongoing for admission in admissions] == held == list(board.ongoing)


def page_of(requests: int = 0, queued: int = 0, lag_s: float = 0.0) -> Page:
    metrics = RuntimeMetrics()
    metrics.service, metrics.replica = "web", "web-1"
    for number in range(requests):
        metrics.requests.inc(("GET /", "200"))
        metrics.request_duration.observe(("GET /", "200"), 0.001 * number)
    metrics.queued.set(("ranker",), queued)
    metrics.loop_lag.read = lambda: lag_s
    return read_page(metrics.expose().decode())


def value(text: bytes, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


class TestLedger:
    def test_one_worker_s_page_is_the_replica_s(self) -> None:
        ledger = Ledger()
        page = page_of(5, 2, 0.1)
        ledger.update(1, page)
        assert read_page(ledger.page({}, {}).decode()) == page

    def test_counts_are_added_and_gauges_too_but_lags_are_not(self) -> None:
        ledger = Ledger()
        ledger.update(1, page_of(5, 2, 0.1))
        ledger.update(2, page_of(7, 3, 0.4))
        whole = ledger.page({}, {})
        assert value(whole, "pierhead_requests_total") == 12
        assert value(whole, "pierhead_request_duration_seconds_count") == 12
        assert value(whole, "pierhead_request_duration_seconds_bucket", le="0.0025") == 6
        assert value(whole, "pierhead_queued_requests") == 5
        assert value(whole, "pierhead_event_loop_lag_seconds") == 0.4
        assert b'{code="200",method="GET /",replica="web-1",service="web"}' in whole

    def test_what_the_supervisor_knows_better_is_its_own(self) -> None:
        ledger = Ledger()
        ledger.update(1, page_of())
        own = {"pierhead_replica_ready": 1.0, "pierhead_ongoing_requests": 3.0, "pierhead_worker_ends": 2.0}
        whole = ledger.page(own, {"service": "web", "replica": "web-1"})
        assert value(whole, "pierhead_replica_ready", service="web") == 1
        assert value(whole, "pierhead_ongoing_requests") == 3
        assert value(whole, "pierhead_worker_ends_total", replica="web-1") == 2

    @given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["work", "scrape", "die"])), max_size=40))
    def test_totals_never_go_down(self, steps: list[tuple[int, str]]) -> None:
        ledger, last = Ledger(), 0.0
        processes = [0, 1, 2]
        done = [0, 0, 0]
        for worker, step in steps:
            if step == "work":
                done[worker] += 3
            elif step == "scrape":
                ledger.update(processes[worker], page_of(done[worker], queued=1))
            else:
                ledger.retire(processes[worker])
                processes[worker], done[worker] = max(processes) + 1, 0
            total = value(ledger.page({}, {}), "pierhead_requests_total")
            assert total >= last
            last = total
        for worker in range(3):
            ledger.retire(processes[worker])
        whole = ledger.page({}, {})
        assert value(whole, "pierhead_requests_total") == last
        assert value(whole, "pierhead_queued_requests") == 0, "nobody who is gone has anything queued"

    def test_kinds_of_a_service_s_own_metrics(self) -> None:
        text = """# TYPE my_seconds summary
my_seconds_count 2
my_seconds_sum 3.0
my_seconds{quantile="0.5"} 1.5
# TYPE my_info gauge
my_info{model="x"} 1
# TYPE my_loaded gauge
my_loaded 4
# TYPE plain untyped
plain 1
"""
        ledger = Ledger()
        ledger.update(1, read_page(text))
        ledger.update(2, read_page(text))
        whole = ledger.page({}, {})
        found = {
            name: value(whole, name) for name in ("my_seconds_count", "my_seconds", "my_info", "my_loaded", "plain")
        }
        assert found == {"my_seconds_count": 4, "my_seconds": 1.5, "my_info": 1, "my_loaded": 8, "plain": 2}
