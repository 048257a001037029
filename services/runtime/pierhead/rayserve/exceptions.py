"""The errors of Ray Serve's names, and the error that stands for an exception in another replica."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, ClassVar, cast

import grpc

logger = logging.getLogger("pierhead")


class RayError(Exception):
    """The base of Ray's own errors."""


class TaskCancelledError(RayError):
    """A call was cancelled."""


class GetTimeoutError(RayError, TimeoutError):
    """A result was not there in time."""


class UnserializableException(RayError):
    """Stands for an exception of another replica whose pickle cannot be read; its text has the traceback there."""


class RayServeException(Exception):
    """The base of the errors of this package."""


class BackPressureError(RayServeException):
    """More calls wait for a deployment than its `max_queued_requests`."""

    def __init__(
        self,
        num_queued_requests: int,
        max_queued_requests: int,
        status_code: int = 503,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(num_queued_requests, max_queued_requests, status_code, retry_after_s)
        self.status_code = status_code
        """The status of an HTTP answer: 503 or 429."""
        self.retry_after_s = retry_after_s
        """The Retry-After of an HTTP answer, in seconds; None = without one."""

    @property
    def message(self) -> str:
        """The error in words."""
        queued, most = self.args[:2]
        return f"Request dropped due to backpressure (num_queued_requests={queued}, max_queued_requests={most})."

    def __str__(self) -> str:
        return self.message


class RequestCancelledError(RayServeException, TaskCancelledError):
    """The call was cancelled by `cancel()`, or with the request that it belonged to."""

    def __init__(self, request_id: str | None = None) -> None:
        super().__init__(request_id)
        self._request_id = request_id

    def __str__(self) -> str:
        return f"Request {self._request_id} was cancelled." if self._request_id else "Request was cancelled."


class _Unavailable(RayServeException):
    _words: ClassVar[str]

    def __init__(self, which: object) -> None:
        super().__init__(which)

    @property
    def message(self) -> str:
        """The error in words."""
        return self._words.format(self.args[0])

    def __str__(self) -> str:
        return self.message


class DeploymentUnavailableError(_Unavailable):
    """The deployment has no replica that could serve, and none is to come."""

    _words = "{} is unavailable because it failed to deploy."


class ReplicaUnavailableError(_Unavailable):
    """The replica that was chosen for a call is gone."""

    _words = "Replica {} is no longer available."


class gRPCStatusError(RayServeException):  # noqa: N801 - Ray Serve's name
    """An exception of a deployment, with the status that it has set for its gRPC client."""

    def __init__(
        self,
        original_exception: BaseException,
        code: grpc.StatusCode | None = None,
        details: str | None = None,
    ) -> None:
        super().__init__(str(original_exception))
        self.original_exception = original_exception
        self.grpc_code = code
        self.grpc_details = details


class RayTaskError(RayError):
    """An exception that another replica has raised; `cause` is the exception itself.

    What callers catch is an object of this class and of the exception's own: `except ValueError` catches a ValueError
    of another replica. Its text is the traceback there.
    """

    def __init__(self, cause: BaseException, traceback_str: str = "") -> None:
        super().__init__(cause, traceback_str)
        self.cause = cause
        self.traceback_str = traceback_str

    def __str__(self) -> str:
        return self.traceback_str or repr(self.cause)

    def as_instanceof_cause(self) -> RayTaskError:
        """The same error as one that is also of the cause's class, where Python allows such a class."""
        kind = type(self.cause)
        if issubclass(RayTaskError, kind):
            return self
        try:
            made = _dual(cast("Any", kind))(self.cause, self.traceback_str)
        except Exception:  # the class cannot be derived from, or has a constructor in the way
            logger.debug("no RayTaskError can be a %s as well", kind.__name__, exc_info=True)
            return self
        return cast("RayTaskError", made)


@cache
def _dual(kind: Any) -> type[BaseException]:
    """RayTaskError and an exception's class in one."""

    class Dual(RayTaskError, kind):  # type: ignore[misc]
        def __new__(cls, cause: Any, traceback_str: str = "") -> Any:
            if isinstance(cause, BaseExceptionGroup):
                return super().__new__(cls, cause.message, cause.exceptions)
            return super().__new__(cls, cause)  # an OSError takes two for its number and its text

        def __init__(self, cause: BaseException, traceback_str: str = "") -> None:
            self.__dict__.update(cause=cause, traceback_str=traceback_str, _dual_args=(cause,))

        @property
        def args(self) -> tuple[Any, ...]:
            found: tuple[Any, ...] = vars(self).get("_dual_args", ())
            return found

        @args.setter
        def args(self, value: tuple[Any, ...]) -> None:
            self.__dict__["_dual_args"] = value

        def __getattr__(self, name: str) -> Any:
            if (name.startswith("__") and name != "__notes__") or "cause" not in vars(self):
                raise AttributeError(name)
            return getattr(vars(self)["cause"], name)

        def __str__(self) -> str:
            return RayTaskError.__str__(self)

        def __reduce__(self) -> tuple[Any, ...]:
            return _again, (vars(self)["cause"], vars(self)["traceback_str"])

    Dual.__name__ = Dual.__qualname__ = f"RayTaskError({kind.__name__})"
    return Dual


def _again(cause: BaseException, traceback_str: str) -> RayTaskError:
    return RayTaskError(cause, traceback_str).as_instanceof_cause()
