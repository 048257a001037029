"""A worker's place in its replica: the port that it shares, its line to the supervisor, its numbers on the board."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, MutableMapping

from pierhead.edge.admission import Admission
from pierhead.errors import PierheadError
from pierhead.replica.user_config import UserConfig
from pierhead.workers.board import Board, Numbers, WorkerState
from pierhead.workers.place import CONFIGURE, VARIABLE, Place

BEAT_S = 0.5
"""Between two signs of life."""


class Seat:
    """One worker's. Made by `take`; `attend` serves the supervisor for as long as the worker lives."""

    def __init__(self, index: int, port: int, board: Board, line: socket.socket) -> None:
        self.index = index
        self.port = port
        self._board = board
        self._line = line

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> Seat | None:
        """The place that a supervisor has given this process; None when it is no worker."""
        text = environ.pop(VARIABLE, "")
        if not text:
            return None
        place = Place.read(text)
        board = Board(place.board, place.workers)
        board.close()
        line = socket.socket(fileno=place.line)
        line.set_inheritable(False)
        return cls(place.seat, place.port, board, line)

    @property
    def name(self) -> str:
        """For people."""
        return f"worker {self.index + 1} of {self._board.workers}"

    def admission(self, max_ongoing_requests: int, name: str) -> Admission:
        """The replica's, as this worker sees it."""
        return SharedAdmission(max_ongoing_requests, name, self._board, self.index)

    def tell(self, state: WorkerState, detail: str = "") -> None:
        """Say how this worker is."""
        self._board.tell(self.index, state, detail)

    async def attend(
        self,
        expose: Callable[[], bytes],
        numbers: Callable[[], Numbers],
        config: UserConfig,
        supervisor_left: Callable[[], None],
    ) -> None:
        """Until cancelled: give signs of life, take user_configs, give metrics when they are asked for."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat(numbers, config), name="beat")
            tasks.create_task(self._answer(expose, config, supervisor_left), name="line")

    async def _beat(self, numbers: Callable[[], Numbers], config: UserConfig) -> None:
        while True:
            self._board.beat(self.index, time.monotonic())
            self._board.count(self.index, numbers())
            self._board.configure(self.index, config.report())
            await asyncio.sleep(BEAT_S)

    async def _answer(
        self, expose: Callable[[], bytes], config: UserConfig, supervisor_left: Callable[[], None]
    ) -> None:
        reader, writer = await asyncio.open_connection(sock=self._line)
        try:
            while asked := await reader.read(1):
                if asked == CONFIGURE:
                    size = int.from_bytes(await reader.readexactly(8), "big")
                    config.offer((await reader.readexactly(size)).decode())  # which the supervisor has read before
                    self._board.configure(self.index, config.report())
                    continue
                page = expose()
                writer.write(len(page).to_bytes(8, "big") + page)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # as at its end
        finally:
            writer.transport.abort()
        supervisor_left()


class SharedAdmission(Admission):
    """Admission by what all workers of the replica have in flight.

    A share of `max_ongoing_requests` for each would not do: the kernel hands out connections by chance, and a worker
    would refuse while others have room. Two that admit at the same moment may exceed the bound by one request each.
    """

    def __init__(self, max_ongoing_requests: int, name: str, board: Board, index: int) -> None:
        super().__init__(max_ongoing_requests, name)
        self._all = board.ongoing
        self._index = index

    def enter_while_draining(self) -> PierheadError | None:
        """See Admission."""
        ongoing = sum(self._all)
        if ongoing >= self.max_ongoing_requests:
            return self._full(ongoing)
        self.ongoing += 1
        self._all[self._index] = self.ongoing
        return None

    def leave(self) -> None:
        """See Admission."""
        super().leave()
        self._all[self._index] = self.ongoing
