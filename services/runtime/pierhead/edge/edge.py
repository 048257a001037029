"""The edge of a replica, shared by gRPC and HTTP: admission, metrics, and turning exceptions into answers."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Final, NamedTuple

import grpc

from pierhead.edge import logs
from pierhead.edge.admission import Admission
from pierhead.errors import DeadlineExceeded, Draining, PierheadError, RemoteError, SettingsError, UserCodeError
from pierhead.held import HELD, HeldModels
from pierhead.metrics import RuntimeMetrics
from pierhead.request import new_request_id
from pierhead.routing_stats import STATS, Published
from pierhead.settings import Settings
from pierhead.trace import RequestTrace
from pierhead.tracing.export import exporter
from pierhead.tracing.keeper import TraceKeeper
from pierhead.trailers import Trailers, from_status

UNMATCHED: Final = "unmatched"
"""Label of requests without a route."""

logger = logging.getLogger("pierhead")

_LOGGED_AS = "_pierhead_error_id"
"""The attribute of an exception that holds the id under which it was logged."""

REFUSAL_REASONS = ("overloaded", "draining")
"""The values of `pierhead-refused` and of the metric's label."""


class Reports(NamedTuple):
    """What a replica tells callers' policies with its replies."""

    held: HeldModels
    stats: Published
    name: str = ""
    """"" = the one that it was started with."""


def _first_known(exception: BaseException) -> BaseException:
    """The first error of a group that holds only errors of services, else the exception itself.

    Concurrent calls in a TaskGroup fail as a group, and the first failure cancels the others. A full service behind
    them is not a fault of the code that calls.
    """
    if isinstance(exception, BaseExceptionGroup):
        first: BaseException = exception
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if exception.split((PierheadError, grpc.aio.AioRpcError))[1] is None:
            return first
    return exception


class Edge:
    """Every request of a replica passes through this, in any protocol."""

    def __init__(self, settings: Settings, admission: Admission, metrics: RuntimeMetrics) -> None:
        self.settings = settings
        self.admission = admission
        self.metrics = metrics
        self.moved = 0
        """Count of stream messages sent; only used to see whether it changes."""
        self.lasting = 0
        """Those of the requests in flight that do not end by themselves but by a drain: WebSockets, endless streams."""
        self.drained: set[Callable[[], None]] = set()
        """Functions that end the endless streams at a drain."""
        self.reports = Reports(HELD, STATS)
        """This process's, unless the replica has its own."""
        self._log = logs.request_log()
        sampler = settings.traces
        self.keep_traces_in(None if sampler is None else TraceKeeper(settings, sampler, exporter(settings)))

    def keep_traces_in(self, traces: TraceKeeper | None) -> None:
        """Keep requests' traces there; None = requests have none."""
        self.traces = traces
        self.begin_trace = None if traces is None else traces.begin

    def refused(self, refusal: PierheadError) -> str:
        """Count a refusal; returns the reason for `pierhead-refused`."""
        reason = "draining" if isinstance(refusal, Draining) else "overloaded"
        self.metrics.refused.inc((reason,))
        return reason

    def finished(
        self, method: str, code: str, seconds: float, request_id: str, trace: RequestTrace | None = None
    ) -> None:
        """Count a request, log it and keep its trace, however it ended."""
        labels = (method, code)
        self.metrics.requests.inc(labels)
        self.metrics.request_duration.observe(labels, seconds)
        if self._log is not None:
            self._log(method, code, seconds, request_id)
        if trace is not None and self.traces is not None:
            self.traces.finished(trace, method, code, seconds, request_id)

    def error_for(self, exception: BaseException, method: str) -> PierheadError:
        """The error to answer with. An exception of user code is logged with an id, which the answer repeats.

        An exception that many requests share, because their batch failed, is logged once, with one id in all answers.
        """
        exception = _first_known(exception)
        if isinstance(exception, PierheadError):
            return exception
        if isinstance(exception, grpc.aio.AioRpcError):  # from a plain stub: convert it as a handle does
            trailers = Trailers(exception.trailing_metadata())
            return from_status(exception.code(), exception.details() or "", trailers)
        error_id = _logged(exception, method)
        summary = "".join(traceback.format_exception_only(exception)).strip().replace("\n", " ")
        return UserCodeError(
            f"{summary} [error id {error_id}]",
            error_id=error_id,
            traceback="".join(traceback.format_exception(exception)),
        )

    def public_error_for(self, exception: BaseException, method: str) -> PierheadError:
        """As `error_for`, for callers that may be outside the stack: over HTTP and plain gRPC.

        Error texts that were not written for callers (exceptions, settings, failures of foreign servers) may hold
        secrets: the caller receives only the id under which the log has the text. With PIERHEAD_DEBUG it receives the
        text.
        """
        error = self.error_for(exception, method)
        if self.settings.debug or not is_internal(error):
            return error
        return hidden(error, _first_known(exception), method)


def too_long(method: str, settings: Settings) -> DeadlineExceeded:
    """The error of a call that reached the service's own deadline."""
    return DeadlineExceeded(
        f"{method} was not done within {settings.request_timeout_s:g} s, the longest that this service works on a call "
        "(x-serve.request_timeout_s)"
    )


def hidden(error: PierheadError, exception: BaseException, method: str) -> UserCodeError:
    """What callers outside the stack get in place of an internal error: the id under which the log has it.

    Logs `exception`, of which the error was made, unless the error has an id already.
    """
    own = error.error_id if isinstance(error, UserCodeError) else ""
    error_id = own or _logged(exception, method)
    return UserCodeError(f"internal error [error id {error_id}]", error_id=error_id)


def is_internal(error: PierheadError) -> bool:
    """Whether an error's text was not written for callers outside the stack."""
    return isinstance(error, UserCodeError | SettingsError) or (
        isinstance(error, RemoteError) and error.http_status == UserCodeError.http_status
    )


def _logged(exception: BaseException, method: str) -> str:
    """Log an exception, once; returns the id that it was logged with."""
    error_id = vars(exception).get(_LOGGED_AS)
    if error_id is None:
        error_id = new_request_id()
        BaseException.__setattr__(exception, _LOGGED_AS, error_id)  # a frozen dataclass's own refuses
        logger.error("%s failed [error id %s]", method, error_id, exc_info=exception)
    return str(error_id)
