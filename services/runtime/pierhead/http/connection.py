"""One client's connection: aiohttp's, but that it takes in no more than it can refuse, and writes short answers fast.

What is used of aiohttp beyond its interface is known for the versions in `KNOWN`. With any other one a connection does
everything as aiohttp has it, which is slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

if TYPE_CHECKING:
    from pierhead.http.gate import Gate, Request


class Connection(web.RequestHandler):
    """One connection of an `AiohttpListener`."""

    __slots__ = ("_gate", "_intake", "_short", "held")

    def __init__(self, server: web.Server, gate: Gate, **options: Any) -> None:
        super().__init__(server, **options)
        self._gate = gate
        self._intake = gate.intake
        self._short = gate.short
        self.held = b""

    def data_received(self, data: bytes) -> None:
        """Called with what was read from the socket."""
        intake = self._intake
        if intake.left:
            intake.left -= 1
            super().data_received(data)
        elif data:
            intake.hold(self, data)
        else:  # aiohttp itself, to have its parser go on with what it has
            super().data_received(data)

    def receive(self, data: bytes) -> None:
        """What was held is taken up."""
        super().data_received(data)

    def stop_reading(self) -> None:
        """See intake.Connection; aiohttp may have stopped it for reasons of its own."""
        if self.transport is not None:
            self.transport.pause_reading()

    def go_on_reading(self) -> None:
        """See intake.Connection."""
        if self.transport is not None and not (self._reading_paused or self._buffer_paused):
            self.transport.resume_reading()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write what the gate has answered. Returns the response, and whether the client had left."""
        if (
            resp.__class__ is web.Response
            and not (self._upgraded or self._paused or request._post)
            and (visit := cast("Request", request).visit) is not None
            and self._short is not None
            and self._short.write(cast("Request", request), resp, visit.request_id)
        ):
            return resp, False
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What aiohttp asks for when bytes were no request, or when the gate has let an exception through."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client has left, or was cut off: there is nobody to answer
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        return self._gate.malformed(message or str(exc))
