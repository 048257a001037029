"""`user_config`: given before the replica is ready and at every change, in force or refused, never lost."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import hypothesis.strategies as st
import pytest
from aiohttp import ClientSession
from hypothesis import given
from pierhead.replica import user_config
from pierhead.replica.server import ReplicaServer
from pierhead.replica.user_config import ConfigReport, UserConfig, call_hook, digest
from pierhead.settings import MAX_USER_CONFIG_BYTES, NO_USER_CONFIG

from tests.harness.waiting import PATIENCE_S
from tests.unit.runtime.harness import Cluster, EchoService, readyz, until

A, B, BAD = '{"threshold":1}', '{"threshold":2}', '{"threshold":-1}'
REFUSED = "Tuned.reconfigure raised ValueError: threshold: expected a number above 0, found -1"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_config, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(user_config, "LONGEST_PAUSE_S", 0.002)


class Tuned:
    """A part that keeps what it was given."""

    def __init__(self) -> None:
        self.had: list[Any] = []
        self.ready_with: list[Any] = []
        self.tries = 0
        self.problem: BaseException | None = None
        self.threads: set[int] = set()

    def reconfigure(self, config: dict[str, Any]) -> None:
        self.tries += 1
        self.threads.add(threading.get_ident())
        if self.problem is not None:
            raise self.problem
        threshold = config.pop("threshold", None)  # it is its own, to do with as it likes
        if threshold == -1:
            raise ValueError("threshold: expected a number above 0,\nfound -1")
        self.had.append(threshold)

    async def check_health(self) -> None:
        self.ready_with = list(self.had)


class AsyncTuned(Tuned):
    """The same as a coroutine."""

    async def reconfigure(self, config: dict[str, Any]) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().reconfigure(config)


def configured(text: str, *parts: object) -> UserConfig:
    return UserConfig(parts, text, call_hook)


async def settled(config: UserConfig) -> ConfigReport:
    async with asyncio.timeout(PATIENCE_S):
        await config.settle()
    return config.report()


def in_force(text: str) -> ConfigReport:
    return ConfigReport(digest(text), digest(text))


class TestUserConfig:
    @pytest.mark.parametrize("kind", [Tuned, AsyncTuned])
    async def test_every_part_gets_every_change_and_a_copy_of_its_own(self, kind: type[Tuned]) -> None:
        parts = [kind(), kind()]
        config = configured(A, object(), *parts)
        assert config.report() == ConfigReport(digest(A), digest(NO_USER_CONFIG))
        assert await settled(config) == in_force(A)
        config.offer(B)
        config.offer(B)
        assert await settled(config) == in_force(B)
        config.offer(NO_USER_CONFIG)
        assert await settled(config) == in_force(NO_USER_CONFIG)
        assert [part.had for part in parts] == [[1, 2, None]] * 2

    async def test_one_that_is_refused_leaves_the_former_in_force_for_all(self) -> None:
        first, second = Tuned(), Tuned()
        config = configured(A, first, second)
        await settled(config)
        second.problem = ValueError("no")
        config.offer(B)
        task = asyncio.create_task(config.settle())
        await until(lambda: second.tries > 2, "it is tried again")
        assert config.report() == ConfigReport(digest(B), digest(A), "Tuned.reconfigure raised ValueError: no")
        assert first.had[:3] == [1, 2, 1], "the first has the former one again"
        second.problem = None
        await asyncio.wait_for(task, PATIENCE_S)
        assert config.report() == in_force(B)
        assert (first.had[-1], second.had[-1]) == (2, 2)

    async def test_another_one_ends_the_tries(self) -> None:
        part = Tuned()
        config = configured(BAD, part)
        task = asyncio.create_task(config.settle())
        await until(lambda: config.report().error == REFUSED, "it is refused, in one line")
        part.problem = ValueError("x" * 10_000)
        await until(lambda: 400 < len(config.report().error) < 500, "a long message is cut")
        part.problem = None
        config.offer(A)
        assert config.report().error == ""
        await asyncio.wait_for(task, PATIENCE_S)
        assert config.report() == in_force(A)

    async def test_a_cancelled_error_of_a_hook_is_a_refusal(self) -> None:
        """As from a call that was cancelled at its other end: the changes that follow must still be heard."""
        part = Tuned()
        config = configured(NO_USER_CONFIG, part)
        keeper = asyncio.create_task(config.keep())
        part.problem = asyncio.CancelledError()
        config.offer(A)
        await until(lambda: bool(config.report().error) or keeper.done(), "it is refused")
        told = "Tuned.reconfigure raised RuntimeError: it was cancelled from within"
        assert config.report() == ConfigReport(digest(A), digest(NO_USER_CONFIG), told)
        part.problem = None
        config.offer(B)
        await until(lambda: config.report() == in_force(B), "the next one is in force")
        keeper.cancel()

    async def test_without_a_hook_it_says_so(self) -> None:
        config = configured(A, EchoService())
        task = asyncio.create_task(config.settle())
        words = "no part passed to serve() has a method `reconfigure(user_config)`"
        await until(lambda: config.report().error == words, "it says what is missing")
        config.offer(NO_USER_CONFIG)
        await asyncio.wait_for(task, PATIENCE_S)

    @given(st.lists(st.tuples(st.sampled_from([A, B, BAD, NO_USER_CONFIG]), st.booleans()), min_size=1, max_size=12))
    def test_whatever_comes_the_last_good_one_is_in_force(self, offers: list[tuple[str, bool]]) -> None:
        """`True`: the config has time to be put in force before the next one comes."""

        async def live() -> None:
            part = AsyncTuned()
            config = configured(NO_USER_CONFIG, part)
            keeper = asyncio.create_task(config.keep())
            for text, waits in (*offers, (B, True), (A, True)):
                config.offer(text)
                for _ in range(200 if waits else 1):
                    await asyncio.sleep(0)
            report = config.report()
            assert report == in_force(A)
            assert part.had[-1] == 1
            keeper.cancel()

        asyncio.run(live())

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("[1]", "expected a JSON object, found a list"),
            ("nothing", "expected a JSON object, found something else: "),
            (
                '{"a": "' + "x" * MAX_USER_CONFIG_BYTES + '"}',
                f"expected at most {MAX_USER_CONFIG_BYTES} bytes, found {MAX_USER_CONFIG_BYTES + 9}",
            ),
            ("[" * 60_000, "expected a JSON object, found something else: "),
        ],
    )
    async def test_what_is_none_is_refused_and_changes_nothing(self, text: str, words: str) -> None:
        config = configured(A, Tuned())
        with pytest.raises(ValueError, match="expected") as refused:
            config.offer(text)
        assert str(refused.value).startswith(words)
        assert config.report().wanted == digest(A)


async def put(server: ReplicaServer, text: str) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{server.admin_port}/user-config"
    headers = {"Content-Type": "application/json"}
    async with ClientSession() as client, client.put(url, data=text, headers=headers) as answer:
        return answer.status, await answer.json()


class Slow(Tuned):
    """Its `reconfigure` runs until the test releases or cancels it."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.calls = 0
        self.cancelled = 0
        self.hears = True

    async def reconfigure(self, config: dict[str, Any]) -> None:  # type: ignore[override]
        self.calls += 1
        while not self.go.is_set():
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                if self.hears:
                    raise
        super().reconfigure(config)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_config, "LIMIT_S", 0.02)
    monkeypatch.setattr(user_config, "END_S", 0.02)


class TestOneThatDoesNotReturn:
    async def test_it_is_cancelled_reported_and_tried_again(self, brief: None) -> None:
        before, slow = Tuned(), Slow()
        config = configured(NO_USER_CONFIG, before, slow)
        keeper = asyncio.ensure_future(config.keep())
        config.offer(A)
        await until(lambda: slow.cancelled >= 2, "it is cancelled again")
        assert config.report() == ConfigReport(
            digest(A), digest(NO_USER_CONFIG), "Slow.reconfigure did not return within 0.02 s and was cancelled"
        )
        assert before.had[:2] == [1, None], "who had it before has the former one again"
        slow.go.set()
        await until(lambda: config.report() == in_force(A), "it is in force")
        assert (before.had[-1], slow.had) == (1, [1])
        keeper.cancel()
        await asyncio.wait([keeper])

    async def test_one_that_does_not_hear_is_left_alone_until_it_ends(self, brief: None) -> None:
        slow = Slow()
        slow.hears = False
        config = configured(NO_USER_CONFIG, slow)
        keeper = asyncio.ensure_future(config.keep())
        config.offer(A)
        await until(lambda: "still runs: no user_config is tried" in config.report().error, "it is reported")
        for text in (B, A, B):
            config.offer(text)
            await asyncio.sleep(0)
        slow.go.set()
        await until(lambda: config.report() == in_force(B), "the wanted one is in force")
        assert (slow.calls, slow.had) == (2, [1, 2]), "no other call ran with it, and what ended late is not in force"
        keeper.cancel()
        await asyncio.wait([keeper])

    async def test_at_the_start_it_has_its_time(self, brief: None) -> None:
        slow = Slow()
        config = configured(A, slow)
        starts = asyncio.ensure_future(config.settle())
        done, _ = await asyncio.wait([starts], timeout=0.1)
        assert (done, slow.calls, slow.cancelled) == (set(), 1, 0)
        slow.go.set()
        await starts
        assert config.report() == in_force(A)


class TestReplica:
    @pytest.mark.parametrize("separate", [False, True], ids=["loop", "thread"])
    async def test_it_has_its_config_before_its_check_and_takes_others(self, cluster: Cluster, separate: bool) -> None:
        part = Tuned()
        server = await cluster.start(EchoService(), part, user_config=A, run_user_code_in_separate_thread=separate)
        assert part.ready_with == [1]
        assert (await readyz(server))[1]["user_config"] == {"wanted": digest(A), "applied": digest(A), "error": ""}
        status, body = await put(server, B)
        assert (status, body["user_config"]["wanted"]) == (200, digest(B))
        await until(lambda: part.had == [1, 2], "it has the other one")
        assert (await readyz(server))[1]["user_config"]["applied"] == digest(B)
        assert await put(server, "[]") == (400, {"error": "user_config: expected a JSON object, found a list"})
        assert (part.threads == {threading.get_ident()}) is not separate

    async def test_one_that_is_refused_later_leaves_it_ready(self, cluster: Cluster) -> None:
        part = Tuned()
        server = await cluster.start(EchoService(), part, user_config=A)
        await put(server, BAD)
        await until(lambda: bool(server.readiness().user_config.error), "it is refused")  # type: ignore[union-attr]
        status, found = await readyz(server)
        assert (status, found["detail"]) == (200, "")
        assert found["user_config"] == {"wanted": digest(BAD), "applied": digest(A), "error": REFUSED}

    async def test_one_that_is_refused_at_the_start_keeps_it_from_being_ready(self, cluster: Cluster) -> None:
        part = Tuned()
        starting = asyncio.create_task(cluster.start(EchoService(), part, user_config=BAD))
        await until(lambda: part.tries > 1, "it is tried again, without a restart")
        (server,) = cluster.running
        status, found = await readyz(server)
        assert (status, found["state"], found["detail"]) == (503, "starting", REFUSED)
        await put(server, A)
        assert (await asyncio.wait_for(starting, PATIENCE_S)).state == "ready"
        assert part.ready_with == [1]
