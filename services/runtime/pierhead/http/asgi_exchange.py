"""The `receive` and `send` of the ASGI application for one request or WebSocket, in place of the server's own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from pierhead.deadlines import Deadline, Deadlines
from pierhead.edge.edge import Edge
from pierhead.errors import Draining, PayloadTooLarge, PierheadError
from pierhead.http.answers import Answer, error_answer
from pierhead.http.constants import CLIENT_LEFT, INTERNAL_ERROR, SERVICE_RESTART, TRY_AGAIN_LATER
from pierhead.http.visit import Visit
from pierhead.request import REQUEST_ID_KEY

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

LISTEN_AFTER_S = 0.01
"""How long a request runs before a task listens for its client's disconnect: most requests end before and need none."""

MAX_AHEAD = 64 * 1024
"""Bytes of a body that are read ahead of the application, to notice a disconnect behind them."""

STARLETTE_S_500 = b"Internal Server Error"
"""The body that Starlette sends for an exception before it re-raises it: held back, as our error response follows."""

_ID = REQUEST_ID_KEY.encode()


class Exchange:
    """A request or a WebSocket: the two callables for the application, and the state of the exchange."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, edge: Edge) -> None:
        self.visit: Visit
        self.status = ""
        """The response's status; empty while there is none."""
        self.gone = False
        self._scope = scope
        self._receive = receive
        self._send = send
        self._edge = edge

    def admit(self) -> None:
        """Raise an error if it is refused for reasons other than admission."""

    def begin(self, deadlines: Deadlines) -> None:
        """It was admitted."""

    async def receive(self) -> Message:
        """For the application."""
        raise NotImplementedError

    async def send(self, message: Message) -> None:
        """For the application."""
        raise NotImplementedError

    async def finish(self) -> None:
        """The application has returned."""

    @property
    def code(self) -> str:
        """The status for the metrics."""
        return self.status or CLIENT_LEFT

    def is_own(self, error: BaseException) -> bool:
        """Whether `error` is our own cancellation, because the client left; the exchange is then over."""
        return False

    async def send_error(self, error: PierheadError, request_id: str) -> bool:
        """Answer with an error; False if the response has begun already."""
        raise NotImplementedError

    def end(self) -> None:
        """It is over."""

    def _answer(self, error: PierheadError, request_id: str) -> Answer:
        return error_answer(error, request_id, self._edge.settings)

    def _stamped(self, message: Message) -> Message:
        return {**message, "headers": [*message.get("headers", ()), (_ID, self.visit.request_id.encode())]}


class DisconnectListener:
    """Reads the client's messages ahead of a working application, to notice that the client has left."""

    def __init__(self, receive: Receive, left: Callable[[], None]) -> None:
        """`left()` is called when the client has left."""
        self._receive = receive
        self._left = left
        self._inbox: deque[Message] = deque()
        self._ahead = 0
        self._changed = asyncio.Event()
        """Set when a message was put into the inbox, or taken."""
        self.task = asyncio.ensure_future(self._run())

    async def next(self) -> Message:
        """The next message for `receive`."""
        while not self._inbox:
            self._changed.clear()
            await self._changed.wait()
        message = self._inbox[0]
        if message["type"] != "http.disconnect":  # which may be received again
            self._inbox.popleft()
            self._ahead -= len(message.get("body", b""))
            self._changed.set()
        return message

    async def _run(self) -> None:
        while True:
            message = await self._receive()
            self._inbox.append(message)
            self._changed.set()
            if message["type"] == "http.disconnect":
                self._left()
                return
            self._ahead += len(message.get("body", b""))
            while self._ahead > MAX_AHEAD:
                self._changed.clear()
                await self._changed.wait()


class HttpExchange(Exchange):
    """A request. When its client leaves, the application is cancelled; while it is reading, it receives a message."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, edge: Edge) -> None:
        super().__init__(scope, self._from_client, send, edge)
        self._take = receive
        self._arrived = True
        self._bytes = 0
        self._taking = False
        self._held: list[Message] | None = None
        self._complete = False
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        self._reading = False
        self._listens = False
        self._listen: Deadline | None = None
        self._listener: DisconnectListener | None = None

    def begin(self, deadlines: Deadlines) -> None:
        """See Exchange."""
        self._task = asyncio.current_task()
        self._listen = deadlines.add(self.visit.started + LISTEN_AFTER_S, self._start_listening)
        length = _body_length(self._scope)
        if length != 0:
            self._arrived = False
            if length is not None and length > self._edge.settings.max_body_bytes:
                raise self._too_large()
            self.visit.expect_body(deadlines, lambda: self._arrived, lambda: self._taking)

    @property
    def code(self) -> str:
        """See Exchange."""
        return CLIENT_LEFT if self.gone and not self._complete else super().code

    def is_own(self, error: BaseException) -> bool:
        """See Exchange."""
        if self._cancelled and self._task is not None and isinstance(error, asyncio.CancelledError):
            self._task.uncancel()
            return True
        return False

    def end(self) -> None:
        """See Exchange."""
        if self._listen is not None:
            self._listen.cancel()
        if self._listener is not None:
            self._listener.task.cancel()

    # ---- from the client

    async def _from_client(self) -> Message:
        """The server's next message; counts the body."""
        self._taking = True
        try:
            message = await self._take()
        finally:
            self._taking = False
        if message["type"] == "http.request":
            self._arrived = not message.get("more_body", False)
            self._bytes += len(message.get("body", b""))
            if self._bytes > self._edge.settings.max_body_bytes:
                self.visit.fail(self._too_large())
                await asyncio.Event().wait()  # until the cancellation comes
        return message

    def _too_large(self) -> PayloadTooLarge:
        limit = self._edge.settings.max_body_bytes
        return PayloadTooLarge(
            f"the request body is larger than the {limit} bytes that this service takes; send less at a time"
        )

    async def receive(self) -> Message:
        """See Exchange."""
        self._reading = True
        try:
            message = await (self._receive() if self._listener is None else self._listener.next())
        finally:
            self._reading = False
        if message["type"] == "http.disconnect":
            self.gone = not self._complete
        elif self._listens and self._listener is None:
            self._start_listening()
        return message

    def _start_listening(self) -> None:
        """Called when the request takes long. Only one task may read at a time, or one would miss a piece."""
        self._listens = True
        if not self._reading:
            self._listener = DisconnectListener(self._receive, self._client_left)

    def _client_left(self) -> None:
        if not self._complete:
            self.gone = True
            if self._task is not None and not self._reading:
                self._cancelled = True
                self._task.cancel()

    # ---- to the client

    async def send(self, message: Message) -> None:
        """See Exchange."""
        kind = message["type"]
        if kind == "http.response.start":
            self.status = str(message["status"])
            message = self._stamped(message)
            if self._edge.admission.draining:
                message["headers"].append((b"connection", b"close"))
            # Until there is a body: a stream whose source fails before its first item has the status of the failure.
            self._held = [message]
            return
        if kind == "http.response.body":
            complete = not message.get("more_body", False)
            if self._held is not None and complete and self.status == "500" and message.get("body") == STARLETTE_S_500:
                self._held.append(message)
                return
            await self.finish()
            self._complete = complete
        else:
            await self.finish()
        self._edge.moved += 1
        await self._send(message)

    async def finish(self) -> None:
        """See Exchange."""
        held, self._held = self._held or (), None
        for message in held:
            await self._send(message)

    async def send_error(self, error: PierheadError, request_id: str) -> bool:
        """See Exchange."""
        if self.status and self._held is None:
            return False
        self._held = None
        answer = self._answer(error, request_id)
        self.status = str(answer.status)
        closes = self._edge.admission.draining or not self._arrived
        self._complete = True
        for message in answer.messages(*([(b"connection", b"close")] if closes else ())):
            await self._send(message)
        return True


def _body_length(scope: Scope) -> int | None:
    """The body's length by its head; None = it is chunked."""
    length: int | None = 0
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            return None
    return length


class SocketExchange(Exchange):
    """A WebSocket. When its client leaves, the application receives a message, as in ASGI."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, edge: Edge) -> None:
        super().__init__(scope, receive, send, edge)
        self._connected = False
        self._open = False
        self._restarted = False

    def admit(self) -> None:
        """See Exchange."""
        if self._edge.admission.draining:
            raise Draining("this replica is draining; connect again")

    async def receive(self) -> Message:
        """See Exchange."""
        message = await self._receive()
        if message["type"] == "websocket.connect":
            self._connected = True
        elif message["type"] == "websocket.disconnect":
            self._open, self.gone = False, True
        return message

    async def send(self, message: Message) -> None:
        """See Exchange."""
        if self._restarted:
            raise OSError("the connection is closed: the replica is draining")
        kind = message["type"]
        if kind == "websocket.accept":
            self.admit()  # a drain that has begun would not close this WebSocket
            message = self._stamped(message)
            self.visit.live_on()
            self.status, self._open = "101", True
        elif kind == "websocket.http.response.start":
            message = self._stamped(message)
            self.status = str(message["status"])
        elif kind == "websocket.close":
            self.status, self._open = self.status or "403", False
        self._edge.moved += 1
        await self._send(message)

    async def restart(self) -> None:
        """Close it, because the replica ends."""
        if self._open:
            self._open, self._restarted = False, True
            reason = "the replica is draining; connect again"
            await self._send({"type": "websocket.close", "code": SERVICE_RESTART, "reason": reason})

    async def send_error(self, error: PierheadError, request_id: str) -> bool:
        """See Exchange."""
        if self._open:
            self._open = False
            await self._send({"type": "websocket.close", "code": INTERNAL_ERROR, "reason": error.kind})
            return True
        if self.status:
            return False
        if not self._connected:
            await self.receive()
        answer = self._answer(error, request_id)
        self.status = str(answer.status)
        if "websocket.http.response" not in self._scope.get("extensions", {}):
            await self._send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": error.kind})
            return True
        for message in answer.messages(of="websocket.http.response"):
            await self._send(message)
        return True
