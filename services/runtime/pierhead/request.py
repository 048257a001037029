"""The context of the current request: its id, its deadline, its trace. Every handle passes it on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import NamedTuple

from pierhead.trace import RequestTrace

REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"
START_KEY = "x-request-start"
"""When HAProxy had the request: `t=` and microseconds since 1970, as other proxies write it and servers read it."""
TIMEOUT_KEY = "x-request-timeout-seconds"
SESSION_KEY = "x-session-id"
MODEL_KEY = "x-multiplexed-model-id"

MAX_ID_LENGTH = 128
"""Characters of a request id, a session id, a model id or a trace context (of which version 00 has 55)."""


class RequestContext(NamedTuple):
    """One request's context, as user code sees it."""

    request_id: str
    deadline: float
    """`time.monotonic()` at which the caller stops waiting."""
    given_traceparent: str | None = None
    """What the caller sent as `traceparent`, if it can be passed on. It may be no valid W3C trace context."""
    session_id: str | None = None
    """Names the user or conversation; for policies that keep a session at one replica."""
    model_id: str | None = None
    """The model that the request is for, in a multiplexed service."""
    trace: RequestTrace | None = None
    """What this process does for it, for its trace; None where traces are off."""

    @property
    def traceparent(self) -> str | None:
        """W3C trace context, for what is called outside the stack: of the request's own span, where its caller sent one
        or it is in the sample. Where traces are off, the caller's.
        """
        given, trace = self.given_traceparent, self.trace
        if trace is None:
            return given
        return trace.traceparent() if given is not None or trace.sampled else None

    def remaining_s(self) -> float:
        """Seconds until the deadline; never negative."""
        return max(0.0, self.deadline - time.monotonic())


class InsideRequest(RequestContext):
    """The context of a request that came over a lane, from a service of the stack. Any other may be anybody's."""

    __slots__ = ()


CURRENT: ContextVar[RequestContext | None] = ContextVar("pierhead_request", default=None)


def current_request() -> RequestContext | None:
    """The request that the running code works on; None outside of requests (start-up, background work)."""
    return CURRENT.get()


def set_model_id(model_id: str | None) -> None:
    """Set the model of the current request's own calls, in place of the one in its client's header.

    Without a request this does nothing. Raises ValueError for an id that a header cannot hold.
    """
    if model_id is not None and accept_opaque(model_id) is None:
        raise ValueError(
            f"model_id: expected up to {MAX_ID_LENGTH} printable ASCII characters, found {model_id[:200]!r}"
        )
    context = CURRENT.get()
    if context is not None:
        CURRENT.set(context._replace(model_id=model_id))


def new_request_id() -> str:
    """Sixteen hex digits. Unique enough to find log lines by; not a secret."""
    return f"{random.getrandbits(64):016x}"


def accept_id(value: str | None) -> str:
    """The caller's request id where it can stand in a header and a log line, else a new one."""
    return value if value and _can_travel(value) else new_request_id()


def accept_opaque(value: str | None) -> str | None:
    """A trace context, session or model id of the caller if metadata can hold it, else None: gRPC would refuse it."""
    return value if value and _can_travel(value) else None


def _can_travel(value: str) -> bool:
    return len(value) <= MAX_ID_LENGTH and value.isascii() and value.isprintable()


def from_metadata(
    metadata: Iterable[tuple[str, str | bytes]],
    deadline: float,
    begin: BeginTrace | None,
    kind: type[RequestContext] = RequestContext,
) -> RequestContext:
    """The request of a gRPC call."""
    found: dict[str, str] = {key: value for key, value in metadata if key in _KEYS and isinstance(value, str)}
    given, trace = traced(found.get(TRACEPARENT_KEY), begin, found.get(START_KEY))
    return kind(
        accept_id(found.get(REQUEST_ID_KEY)),
        deadline,
        given,
        accept_opaque(found.get(SESSION_KEY)),
        accept_opaque(found.get(MODEL_KEY)),
        trace,
    )


def traced(
    traceparent: str | None, begin: BeginTrace | None, start: str | None = None
) -> tuple[str | None, RequestTrace | None]:
    """A request's trace context if it can be passed on, and its trace. `begin`: None = it has none; `start`: by
    START_KEY.
    """
    given = accept_opaque(traceparent)
    if begin is None:
        return given, None
    trace = begin(given)
    if start is not None:
        trace.start = start
    return given, trace


BeginTrace = Callable[[str | None], RequestTrace]
"""Begins the trace of a request that came with this W3C trace context."""

_KEYS = frozenset((REQUEST_ID_KEY, TRACEPARENT_KEY, START_KEY, SESSION_KEY, MODEL_KEY))
