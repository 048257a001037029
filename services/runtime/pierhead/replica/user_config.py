"""Applies `x-serve.user_config`, which may change while a replica runs: passes it to `reconfigure(user_config)`.

    PIERHEAD_USER_CONFIG, at the start --.                              .-- raises: the former one stays in force,
    PUT /user-config, at every change  ---+--> wanted --> reconfigure --+   and this one is tried again
                                                                        +-- does not return: the same, once it is ready
                                                                        `-- returns: in force

At the start `{}` is in force, without a call of `reconfigure`. It is called whenever another config is wanted, also
when `{}` is wanted again. The controller compares digests of the texts to see which config is in force.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pierhead.raised import is_answerable
from pierhead.settings import NO_USER_CONFIG, read_user_config
from pierhead.tasks import is_set_within, retrieve

logger = logging.getLogger("pierhead")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Backoff before a refused config is tried again: a database may be back. Doubled each time."""

LIMIT_S = 300.0
"""How long one `reconfigure` of a replica that has been ready may take. At the start `startup.deadline_s` bounds it."""
END_S = 2.0
"""How long a cancelled `reconfigure` may take to end, before that is reported, too."""

LONGEST_ERROR = 400
"""Characters of an exception that are reported; the log has the whole text."""

Hook = Callable[..., Any]


class DidNotReturn(Exception):
    """A `reconfigure` that took too long. The message follows its name: "did not return within 300 s ..."."""


@dataclass(frozen=True, slots=True)
class ConfigReport:
    """The digests of a replica's wanted config and of the one in force."""

    wanted: str
    applied: str
    error: str = ""
    """Why the wanted config is not in force; "" if it is, or is being applied."""


@lru_cache(maxsize=16)
def digest(text: str) -> str:
    """Twelve hex digits that identify a config's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


async def call_hook(hook: Hook, *args: Any) -> None:
    """Call a part's method, which may be a coroutine function."""
    result = hook(*args)
    if inspect.isawaitable(result):
        await result


async def ended(call: asyncio.Future[None], limit_s: float | None = None) -> bool:
    """Wait for a hook's call; returns whether it has ended in time. Cancelled, it cancels the call and waits for it.

    Raises what the hook raises; RuntimeError for a CancelledError of its own.
    """
    try:
        await asyncio.wait([call], timeout=limit_s)
    except asyncio.CancelledError:
        call.cancel()
        await asyncio.wait([call])
        raise
    if call.cancelled():
        # Raised as CancelledError, it would end the calling task, and with it every later change.
        raise RuntimeError("it was cancelled from within")
    if call.done():
        call.result()
    return call.done()


def in_one_line(error: str) -> str:
    """Words of an error for a report."""
    words = error if len(error) <= LONGEST_ERROR else f"{error[:LONGEST_ERROR]}..."
    return " ".join(words.split())


class UserConfig:
    """The wanted config of one process, and the one in force. Only one task may run `settle`, then `keep`.

    `run(function, *args)` runs a coroutine function on the loop for user code, and returns when it has ended.
    """

    def __init__(self, parts: Iterable[object], text: str, run: Callable[..., Coroutine[Any, Any, None]]) -> None:
        """`text`: the config wanted at the start. Raises ValueError if it is invalid."""
        read_user_config(text)
        self._hooks: list[tuple[str, Hook]] = [
            (type(part).__name__, hook) for part in parts if callable(hook := getattr(part, "reconfigure", None))
        ]
        self._run = run
        self._wanted = text
        self._applied = NO_USER_CONFIG
        self._error = ""
        self._news = asyncio.Event()
        self._left_behind: asyncio.Future[None] | None = None
        """A cancelled call that has not ended: no other call is made before its end."""
        self._why_left = ""

    def offer(self, text: str) -> None:
        """Want this config from now on. Raises ValueError if it is invalid, and then changes nothing."""
        read_user_config(text)
        if text != self._wanted:
            self._wanted, self._error = text, ""
            self._news.set()

    def report(self) -> ConfigReport:
        """The current state."""
        return ConfigReport(digest(self._wanted), digest(self._applied), self._error)

    async def settle(self, limit_s: float | None = None, *, once: bool = False) -> None:
        """Return once the wanted config is in force. A refused config is tried again until another one is wanted; with
        `once` that raises RuntimeError in its place.

        `limit_s` bounds each call of a hook; a hook that does not return is cancelled, which counts as a refusal.
        """
        pause_s = FIRST_PAUSE_S
        while self._wanted != self._applied:
            self._news.clear()
            await self._apply(self._wanted, limit_s)
            if self._error and once:
                raise RuntimeError(f"x-serve.user_config is refused: {self._error}")
            if self._error and not await is_set_within(self._news, pause_s):
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            else:
                pause_s = FIRST_PAUSE_S

    async def keep(self) -> None:
        """Apply each newly wanted config, until cancelled; each hook may take LIMIT_S."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self.settle(LIMIT_S)

    async def _apply(self, text: str, limit_s: float | None) -> None:
        """Call every hook. When one refuses, the hooks before it get the former config again."""
        if self._left_behind is not None and not self._left_behind.done():
            self._note(text, self._why_left)
            return
        refused = f"x-serve.user_config {digest(text)} is not in force"
        if not self._hooks and text != NO_USER_CONFIG:
            self._note(text, "no part passed to serve() has a method `reconfigure(user_config)`")
            logger.error("%s: %s", refused, self._error)
            return
        for number, (name, hook) in enumerate(self._hooks):
            try:
                await self._call(hook, text, limit_s)
            except DidNotReturn as error:
                self._why_left = f"{name}.reconfigure {error}"
                self._note(text, self._why_left)
                logger.error("%s: %s", refused, self._error)  # noqa: TRY400 - nothing was raised
                await self._take_back(number, limit_s)
                return
            except BaseException as error:
                if not is_answerable(error):
                    raise
                self._note(text, f"{name}.reconfigure raised {type(error).__name__}: {error}")
                logger.exception("%s: %s.reconfigure raised", refused, name)
                await self._take_back(number, limit_s)
                return
        self._applied = text
        self._note(text, "")
        logger.info("x-serve.user_config %s is in force", digest(text))

    async def _call(self, hook: Hook, text: str, limit_s: float | None) -> None:
        """Call one hook with its own copy of the config, which it may change.

        Raises what the hook raises (RuntimeError for a CancelledError of its own), or DidNotReturn.
        """
        call = asyncio.ensure_future(self._run(call_hook, hook, json.loads(text)))
        if await ended(call, limit_s):
            return
        call.cancel()
        call.add_done_callback(retrieve)
        await asyncio.wait([call], timeout=END_S)
        if call.done():
            raise DidNotReturn(f"did not return within {limit_s:g} s and was cancelled")
        self._left_behind = call
        raise DidNotReturn(
            f"did not return within {limit_s:g} s, was cancelled and still runs: no user_config is tried before it ends"
        )

    async def _take_back(self, count: int, limit_s: float | None) -> None:
        if self._left_behind is not None and not self._left_behind.done():
            return  # a hook still runs: further calls would have to wait for it
        for name, hook in self._hooks[:count]:
            try:
                await self._call(hook, self._applied, limit_s)
            except BaseException as error:
                if not is_answerable(error):
                    raise
                logger.exception("%s.reconfigure raised for the former user_config, too", name)

    def _note(self, text: str, error: str) -> None:
        """Record why a config was refused, unless another one is wanted by now."""
        if text == self._wanted:
            self._error = in_one_line(error)
