"""The seam `Runner`: what holds wherever the replicas of an application live, in this process or in processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from pierhead import NoReplica, close_handles
from pierhead.classes.handles import handle_to
from pierhead.runner.front import Front
from pierhead.runner.in_loop import LoopRunner
from pierhead.runner.processes import ProcessRunner, facts_of
from pierhead.runner.runner import NoApplication, Offer, ProcessFailed, Runner

from tests.contract import runner_application
from tests.contract.runner_application import FOLDER
from tests.unit.runtime.harness import until

TARGET = "tests.contract.runner_application:app"
KINDS = ("in this process", "in processes")
BOUND: Any = runner_application.app


class Place:
    """An application behind a front, and what its replicas have been told and did."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder = folder
        self.front = Front()
        self.offer: Offer | None = None
        self.runner = self._made(kind)
        self.http: ClientSession

    def _made(self, kind: str, **words: Any) -> Runner:
        if kind == KINDS[0]:
            return LoopRunner(BOUND, words, self.changed)
        services = {name: facts_of(each) for name, each in BOUND.graph().items()}
        return ProcessRunner(TARGET, services, words, self.changed)

    def changed(self, offer: Offer) -> None:
        self.offer = offer
        self.front.switch(offer.routes, offer.grpc_port)

    def names(self) -> set[str]:
        """The replicas that the front sends requests to."""
        assert self.offer is not None
        [route] = self.offer.routes
        return {each.name for each in route.listing.endpoints}

    def say(self, word: str) -> None:
        (self.folder / word).touch()

    def count(self, pattern: str) -> int:
        return len(list(self.folder.glob(pattern)))

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(path) as response:
            return response.status, await response.json()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


@pytest.fixture(params=KINDS)
async def place(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Place]:
    made = Place(request.param, folder)
    try:
        made.changed(await made.runner.start())
        port = await made.front.listen("127.0.0.1", 0)
        async with ClientSession(f"http://127.0.0.1:{port}") as made.http:
            yield made
    finally:
        made.say("go")
        await made.front.close()
        await made.runner.stop(at_once=True)
        await close_handles()


async def ids(place: Place, wanted: Callable[[set[str]], bool]) -> set[str]:
    """Those of the replicas that answer, once they are the wanted ones; every request has to be answered."""
    found: set[str] = set()

    async def asked() -> None:
        while not wanted(found):
            status, one = await place.get("/id")
            assert status == 200, one
            found.add(one)

    async with asyncio.timeout(30):
        await asked()
    return found


async def test_every_replica_gets_requests(place: Place) -> None:
    assert place.runner.ready() == {"door": 2, "worker": 2}
    assert len(await ids(place, lambda found: len(found) == 2)) == 2


async def test_requests_wait_in_a_bounded_queue(place: Place) -> None:
    asked = [asyncio.create_task(place.get("/wait")) for _ in range(5)]
    await until(lambda: place.count("waits-*") == 4, "both replicas are full")
    await until(lambda: place.front.waiting("door") == 1, "one request waits")
    status, body = await place.get("/wait")
    assert (status, body["error"]["code"]) == (503, "queue_full")
    place.say("go")
    answers = await asyncio.gather(*asked)
    assert [status for status, _ in answers] == [200] * 5
    assert len({one for _, one in answers}) == 2


async def test_calls_between_services_wait_in_the_same_kind_of_queue(place: Place) -> None:
    """Each replica of the door has a handle of its own, and one may get both workers: the other one queues both."""
    asked = [asyncio.create_task(place.get("/worker")) for _ in range(4)]
    await until(lambda: place.count("works-*") == 2, "both workers are full")
    place.say("go")
    answers = await asyncio.gather(*asked)
    assert [status for status, _ in answers] == [200] * 4
    assert len({one for _, one in answers}) == 2


async def test_a_replica_that_is_ill_is_replaced_and_no_request_fails(place: Place) -> None:
    before, offered = await ids(place, lambda found: len(found) == 2), place.names()
    _, ill = await place.get("/fall-ill")
    await until(lambda: len(place.names()) == 2 and place.names() != offered, "another one has its place")
    assert place.runner.ready() == {"door": 2, "worker": 2}
    after = await ids(place, lambda found: len(found) == 2)
    assert after & before == before - {ill}


async def test_a_replacement_that_does_not_start_is_tried_again(place: Place) -> None:
    place.say("broken")
    await place.get("/fall-ill")
    await until(lambda: place.runner.ready()["door"] == 1, "it gets no requests")
    assert len(await ids(place, lambda found: len(found) == 1)) == 1
    (place.folder / "broken").unlink()
    await until(lambda: place.runner.ready()["door"] == 2, "another one has its place")


async def test_requests_in_flight_end_before_their_callees_do(place: Place) -> None:
    asked = asyncio.create_task(place.get("/worker"))
    await until(lambda: place.count("works-*") == 1, "it is in flight")
    stopping = asyncio.create_task(place.runner.stop())
    place.say("go")
    assert (await asked)[0] == 200
    await stopping
    assert (place.folder / "closed").read_text() == "door\ndoor\nworker\nworker\n"
    assert place.runner.ready() == {"door": 0, "worker": 0}


async def test_an_end_at_once_cuts_off_what_drains(place: Place) -> None:
    asked = asyncio.create_task(place.get("/wait"))
    await until(lambda: place.count("waits-*") == 1, "it is in flight")
    stopping = asyncio.create_task(place.runner.stop())
    await place.runner.stop(at_once=True)
    await stopping
    outcome: Any
    [outcome] = await asyncio.gather(asked, return_exceptions=True)
    assert isinstance(outcome, BaseException) or outcome[0] >= 500, outcome


@pytest.mark.parametrize("kind", KINDS)
async def test_a_start_that_fails_leaves_nothing_behind(kind: str, folder: Path) -> None:
    place = Place(kind, folder)
    place.say("broken")
    with pytest.raises((RuntimeError, ProcessFailed)):
        await place.runner.start()
    assert place.runner.ready() == {"door": 0, "worker": 0}
    await close_handles()


async def test_a_service_that_does_not_start_may_leave_the_others(folder: Path) -> None:
    """As `serve.run` has it; calls of the service that did not start fail at once."""
    place = Place(KINDS[0], folder)
    assert isinstance(place.runner, LoopRunner)
    place.say("broken-door")
    place.say("door")
    try:
        failed = await place.runner.start_each()
        assert {name: str(why) for name, why in failed.items()} == {"door": "no hinges"}
        assert place.runner.ready() == {"door": 0, "worker": 2}
        with pytest.raises(NoReplica, match="it has ended, or did not start"):
            await handle_to(BOUND).hello()
    finally:
        await place.runner.stop(at_once=True)
        await close_handles()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_start_may_be_cancelled(kind: str, folder: Path) -> None:
    place = Place(kind, folder)
    starting = asyncio.create_task(place.runner.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert place.runner.ready() == {"door": 0, "worker": 0}
    await close_handles()


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_stack_could_serve_is_refused(kind: str, folder: Path) -> None:
    place = Place(kind, folder)
    with pytest.raises(NoApplication, match="door and worker have the same route, /"):
        place._made(kind, worker={"route": "/"})
