"""The engine's event stream: a thread reads it and passes events through a bounded queue, which wakes the loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import requests
import urllib3.exceptions
from docker.types import CancellableStream

from .. import docker_http
from ..errors import EngineError, EngineUnreachable
from .base import CONNECTED, EngineEvent
from .docker_errors import translated

if TYPE_CHECKING:
    from docker import APIClient


_QUEUE_LIMIT = 256
_CONNECT_TIMEOUT_S = 5.0
_QUIET_S = 60.0
"""After this time without an event the stream is reopened, which detects a daemon that hangs."""

_WATCHED = {
    "type": ["container", "image"],
    # Not exec_*: each run of a health check by `docker exec` would wake the loop.
    "event": [
        *("create", "start", "restart", "die", "oom", "pause", "unpause", "rename", "destroy"),
        *("pull", "load", "import", "tag", "untag", "delete"),
    ],
}


class EventQueue:
    """Passes events, and the error at their end, from one thread to one coroutine. Above its limit the oldest are
    dropped: after any event the engine is read.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int = _QUEUE_LIMIT) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._events: deque[EngineEvent | EngineError] = deque(maxlen=limit)
        self._filled = asyncio.Event()
        self._woken = False

    def put(self, event: EngineEvent | EngineError) -> None:
        """Called by the thread; never blocks. After an error nothing follows."""
        with self._lock:
            self._events.append(event)
            # At most one wake-up is scheduled: callbacks do not pile up in a blocked loop.
            if not self._woken:
                self._woken = True
                with contextlib.suppress(RuntimeError):  # the loop is closed, so the consumer is gone
                    self._loop.call_soon_threadsafe(self._filled.set)

    async def get(self) -> EngineEvent:
        """The next event. Raises EngineUnreachable or EngineError when the stream has ended."""
        while True:
            with self._lock:
                if self._events:
                    event = self._events.popleft()
                    break
                self._woken = False
                self._filled.clear()
            await self._filled.wait()
        if isinstance(event, EngineError):
            raise event
        return event


@dataclass(eq=False)
class EventReader:
    """The thread. `close` ends it from any other thread, also while it waits for the next event."""

    _client: APIClient
    _queue: EventQueue
    _accept: Callable[[Mapping[str, Any]], EngineEvent | None]
    _followed: Callable[[bool], None] = lambda _: None
    """Called with True when a stream was opened (from then on no event is missed), and with False at its end."""
    _quiet_s: float = _QUIET_S

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._response: requests.Response | None = None
        threading.Thread(target=self._run, name="pierhead-events", daemon=True).start()

    def close(self) -> None:
        """Ask the thread to end; returns at once."""
        with self._lock:
            self._closed = True
            if self._response is not None:
                with contextlib.suppress(OSError, AttributeError):  # the stream has just ended
                    CancellableStream(iter(()), self._response).close()

    def _run(self) -> None:
        try:
            with translated("event stream"):
                while not self._closed:
                    self._follow()
        except EngineError as error:
            self._queue.put(error)
        except Exception as error:  # the consumer must not wait forever, whatever the error
            self._queue.put(EngineUnreachable(f"event stream: {type(error).__name__}: {error}"))

    def _follow(self) -> None:
        """Read one stream until it ends (an error unless closed) or has been quiet for long."""
        response = self._client.get(
            docker_http.url(self._client, "/events"),
            params={"filters": json.dumps(_WATCHED)},
            stream=True,
            timeout=(_CONNECT_TIMEOUT_S, self._quiet_s),
        )
        with response:
            response.raise_for_status()
            with self._lock:
                if self._closed:
                    return
                self._response = response
            self._followed(True)
            self._queue.put(CONNECTED)
            try:
                for line in _lines(response):
                    event = self._accept(json.loads(line))
                    if event is not None:
                        self._queue.put(event)
            except requests.ConnectionError as error:
                if not (error.args and isinstance(error.args[0], urllib3.exceptions.ReadTimeoutError)):
                    raise
                return
            finally:
                self._followed(False)
                with self._lock:
                    self._response = None
        if not self._closed:
            raise requests.ConnectionError("the stream ended")


def _lines(response: requests.Response) -> Iterator[bytes]:
    """Complete lines as they arrive; `iter_lines` would hold them back until its chunk is full."""
    rest = b""
    for chunk in response.iter_content(chunk_size=None):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from filter(bytes.strip, lines)
