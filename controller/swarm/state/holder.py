"""Holds the lease of a state document: takes it, renews it, writes the state with it, and gives it back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable

from pierhead.tasks import is_set_within

from ...errors import AnotherController, NewerState, StateChanged, StateTooLarge, StoreError
from ...storage.clock import SteadyClock
from .configs import Head, SwarmDocument
from .lease import HOLDER, LOOK_S, NOBODY, RENEW_S, UNKNOWN, Claim, StateLease
from .state_document import StateDocument

logger = logging.getLogger(__name__)

CLOCK = "pierhead.clock"
"""Label of the head: the controller's clock when the lease was renewed."""
AGAIN_S = 0.05
"""After a write that another one preceded."""
RELEASE_TRIES = 3


def boot_time() -> float:
    """Seconds since the machine started, including those in which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def prepare(document: SwarmDocument) -> None:
    """Create the state of a project that is new, so that its first controller takes the lease at once."""
    with contextlib.suppress(StateChanged):
        await document.create(Claim(NOBODY, 0, 0).labels())


class StateHolder:
    """One controller's hold on the state. `clock` measures the lease; it is compared with no other machine's."""

    def __init__(
        self,
        document: SwarmDocument,
        *,
        clock: Callable[[], float] = boot_time,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._document = document
        self._lease = StateLease(f"{socket.gethostname()}/{secrets.token_hex(4)}")
        self._clock = clock
        self._wall, self._monotonic = wall, monotonic
        self._wake = asyncio.Event()
        self._is_loaded = False
        self._may_have_left = True
        """Contents that no head names: of a controller that was killed, or of a call without an answer."""
        self._told = ""
        self.rows = StateDocument(document.limit, self._wake.set)
        self.controller_clock = SteadyClock(0.0, wall, monotonic)
        """Continues from the clock of the last controller, so that deadlines in the state come late and never early
        where the clocks of two machines differ."""

    @property
    def epoch(self) -> int:
        """The epoch of this controller's lease; greater than those of all controllers before."""
        return self._lease.epoch

    def acts(self) -> bool:
        """Whether this controller may act now."""
        return self._is_loaded and self._lease.acts(self._clock())

    async def take(self, stop: asyncio.Event) -> bool:
        """Return True when this controller has the lease and has read the state; False if `stop` is set before.

        Raises NewerState, and lets the newer build have the lease.
        """
        while not stop.is_set():
            try:
                pause_s = await self._try_step()
            except NewerState:
                with contextlib.suppress(StoreError):
                    await self.release()
                raise
            if self.acts():
                return True
            await self._pause(pause_s)
        return False

    async def run(self) -> None:
        """Renew the lease and write the state forever. Raises AnotherController when the lease is lost."""
        while True:
            await self._pause(await self._try_step())

    async def release(self) -> None:
        """Stop acting, write what is left, and let the next controller take the lease at once."""
        acted = self._lease.acts(self._clock())
        self._lease.give_up()
        for _ in range(RELEASE_TRIES if acted else 0):
            with contextlib.suppress(StateChanged):  # by a renewal whose answer was not waited for
                await self._give_back()
                return

    async def _give_back(self) -> None:
        head = await self._document.head()
        found = Claim.of(head.labels if head else {})
        if head is not None and found.holder == self._lease.me:
            draft = self.rows.draft(math.inf)
            labels = self._labels(Claim(NOBODY, found.epoch, found.beat + 1), head)
            await self._document.replace(head, labels, draft.content if draft else None)

    async def _pause(self, seconds: float) -> None:
        """Wait; a change that was asked for ends the wait when its write is due."""
        if await is_set_within(self._wake, seconds):
            self._wake.clear()
            await asyncio.sleep(min(seconds, self.rows.due_in_s(self._clock())))

    async def _try_step(self) -> float:
        """Look at the lease, and renew or take it. Return seconds until the next look."""
        began = self._clock()
        try:
            is_ours = await self._step()
        except StateChanged:
            return AGAIN_S
        except StoreError as error:
            self._may_have_left = True
            self._tell(str(error))
            self.rows.went(str(error))
            return LOOK_S
        if not is_ours:  # nothing can be written, however long it has been due
            return LOOK_S
        if self.rows.trouble:  # a state that is too large: the lease is renewed without it
            return RENEW_S
        return max(0.0, min(began + RENEW_S - self._clock(), self.rows.due_in_s(self._clock())))

    async def _step(self) -> bool:
        """Return whether the head has this controller's claim now."""
        head = await self._head()
        claim = self._lease.next_claim(Claim.of(head.labels), head.version, self._clock())
        if self._lease.state(self._clock()) == "lost":
            raise AnotherController(
                f"another controller ({head.labels.get(HOLDER)}) has taken over the state of this project in "
                "Swarm, because this one did not renew its lease; this one ends, and Swarm starts it again"
            )
        if claim is None:
            self._tell(f"waiting for the controller that holds the lease ({head.labels.get(HOLDER)})", logging.INFO)
            return False
        trouble, draft = "", None
        try:
            draft = self.rows.draft(self._clock()) if self._is_loaded else None
        except StateTooLarge as error:
            trouble = str(error)
        sent_at = self._clock()
        await self._document.replace(head, self._labels(claim, head), draft.content if draft else None)
        self._lease.written(claim, sent_at)
        if draft is not None:
            self.rows.written(draft, self._clock())
        if not self._is_loaded:
            await self._load(head)
        elif self._may_have_left:
            await self._document.sweep(head)
            self._may_have_left = False
        self.rows.went(trouble)
        return True

    async def _head(self) -> Head:
        head = await self._document.head()
        if head is None and self.epoch:
            self._lease.give_up()
            raise AnotherController("the state of this project was removed from Swarm's configs; this controller ends")
        if head is None:
            await self._document.create(Claim(UNKNOWN, 0, 0).labels())
            raise StateChanged("created the head")
        return head

    async def _load(self, head: Head) -> None:
        """Read the state that the last controller left."""
        content = await self._document.content(head)
        if content is not None:
            try:
                self.rows.load(content)
            except ValueError:
                self.rows.set_aside = f"config {await self._document.set_aside(content)}"
        elif head.content:
            self.rows.set_aside = "nowhere (it was removed)"
        left_at = _number(head.labels.get(CLOCK, ""))
        if left_at is not None:
            self.controller_clock = SteadyClock(0.0, lambda: left_at, self._monotonic)
        self._is_loaded = True

    def _labels(self, claim: Claim, head: Head) -> dict[str, str]:
        at = f"{self.controller_clock():.3f}" if self._is_loaded else head.labels.get(CLOCK, "")
        return {**claim.labels(), CLOCK: at}

    def _tell(self, words: str, level: int = logging.WARNING) -> None:
        if words != self._told:
            logger.log(level, "%s", words)
        self._told = words


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@contextlib.asynccontextmanager
async def state_lease(holder: StateHolder) -> AsyncIterator[None]:
    """Renew the lease while the body runs, then give it back. The body is cancelled when the lease is lost.

    Raises AnotherController then, in place of the body's CancelledError.
    """
    try:
        async with asyncio.TaskGroup() as group:
            renewal = group.create_task(holder.run())
            try:
                yield
            finally:
                renewal.cancel()
    except BaseExceptionGroup as errors:  # the body's own, or that of the renewal
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    finally:
        with contextlib.suppress(StoreError):  # without it the next controller waits some seconds longer
            await holder.release()
