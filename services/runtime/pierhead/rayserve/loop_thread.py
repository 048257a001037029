"""The event loop of this process's applications, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from pierhead.calls.clients import Clients, close_handles
from pierhead.deadlines import LONGEST_S
from pierhead.settings import Settings

T = TypeVar("T")


class LoopThread:
    """The event loop of this process's applications, in a daemon thread. Calls there have no deadline by default."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="pierhead-rayserve", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """What a coroutine returns or raises on the loop, or TimeoutError. Not to be called on the loop itself."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("`serve.run`, `serve.shutdown` and the like cannot be called from within a deployment")
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self) -> None:
        """End the loop and its tasks."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(5)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(Clients.use, Settings(request_timeout_s=LONGEST_S, max_queued_requests=-1))
        try:
            self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left, timeout=2))
            self.loop.run_until_complete(close_handles())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
