"""The engine's event stream."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ..errors import EngineError, EngineUnreachable
from .base import CONNECTED, EngineEvent
from .docker_errors import translated

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


@dataclass(eq=False)
class EventStream:
    """Reads the events of an engine at a Unix socket. `close` ends that, also while it waits for the next event."""

    _socket: Path
    _api_version: str
    _accept: Callable[[Mapping[str, Any]], EngineEvent | None]
    _followed: Callable[[bool], None] = lambda _: None
    """Called with True when a stream was opened (from then on no event is missed), and with False at its end."""
    _quiet_s: float = _QUIET_S
    _response: aiohttp.ClientResponse | None = None
    _is_closed: bool = False

    async def events(self) -> AsyncGenerator[EngineEvent, None]:
        """Yield CONNECTED each time a stream was opened, and the events that are accepted.

        Raises EngineUnreachable when a stream ends.
        """
        limits = aiohttp.ClientTimeout(sock_connect=_CONNECT_TIMEOUT_S, sock_read=self._quiet_s)
        connector = aiohttp.UnixConnector(str(self._socket))
        try:
            async with aiohttp.ClientSession("http://docker", connector=connector, timeout=limits) as session:
                with translated("event stream"):
                    while not self._is_closed:
                        async with contextlib.aclosing(self._read(session)) as events:
                            async for event in events:
                                yield event
        except EngineError:
            raise
        except Exception as error:  # whatever the engine says, the stream is opened again
            raise EngineUnreachable(f"event stream: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the stream, also one that is being opened."""
        self._is_closed = True
        if self._response is not None:
            self._response.close()

    async def _read(self, session: aiohttp.ClientSession) -> AsyncGenerator[EngineEvent, None]:
        """Read one stream until it ends, which is an error, or has been quiet for long."""
        query = {"filters": json.dumps(_WATCHED)}
        async with session.get(f"/v{self._api_version}/events", params=query) as self._response:
            self._response.raise_for_status()
            if self._is_closed:
                return
            self._followed(True)
            try:
                yield CONNECTED
                async for line in _lines(self._response.content):
                    event = self._accept(json.loads(line))
                    if event is not None:
                        yield event
                raise ConnectionError("the stream ended")
            except aiohttp.SocketTimeoutError:
                return
            finally:
                self._followed(False)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Complete lines as they arrive, of any length."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in filter(bytes.strip, lines):
            yield line
