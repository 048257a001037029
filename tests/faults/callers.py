"""Callers through a handle, in the test's own loop: each makes its next call when the last one has ended."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from pierhead import Settings, close_handles
from pierhead.calls.channel import HandleChannel
from pierhead.calls.clients import Clients
from pierhead.echo.v1.echo_pb2 import EchoRequest, GenerateRequest
from pierhead.echo.v1.echo_pb2_grpc import EchoStub
from pierhead.errors import PierheadError
from pierhead.metrics import RuntimeMetrics

from tests.faults.processes import Running
from tests.unit.runtime.harness import until

TOKENS = 10
"""Messages of each call that is a stream."""


@dataclass(frozen=True)
class Made:
    """One call, from its making to its end. Times are `time.monotonic()`."""

    began: float
    ended: float
    replica: str
    """Who has answered; "" when the call failed."""
    error: PierheadError | None = None


@dataclass
class Callers:
    """`async with Callers(replicas, transport) as callers:` calls until the block ends."""

    replicas: Sequence[Running]
    transport: str
    count: int = 32
    """Of callers; every other one reads streams."""
    work_ms: int = 5
    timeout_s: float = 20.0
    made: list[Made] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        Clients.use(Settings(static={"WORKER": tuple(replica.address for replica in self.replicas)}))
        self.channel = HandleChannel(
            "worker", transport=self.transport, timeout_s=self.timeout_s, metrics=RuntimeMetrics()
        )
        self.stub: Any = EchoStub(self.channel)
        self._stopped = False
        self._tasks = [asyncio.create_task(self._call(n % 2 == 1), name=f"caller {n}") for n in range(self.count)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        done, late = await asyncio.wait(self._tasks, timeout=self.timeout_s + 5) if self._tasks else ((), ())
        for task in late:
            task.cancel()
        await close_handles()
        assert not late, f"{len(late)} calls did not end"
        for task in done:
            task.result()

    async def _call(self, streaming: bool) -> None:
        one = self._stream if streaming else self.one
        while not self._stopped:
            began = time.monotonic()
            try:
                replica = await one()
            except PierheadError as error:
                self.made.append(Made(began, time.monotonic(), "", error))
                await asyncio.sleep(0.01)  # what fails at once must not become a busy loop
            else:
                self.made.append(Made(began, time.monotonic(), replica))

    async def one(self, work_ms: int | None = None) -> str:
        """Make one call; who has answered. Raises a PierheadError."""
        request = EchoRequest(message=str(self.work_ms if work_ms is None else work_ms))
        return str((await self.stub.Echo(request)).response)

    async def _stream(self) -> str:
        tokens = [t async for t in self.stub.Generate(GenerateRequest(message=str(self.work_ms), num_tokens=TOKENS))]
        assert [token.index for token in tokens] == list(range(TOKENS)), "a stream with a hole"
        return str(tokens[0].text)

    async def go_well(self, count: int) -> None:
        """Wait until `count` calls that begin from now on have ended well."""
        since = time.monotonic()
        await until(
            lambda: sum(made.began >= since and made.error is None for made in self.made) >= count,
            f"{count} calls go well; failed: {self.errors()}",
            60,
        )

    # ---- what is so now

    def at(self, replica: Running) -> int:
        """Calls that are at the replica, as far as this side knows."""
        return int(self._known(replica).inflight)

    def is_connected(self, replica: Running) -> bool:
        return bool(self._known(replica).connection.ready)

    def _known(self, replica: Running) -> Any:
        return next(known for known in self.channel.pool().replicas() if known.address == replica.address)

    def answered_by(self, replica: Running, since: float) -> int:
        """Calls begun after `since` that the replica has answered."""
        return sum(made.replica == replica.name and made.began >= since for made in self.made)

    @property
    def failed(self) -> list[Made]:
        return [made for made in self.made if made.error is not None]

    def errors(self) -> dict[str, int]:
        """What failed, and how often; for messages."""
        return dict(collections.Counter(f"{type(m.error).__name__}: {m.error}" for m in self.failed))
