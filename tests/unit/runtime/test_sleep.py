"""`PUT /sleep`: the part of a replica falls asleep and wakes up, the latest wish wins, and the replica stays ready."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientSession
from pierhead import Service
from pierhead.edge.admission import Admission
from pierhead.errors import Draining
from pierhead.replica.server import ReplicaServer
from pierhead.replica.sleep import Sleep, SleepState
from pierhead.replica.user_config import call_hook

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, EchoService, readyz, until

SLEEP, WAKE = '{"sleep": true}', '{"sleep": false}'
AWAKE, ASLEEP = SleepState(True, False, False), SleepState(True, True, True)
TURNING = SleepState(can=True, wanted=True, asleep=False)


class Sleeper:
    """A part that sleeps, and keeps what was called."""

    can_sleep = True

    def __init__(self) -> None:
        self.did: list[str] = []
        self.threads: set[int] = set()
        self.problem: BaseException | None = None

    def sleep(self) -> None:
        self._do("sleep")

    def wake(self) -> None:
        self._do("wake")

    def _do(self, what: str) -> None:
        self.threads.add(threading.get_ident())
        if self.problem is not None:
            raise self.problem
        self.did.append(what)


class SlowSleeper(Sleeper):
    """The same as coroutines; each waits until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.begun = 0
        self.cancelled = 0
        self.begins: Callable[[], object] = lambda: None

    async def sleep(self) -> None:  # type: ignore[override]
        await self._wait()
        super().sleep()

    async def wake(self) -> None:  # type: ignore[override]
        await self._wait()
        super().wake()

    async def _wait(self) -> None:
        self.begun += 1
        self.begins()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class Kept:
    """A Sleep, and the task that keeps it."""

    def __init__(self, *parts: object) -> None:
        self.admission = Admission(max_ongoing_requests=5)
        self.sleep = Sleep(parts, call_hook, self.admission)
        self.keeper = asyncio.ensure_future(self.sleep.keep())

    async def becomes(self, report: SleepState) -> None:
        await until(lambda: self.sleep.report() == report or self.keeper.done(), str(report))
        assert self.sleep.report() == report


@pytest_asyncio.fixture
async def slow() -> AsyncIterator[tuple[Kept, SlowSleeper]]:
    part = SlowSleeper()
    kept = Kept(part)
    yield kept, part
    kept.keeper.cancel()
    await asyncio.wait([kept.keeper])


class TestSleep:
    async def test_the_first_part_with_both_methods_is_asked(self) -> None:
        first, second = Sleeper(), Sleeper()
        kept = Kept(EchoService(), first, second)
        for text, report in ((WAKE, AWAKE), (SLEEP, ASLEEP), (SLEEP, ASLEEP), (WAKE, AWAKE), (WAKE, AWAKE)):
            kept.sleep.offer(text)
            await kept.becomes(report)
        assert (first.did, second.did) == (["sleep", "wake"], [])
        first.can_sleep = False
        assert kept.sleep.report() == SleepState(can=False, wanted=False, asleep=False)
        kept.keeper.cancel()

    async def test_one_whose_can_sleep_raises_cannot(self, caplog: pytest.LogCaptureFixture) -> None:
        class Odd(Sleeper):
            @property
            def can_sleep(self) -> bool:  # type: ignore[override]
                raise LookupError("no engine")

        sleep = Sleep([Odd()], call_hook, Admission(5))
        assert [sleep.report(), sleep.report()] == [SleepState(can=False, wanted=False, asleep=False)] * 2
        assert [record.getMessage() for record in caplog.records] == [
            "it cannot sleep: Odd.can_sleep raised LookupError: no engine"
        ]

    async def test_a_plain_method_does_not_hold_the_loop(self) -> None:
        class Blocking(Sleeper):
            def sleep(self) -> None:
                assert loop_moved.wait(PATIENCE_S)
                super().sleep()

        loop_moved, part = threading.Event(), Blocking()
        kept = Kept(part)
        kept.sleep.offer(SLEEP)
        asyncio.get_running_loop().call_later(0.01, loop_moved.set)
        await kept.becomes(ASLEEP)
        assert threading.get_ident() not in part.threads
        kept.keeper.cancel()

    async def test_from_the_wish_until_it_is_awake_it_admits_nothing(self, slow: tuple[Kept, SlowSleeper]) -> None:
        kept, part = slow
        admission, in_flight = kept.admission, list[int]()
        part.begins = lambda: in_flight.append(admission.ongoing)
        assert admission.enter() is None
        kept.sleep.offer(SLEEP)
        for enter in (admission.enter, admission.enter_while_draining):
            assert isinstance(enter(), Draining)
        asyncio.get_running_loop().call_later(0.01, admission.leave)
        await until(lambda: part.begun == 1, "it falls asleep")
        assert in_flight == [0], "only when nothing is in flight"
        kept.sleep.offer(WAKE)
        assert isinstance(admission.enter(), Draining), "it still falls asleep"
        part.go.set()
        await kept.becomes(AWAKE)
        assert part.did == ["sleep", "wake"]
        await until(lambda: not admission.asleep, "it admits requests")
        assert admission.enter() is None

    async def test_what_ends_does_not_fall_asleep(self, slow: tuple[Kept, SlowSleeper]) -> None:
        kept, part = slow
        assert kept.admission.enter() is None
        kept.sleep.offer(SLEEP)
        await asyncio.sleep(0)
        kept.admission.draining = True
        kept.admission.leave()
        kept.sleep.offer(WAKE)
        kept.sleep.offer(SLEEP)
        await until(lambda: not kept.sleep._news.is_set(), "it has seen the wish")
        assert part.begun == 0

    async def test_the_end_waits_for_a_plain_method(self) -> None:
        class Blocking(Sleeper):
            def sleep(self) -> None:
                assert ends.wait(PATIENCE_S)
                super().sleep()

        ends, part = threading.Event(), Blocking()
        kept = Kept(part)
        kept.sleep.offer(SLEEP)
        await until(lambda: kept.sleep._is_turning, "it falls asleep")
        kept.keeper.cancel()
        asyncio.get_running_loop().call_later(0.01, ends.set)
        await asyncio.wait([kept.keeper])
        assert part.did == ["sleep"]

    async def test_one_that_wakes_up_and_is_to_sleep_says_that_it_does_not_yet(
        self, slow: tuple[Kept, SlowSleeper]
    ) -> None:
        kept, part = slow
        part.go.set()
        kept.sleep.offer(SLEEP)
        await kept.becomes(ASLEEP)
        part.go.clear()
        kept.sleep.offer(WAKE)
        await until(lambda: part.begun == 2, "it wakes up")
        kept.sleep.offer(SLEEP)
        assert kept.sleep.report() == TURNING
        part.go.set()
        await kept.becomes(ASLEEP)
        assert part.did == ["sleep", "wake", "sleep"]

    async def test_it_reports_what_it_is_at(self, slow: tuple[Kept, SlowSleeper]) -> None:
        kept, part = slow
        kept.sleep.offer(SLEEP)
        await until(lambda: part.begun == 1, "it falls asleep")
        assert kept.sleep.report() == TURNING
        part.go.set()
        await kept.becomes(ASLEEP)

    @pytest.mark.parametrize(
        ("then", "did", "report"),
        [([WAKE], ["sleep", "wake"], AWAKE), ([WAKE, SLEEP], ["sleep"], ASLEEP)],
        ids=["it wakes up", "it sleeps"],
    )
    async def test_the_latest_wish_wins(
        self, slow: tuple[Kept, SlowSleeper], then: list[str], did: list[str], report: SleepState
    ) -> None:
        kept, part = slow
        kept.sleep.offer(SLEEP)
        await until(lambda: part.begun == 1, "it falls asleep")
        for text in then:
            kept.sleep.offer(text)
        assert part.did == [], "one after another"
        part.go.set()
        await until(lambda: part.did == did, "it has done what was wanted last")
        await kept.becomes(report)

    @pytest.mark.parametrize(
        ("problem", "words"),
        [
            (ValueError("no room\nin host memory"), "ValueError: no room in host memory"),
            (asyncio.CancelledError(), "RuntimeError: it was cancelled from within"),
        ],
        ids=["an error", "a cancellation of its own"],
    )
    async def test_an_error_is_reported_and_the_next_put_tries_again(self, problem: BaseException, words: str) -> None:
        part = Sleeper()
        kept, part.problem = Kept(part), problem
        kept.sleep.offer(SLEEP)
        await kept.becomes(SleepState(True, True, False, f"Sleeper.sleep raised {words}"))
        part.problem = None
        kept.sleep.offer(SLEEP)
        assert kept.sleep.report() == TURNING
        await kept.becomes(ASLEEP)
        part.problem = problem
        kept.sleep.offer(WAKE)
        await kept.becomes(SleepState(True, False, True, f"Sleeper.wake raised {words}"))
        kept.keeper.cancel()

    @pytest.mark.parametrize("text", ["[", "[]", "{}", '{"sleep": 1}', '{"sleep": true, "level": 2}'])
    async def test_what_is_no_wish_is_refused(self, text: str) -> None:
        sleep = Sleep([Sleeper()], call_hook, Admission(5))
        with pytest.raises(ValueError, match=r"[Ee]xpect"):
            sleep.offer(text)
        assert sleep.report() == AWAKE


async def put(server: ReplicaServer, text: str) -> tuple[int, Any]:
    url, headers = f"http://127.0.0.1:{server.admin_port}/sleep", {"Content-Type": "application/json"}
    async with ClientSession() as client, client.put(url, data=text, headers=headers) as answer:
        return answer.status, await answer.json()


class TestReplica:
    @pytest.mark.parametrize("separate", [False, True], ids=["loop", "thread"])
    async def test_it_stays_ready_while_its_part_sleeps(self, cluster: Cluster, separate: bool) -> None:
        part = SlowSleeper() if not separate else Sleeper()
        parts = (EchoService(), Checked(part))
        server = await cluster.start(*parts, run_user_code_in_separate_thread=separate, health_period_s=0.01)
        assert (await readyz(server))[1]["sleep"] == {"can": True, "wanted": False, "asleep": False, "error": ""}
        assert await put(server, SLEEP) == (
            200, {"sleep": {"can": True, "wanted": True, "asleep": False, "error": ""}},
        )  # fmt: skip
        if isinstance(part, SlowSleeper):
            assert (await readyz(server))[0] == 200
            part.go.set()
        await until(lambda: server.readiness().sleep == ASLEEP, "it sleeps")
        assert (await readyz(server))[0] == 200
        assert (await put(server, "[]"))[1]["error"].startswith('sleep: expected {"sleep": true}')
        await put(server, WAKE)
        await until(lambda: server.readiness().sleep == AWAKE, "it is awake")
        assert part.did == ["sleep", "wake"]
        assert (part.threads == {threading.get_ident()}) is not separate

    async def test_without_a_part_that_can_there_is_no_path(self, cluster: Cluster) -> None:
        server = await cluster.start(EchoService())
        assert (await readyz(server))[1]["sleep"] is None
        assert (await put(server, SLEEP))[0] == 404

    async def test_it_ends_while_its_part_falls_asleep(self, cluster: Cluster) -> None:
        part = SlowSleeper()
        server = await cluster.start(EchoService(), Checked(part))
        await put(server, SLEEP)
        await until(lambda: part.begun == 1, "it falls asleep")
        await asyncio.wait_for(cluster.drained(server), PATIENCE_S)
        assert (part.cancelled, part.did) == (1, [])


class Checked:
    """A part of a replica, of a sleeper."""

    def __init__(self, part: Sleeper) -> None:
        self.sleep, self.wake = part.sleep, part.wake

    async def check_health(self) -> None:
        """It is well."""


class Model(Service):
    """A service that can sleep."""

    async def sleep(self) -> None:
        """No method for callers."""

    async def wake(self) -> None:
        """The same."""

    async def score(self, user: int) -> float:
        return float(user)


class Napping(Service):
    """A service whose callers say `sleep`."""

    async def sleep(self, seconds: float) -> None:
        """A method as any other."""


@pytest.mark.parametrize(("service", "methods"), [(Model, ["score"]), (Napping, ["sleep"])])
def test_both_methods_together_are_not_for_callers(service: type[Service], methods: list[str]) -> None:
    assert list(service.__contract__.methods) == methods
