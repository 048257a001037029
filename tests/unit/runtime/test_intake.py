"""What a turn of the event loop takes up, and what waits for the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from aiohttp import ClientSession, web
from hypothesis import given
from hypothesis import strategies as st
from pierhead import Backpressure
from pierhead.http.intake import CALM_S, PER_TURN, Intake

from tests.unit.runtime.harness import Cluster


class World:
    """A clock, the turns of a loop, and connections that are read from."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due: list[Callable[[], None]] = []
        self.intake = Intake(lambda: self.now, self.due.append)
        self.taken: list[tuple[str, bytes]] = []

    def turn(self) -> int:
        """One turn; how much was taken up in it."""
        before, due = len(self.taken), self.due[:]
        self.due.clear()
        for callback in due:
            callback()
        return len(self.taken) - before


class Connection:
    def __init__(self, world: World, name: str) -> None:
        self.held = b""
        self.reading: list[str] = []
        self._world = world
        self._name = name

    def read(self, data: bytes) -> None:
        """As a connection of the server does when its socket was read."""
        if self._world.intake.left:
            self._world.intake.left -= 1
            self.receive(data)
        else:
            self._world.intake.hold(self, data)

    def receive(self, data: bytes) -> None:
        self._world.taken.append((self._name, data))

    def stop_reading(self) -> None:
        self.reading.append("stopped")

    def continue_reading(self) -> None:
        self.reading.append("continued")


def test_while_there_are_refusals_turns_are_short_and_in_order() -> None:
    world = World()
    world.intake.refused()
    for number in range(3 * PER_TURN + 5):
        Connection(world, str(number)).read(b"x")
    assert len(world.taken) == PER_TURN
    assert [world.turn() for _ in range(4)] == [PER_TURN, PER_TURN, 5, 0]
    assert [name for name, _ in world.taken] == [str(number) for number in range(3 * PER_TURN + 5)]
    world.now += CALM_S
    for number in range(PER_TURN + 1):
        Connection(world, str(number)).read(b"x")
    world.turn()
    taken = len(world.taken)
    for number in range(5000):
        Connection(world, str(number)).read(b"x")
    assert len(world.taken) == taken + 5000, "when it is calm, all is taken up at once"
    assert not world.due, "and the loop is not asked for a turn"


@given(
    st.lists(
        st.one_of(st.just("refused"), st.just("turn"), st.integers(0, 40), st.floats(0.1, 2.0)),
        min_size=1,
        max_size=300,
    )
)
def test_each_connection_gets_all_it_was_sent_in_order(steps: list[str | int | float]) -> None:
    world = World()
    connections = [Connection(world, str(number)) for number in range(41)]
    sent = [b""] * 41
    for number, step in enumerate(steps):
        if step == "refused":
            world.intake.refused()
        elif step == "turn":
            assert world.turn() <= PER_TURN
        elif isinstance(step, int):
            sent[step] += (piece := b"%d;" % number)
            waits = bool(connections[step].held)
            connections[step].read(piece)
            assert not waits or connections[step].reading[-1] == "stopped", "no more waits than is read at a time"
        elif isinstance(step, float):
            world.now += step
    while world.due:
        world.turn()
    for number, connection in enumerate(connections):
        assert b"".join(data for name, data in world.taken if name == str(number)) == sent[number]
        assert connection.reading[-1:] != ["stopped"]
        assert not connection.held


async def test_a_server_that_refuses_answers_every_client(cluster: Cluster) -> None:
    """Uploads in many pieces among them: what is held is put together again."""

    async def take(request: web.Request) -> web.Response:
        body = await request.read()
        if body == b"refuse":
            raise Backpressure("full")
        return web.Response(text=str(len(body)))

    app = web.Application()
    app.router.add_post("/", take)
    server = await cluster.start(app, service="echo", max_ongoing_requests=10_000)
    url = f"http://127.0.0.1:{server.http_port}/"

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x" * 10_000
            await asyncio.sleep(0)

    async def post(session: ClientSession, body: object) -> tuple[int, str]:
        async with session.post(url, data=body) as answer:
            return answer.status, await answer.text()

    async with ClientSession() as session:
        bodies = [pieces() if number % 10 == 0 else b"refuse" for number in range(300)]
        answers = await asyncio.gather(*[post(session, body) for body in bodies])
    assert [answer for answer in answers if answer[0] == 200] == [(200, "500000")] * 30
    assert sum(status == 503 for status, _ in answers) == 270
