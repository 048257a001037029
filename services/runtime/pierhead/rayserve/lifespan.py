"""The start and the stop of an ASGI application, around the time in which it serves."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any


class Lifespan:
    """Runs the application's lifespan in a task of its own. An application without one is left alone."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._to_app: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._from_app: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._running: asyncio.Task[None] | None = None
        self.state: dict[str, Any] = {}

    async def start(self) -> None:
        """Start the application. Raises RuntimeError if it fails."""
        self._running = asyncio.create_task(self._run(), name="lifespan")
        answer = await self._ask("startup")
        if answer is not None and answer["type"] == "lifespan.startup.failed":
            raise RuntimeError(f"the ASGI application's start has failed: {answer.get('message', '')}")

    async def stop(self) -> None:
        """Stop it."""
        if self._running is not None and not self._running.done():
            await self._ask("shutdown")
            with suppress(Exception):
                await self._running

    async def _ask(self, word: str) -> MutableMapping[str, Any] | None:
        """The application's answer; None if it ends instead, as one without a lifespan does."""
        assert self._running is not None  # noqa: S101
        self._to_app.put_nowait({"type": f"lifespan.{word}"})
        answer = asyncio.create_task(self._from_app.get())
        await asyncio.wait([answer, self._running], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        answer.cancel()
        return None

    async def _run(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        with suppress(Exception):  # an application that does not know this kind of scope raises
            await self._app(scope, self._to_app.get, self._from_app.put)
