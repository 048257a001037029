"""The control loop: wake -> look -> desire -> plan -> submit -> publish.

Level-based: after a wake (an engine event, a probe, an API call, an action that ended, a timer) it reads the world
again, for any reason of the wake. A tick does not wait for actions: they run outside it, and the next plan takes
into account which of them have not ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ..desired.desired import Desirer
from ..errors import ControllerError, EngineUnreachable
from ..files.watch import SpecWatch
from ..model.desired import Desired
from ..model.observed import Observed
from ..model.plan import Plan
from ..observe.snapshot import Observer
from ..status.publisher import Publisher
from .apply import Executor

LOOK_S = 1.0
"""Longest time between two looks at the world."""
SHORTEST_PAUSE_S = 0.01
"""Shortest time between two looks: an action that is due and keeps failing must not occupy a core."""
LOOK_LIMIT_S = 60.0
"""How long a command waits for a look; the engine's own limit is shorter."""
DEBOUNCE_S = 0.02
"""Wakes within this time cause one tick."""

Planner = Callable[[Desired, Observed, float], Plan]


class Wakeup:
    """Wakes the loop. Calls in quick succession wake it once."""

    def __init__(self, debounce_s: float = DEBOUNCE_S) -> None:
        self._debounce_s = debounce_s
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake the loop soon."""
        self._rung.set()

    async def wait(self, limit_s: float) -> None:
        """Return shortly after the first ring since the last return, or after `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._rung.wait()
        except TimeoutError:
            return
        await asyncio.sleep(self._debounce_s)
        self._rung.clear()


@dataclass(eq=False)
class Loop:
    """Ticks for as long as the controller runs. `clock` never jumps (controller/storage/clock.py)."""

    _specs: SpecWatch
    _observer: Observer
    _desirer: Desirer
    planner: Planner
    _executor: Executor
    _publisher: Publisher
    _wakeup: Wakeup
    _may_act: Callable[[], Awaitable[bool]]
    """Whether what was decided is stored, and no other controller acts."""
    _clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._plan = Plan()
        self._unseen = ""
        """Why the last look did not see the whole world; "" = it did."""
        self._waiting: list[asyncio.Future[str]] = []
        """Callers of `look_again`: each gets the `_unseen` of the first look that begins after its call."""

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await self._wakeup.wait(await self._guarded_tick())

    async def look_again(self) -> None:
        """Return when the loop has seen the whole world once more.

        Raises EngineUnreachable when it could not see it, ControllerError when it does not look.
        """
        looked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append(looked)
        self._observer.engine.changed()
        self._wakeup.ring()
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                unseen = await looked
        except TimeoutError:
            raise ControllerError(
                f"the controller has not read the stack's state for {LOOK_LIMIT_S:g} s; `pierhead status` says what it "
                "waits for"
            ) from None
        if unseen:
            raise EngineUnreachable(
                f"the current files and images could not be read, so nothing was changed: {unseen}; repeat it when "
                "`pierhead status` shows the current state again"
            )

    async def _guarded_tick(self) -> float:
        """Run one tick. A defect in it must not end the API and the probes."""
        started = self._clock()
        waiting, self._waiting = self._waiting, []
        try:
            pause_s = await self.tick(thorough=bool(waiting))
        except Exception as error:
            self._publisher.tick_failed(error, self._clock() - started)
            pause_s = LOOK_S
        else:
            self._publisher.tick_ended(self._clock() - started)
        for looked in waiting:
            if not looked.done():
                looked.set_result(self._publisher.defect or self._unseen)
        return pause_s

    async def tick(self, *, thorough: bool = False) -> float:
        """One tick; return after how many seconds the next is due at the latest. `thorough`: see Observer.look."""
        self._publisher.watch_store()
        spec, files = self._specs.current, self._specs.files
        if spec is None:
            self._unseen = "the compose files are not read yet"
            self._publisher.publish_without_spec(files)
            return LOOK_S
        snapshot = await self._observer.look(
            spec, self._executor.in_progress, impatient=bool(self._plan.pending), thorough=thorough
        )
        self._unseen = snapshot.unseen
        now, gate = self._clock(), self._executor.gate
        desired = self._desirer.desire(snapshot, self._plan, gate.refusals(), now)
        snapshot = snapshot.without(desired.barred)
        # A world that was not seen gives no reason to act.
        is_acting = snapshot.complete and await self._may_act()
        plan = self._plan = self.planner(desired, snapshot.observed, now) if is_acting else Plan()
        self._executor.submit(plan)
        self._observer.look_ahead(snapshot, plan, now)
        self._publisher.publish(desired, snapshot, plan, gate.refusals(), files, now)
        dues = (LOOK_S, plan.next_look_s, gate.next_opening_s(now), self._desirer.due_in_s(snapshot, now))
        return max(SHORTEST_PAUSE_S, min(due for due in dues if due is not None))
