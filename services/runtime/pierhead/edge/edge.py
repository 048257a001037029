"""What the gRPC and the HTTP side of a replica share: admission, metrics, and turning exceptions into answers."""

from __future__ import annotations

import asyncio
import logging
import traceback
from typing import Final

import grpc

from pierhead.edge import logs
from pierhead.edge.admission import Admission
from pierhead.errors import DeadlineExceeded, Draining, PierheadError, RemoteError, SettingsError, UserCodeError
from pierhead.metrics import RuntimeMetrics
from pierhead.request import current_request, new_request_id
from pierhead.settings import Settings
from pierhead.trailers import Trailers, from_status

UNMATCHED: Final = "unmatched"
"""Label of requests that no route is for."""

logger = logging.getLogger("pierhead")

_LOGGED_AS = "_pierhead_error_id"
"""The attribute of an exception that holds the id under which it was logged."""

REFUSAL_REASONS = ("overloaded", "draining")
"""What `pierhead-refused` and the metric's label may say."""


def is_answerable(error: BaseException) -> bool:
    """Whether a client waits for the answer to `error`: not when the request's task is being cancelled.

    A CancelledError without a cancellation comes from a future of the service's own; without an answer the caller would
    wait in vain until its deadline.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and not task.cancelling()
    return isinstance(error, Exception)


def _first_known(exception: BaseException) -> BaseException:
    """What stands for a group that holds nothing but errors of services: the first of them, which has ended the others.

    Calls side by side in a TaskGroup fail as a group; a full service behind them is no failure of the code that asks.
    """
    if isinstance(exception, BaseExceptionGroup):
        first: BaseException = exception
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if exception.split((PierheadError, grpc.aio.AioRpcError))[1] is None:
            return first
    return exception


class Edge:
    """What every request of one replica passes, whatever protocol it came with."""

    def __init__(self, settings: Settings, admission: Admission, metrics: RuntimeMetrics) -> None:
        self.settings = settings
        self.admission = admission
        self.metrics = metrics
        self.moved = 0
        """Messages of streams that were sent; only whether it changes matters."""
        self._log = logs.request_log()

    def refused(self, refusal: PierheadError) -> str:
        """Count a refusal; returns the reason that `pierhead-refused` carries."""
        reason = "draining" if isinstance(refusal, Draining) else "overloaded"
        self.metrics.refused.inc((reason,))
        return reason

    def finished(self, method: str, code: str, seconds: float, request_id: str | None = None) -> None:
        """Count a request and log it, however it ended. `request_id`: None = that of the current context."""
        labels = (method, code)
        self.metrics.requests.inc(labels)
        self.metrics.request_duration.observe(labels, seconds)
        if self._log is not None:
            if request_id is None:
                context = current_request()
                request_id = context.request_id if context is not None else ""
            self._log(method, code, seconds, request_id)

    def error_for(self, exception: BaseException, method: str) -> PierheadError:
        """The error to answer with. A user's exception is logged with an id, under which the answer can be found.

        An exception that many requests share, because their batch failed, is logged once and has one id in all answers.
        """
        exception = _first_known(exception)
        if isinstance(exception, PierheadError):
            return exception
        if isinstance(exception, grpc.aio.AioRpcError):  # a call through a plain stub: as a handle would have raised it
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
        """The same for callers that may be outside the stack: over HTTP and plain gRPC.

        Texts of errors that no code wrote for callers (exceptions, settings, what a server that is not ours says of a
        failure of its own) may hold secrets: the caller gets the id alone, which finds the text in the log. Debug
        shows all.
        """
        error = self.error_for(exception, method)
        if self.settings.debug or not _is_internal(error):
            return error
        error_id = error.error_id if isinstance(error, UserCodeError) else _logged(_first_known(exception), method)
        return UserCodeError(f"internal error [error id {error_id}]", error_id=error_id)


def too_long(method: str, settings: Settings) -> DeadlineExceeded:
    """What ends a call at the service's own deadline."""
    return DeadlineExceeded(
        f"{method} was not done within {settings.request_timeout_s:g} s, the longest that this service works on a call "
        "(x-serve.request_timeout_s)"
    )


def _is_internal(error: PierheadError) -> bool:
    return isinstance(error, UserCodeError | SettingsError) or (
        isinstance(error, RemoteError) and error.http_status == UserCodeError.http_status
    )


def _logged(exception: BaseException, method: str) -> str:
    """Log an exception, once; returns the id that it was logged with."""
    error_id = vars(exception).get(_LOGGED_AS)
    if error_id is None:
        error_id = new_request_id()
        BaseException.__setattr__(exception, _LOGGED_AS, error_id)  # its own may refuse: a frozen dataclass's does
        logger.error("%s failed [error id %s]", method, error_id, exc_info=exception)
    return str(error_id)
