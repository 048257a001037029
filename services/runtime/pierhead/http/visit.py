"""One HTTP request inside a replica, from its arrival to its end, under either HTTP server.

visit = Visit(headers.get, edge)
try:
    visit.begin(headers.get, deadlines)         # or the reason why not is raised
    ...the application...                       # cancelled at the deadline
except BaseException as error:
    ...answer visit.known(error, "GET /items/{id}")...
finally:
    visit.end("GET /items/{id}", "200")
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from pierhead.deadlines import LONGEST_S, Deadline, Deadlines
from pierhead.edge.edge import Edge
from pierhead.errors import BadRequest, BodyTimeout, DeadlineExceeded, PierheadError
from pierhead.http.constants import CLIENT_LEFT
from pierhead.memory import process
from pierhead.memory.scope import SCOPE
from pierhead.memory.sharing import Sharing, serving
from pierhead.raised import is_answerable
from pierhead.request import (
    CURRENT,
    MODEL_KEY,
    REQUEST_ID_KEY,
    SESSION_KEY,
    START_KEY,
    TIMEOUT_KEY,
    TRACEPARENT_KEY,
    RequestContext,
    accept_id,
    accept_opaque,
    traced,
)
from pierhead.trace import RequestTrace

_SEND = "send it faster, or less at a time"

ReadHeader = Callable[[str], str | None]
"""The value of a header, named in lower case; None when there is none."""


class Visit:
    """The state of one request: its context, its place, its deadlines."""

    __slots__ = (
        "_body",
        "_deadline",
        "_lasts",
        "_late",
        "_sharing",
        "_struck",
        "_task",
        "_trace",
        "_until",
        "asked_s",
        "edge",
        "ended",
        "entered",
        "outcome",
        "request_id",
        "socket",
        "started",
    )

    def __init__(self, read: ReadHeader, edge: Edge) -> None:
        self.edge = edge
        self.started = time.monotonic()
        self.request_id = accept_id(read(REQUEST_ID_KEY))
        self.asked_s: float | None = None
        """The timeout in seconds that the client has set."""
        self.outcome = ""
        """The status for the metrics, if it differs from the one in the response's head."""
        self.ended: Callable[[str], None] | None = None
        self.socket: object = None
        self.entered = False
        self._lasts = False
        self._late = False
        self._until = math.inf
        """Its deadline, in `time.monotonic()` seconds."""
        self._sharing: Sharing | None = None
        self._struck: PierheadError | None = None
        self._deadline: Deadline | None = None
        self._body: Deadline | None = None
        self._task: asyncio.Task[object] | None = None
        self._trace: RequestTrace | None = None

    def begin(self, read: ReadHeader, deadlines: Deadlines) -> None:
        """Admit the request, set its context for the code that runs for it, and start its deadline.

        Raises BadRequest for an invalid deadline, Backpressure when the replica is full.
        """
        edge = self.edge
        limit = edge.settings.request_timeout_s
        asked = read(TIMEOUT_KEY)
        if asked is not None:
            self.asked_s = seconds_asked(asked)
            # A client may only shorten the service's timeout.
            limit = min(limit, self.asked_s)
        session, model = read(SESSION_KEY), read(MODEL_KEY)
        if session is not None or model is not None:  # most requests have none of them
            session, model = accept_opaque(session), accept_opaque(model)
        until = self.started + limit
        refusal = edge.admission.enter_while_draining()
        if refusal is not None:
            CURRENT.set(RequestContext(self.request_id, until, None, session, model))
            edge.refused(refusal)
            raise refusal
        self.entered = True
        given, self._trace = traced(read(TRACEPARENT_KEY), edge.begin_trace, read(START_KEY))
        context = RequestContext(self.request_id, until, given, session, model, self._trace)
        CURRENT.set(context)  # servers run each request in a task, and so in a context, of its own
        if process.MEMORY is not None:
            self._sharing = serving(b"", many_in=False, many_out=False)
            SCOPE.set(self._sharing.scope)
        self._task = asyncio.current_task()
        self._until = context.deadline
        self._deadline = deadlines.add(context.deadline, self._strike)

    def _strike(self) -> None:
        self._late = True
        if self._task is not None:
            self._task.cancel()

    def fail(self, error: PierheadError) -> None:
        """Cancel the application; `error` is answered in its place."""
        if not self._late and self._task is not None:
            self._struck = error
            self._strike()

    def expect_body(self, deadlines: Deadlines, has_arrived: Callable[[], bool], is_read: Callable[[], bool]) -> None:
        """End the request with BodyTimeout when its body has not arrived in time.

        `is_read()`: whether the server reads from the client. It pauses when the application reads slowly; that is not
        the client's fault, and only the request's own deadline counts. A body that may take as long as the request has
        no bound of its own.
        """
        bound = self.edge.settings.body_timeout_s
        if bound >= self.edge.settings.request_timeout_s:
            return

        def look() -> None:
            if not has_arrived():
                if is_read():
                    self.fail(BodyTimeout(f"the request's body has not arrived within {bound:g} s; {_SEND}"))
                else:
                    self._body = deadlines.add(time.monotonic() + min(1.0, bound), look)

        self._body = deadlines.add(self.started + bound, look)

    def live_on(self) -> None:
        """The request has become a long-lived connection: only a deadline that the client has set ends it.

        Its calls then have timeouts of their own; the rest of the request's deadline would soon be used up. It still
        counts as in flight, but a drain ends it and does not wait for it.
        """
        if not self._lasts:
            self._lasts = True
            self.edge.lasting += 1
            if self._trace is not None:
                self._trace.lasts = True
        context = CURRENT.get()
        if context is None or self._deadline is None:
            return
        self._deadline.cancel()
        self._until = math.inf
        if self.asked_s is not None:
            self._until = self.started + self.asked_s
            self._deadline = Deadlines.current().add(self._until, self._strike)
        CURRENT.set(context._replace(deadline=self._until))

    def known(self, error: BaseException, what: str) -> PierheadError | None:
        """The error to answer with for an exception of `what`; None if the client no longer waits."""
        task = self._task
        # A client that leaves also cancels, and needs no answer.
        if self._late and isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() <= 1:
            task.uncancel()
            self._late = False
            context = CURRENT.get()
            limit = f"{context.deadline - self.started:g} s" if context is not None else "its time"
            late = self._struck or DeadlineExceeded(f"{what} was not done within {limit}")
            late.__cause__ = error
            error = late
        return self.edge.public_error_for(error, what) if is_answerable(error) else None

    def end(self, method: str, code: str) -> None:
        """Undo `begin`, even if it failed half-way, and count the request."""
        if self.entered:
            self.entered = False
            self.edge.admission.leave()
        if self._lasts:
            self._lasts = False
            self.edge.lasting -= 1
        if self._sharing is not None:
            self._sharing.end()
        if self._deadline is not None:
            self._deadline.cancel()
        if self._body is not None:
            self._body.cancel()
        if self._late and self._task is not None:
            self._task.uncancel()  # cancelled at the deadline, but the application answered nevertheless
        self._task = None
        code, now = self.outcome or code, time.monotonic()
        if code == CLIENT_LEFT and now >= self._until:
            # A replica that writes to the client has the same deadline, and may close the connection first.
            code = str(DeadlineExceeded.http_status)
        try:
            if self.ended is not None:
                self.ended(code)  # what it adds to the trace is kept
        finally:
            self.edge.finished(method, code, now - self.started, self.request_id, self._trace)


def seconds_asked(header: str) -> float:
    """Parse x-request-timeout-seconds. Raises BadRequest unless it is a number above 0."""
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise BadRequest(f'{TIMEOUT_KEY}: expected a number of seconds above 0, found "{header}"')
    return min(seconds, LONGEST_S)
