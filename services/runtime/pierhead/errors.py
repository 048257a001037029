"""Every error that crosses a service boundary. Each class carries its gRPC status and its HTTP status.

    class                  gRPC status          HTTP  kind
    PierheadError          INTERNAL             500   error
    |-- BadRequest         INVALID_ARGUMENT     400   bad_request
    |   |-- PayloadTooLarge  INVALID_ARGUMENT   413   payload_too_large
    |   `-- BodyTimeout    INVALID_ARGUMENT     408   body_timeout
    |-- NotFound           NOT_FOUND            404   not_found
    |-- DeadlineExceeded   DEADLINE_EXCEEDED    504   deadline_exceeded
    |-- Backpressure       RESOURCE_EXHAUSTED   503   backpressure        Retry-After
    |-- Unavailable        UNAVAILABLE          503   unavailable         Retry-After
    |   |-- NoReplica      UNAVAILABLE          503   no_replica          Retry-After
    |   |   `-- ScaledToZero  UNAVAILABLE       503   scaled_to_zero      Retry-After
    |   |-- Draining       UNAVAILABLE          503   draining            Retry-After
    |   |-- StoreUnavailable  UNAVAILABLE       503   store_unavailable   Retry-After
    |   `-- ReplicaDied    UNAVAILABLE          502   replica_died
    |-- Broken             INTERNAL             500   broken
    |-- ContentGone        INTERNAL             500   content_gone
    |-- UserCodeError      INTERNAL             500   internal
    |-- RemoteError        as the callee set    by status  remote
    `-- SettingsError      FAILED_PRECONDITION  500   settings

A service raises them; the runtime turns them into a status with `pierhead-error: <kind>` in the trailing metadata. The
caller's handle turns that back into the same class, and the HTTP edge into `{"error": {"code": <kind>, ...}}`: an error
of the last service in a chain reaches the client with its own code and text.

Why 504 and not 408 for a deadline: 408 means that the client was slow to send, and clients may repeat such a request
automatically (RFC 9110, 15.5.9). Work that took too long must not be repeated automatically.
Why 503 and not 429 for backpressure: the service is full; this client did not send too much.

Every class is also a `grpc.RpcError` with `code()` and `details()`, so code written for plain stubs still works.
"""

from __future__ import annotations

from urllib.parse import quote

import grpc

MAX_DETAILS = 4096
"""Bytes that a status message may take on the wire: header tables and proxies between services are small."""

ERROR_KIND_KEY = "pierhead-error"
REFUSED_KEY = "pierhead-refused"
ONGOING_KEY = "pierhead-ongoing"
ERROR_ID_KEY = "pierhead-error-id"


class PierheadError(grpc.RpcError):
    """Base of every error of the runtime; `str(error)` says what happened, where, why and what to do."""

    grpc_status: grpc.StatusCode = grpc.StatusCode.INTERNAL
    http_status: int = 500
    kind: str = "error"
    retry_after_s: float | None = None
    """Seconds after which trying again makes sense; None = trying again is not advised."""

    def __init__(self, message: str = "", *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = str(message)  # `raise BadRequest(error)` is allowed, and only text can be sent
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    def code(self) -> grpc.StatusCode:
        """The gRPC status, as `grpc.aio.AioRpcError.code` returns it."""
        return self.grpc_status

    def details(self) -> str:
        """The gRPC status message."""
        return clip(self.message, MAX_DETAILS)

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]  # the stubs are wrong
        """The metadata from which the caller rebuilds this class."""
        return ((ERROR_KIND_KEY, self.kind),)


class BadRequest(PierheadError):
    """The request is wrong and will stay wrong: the message names the field, what was found and what was expected."""

    grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    kind = "bad_request"


class PayloadTooLarge(BadRequest):
    """The request is larger than the service accepts."""

    http_status = 413
    kind = "payload_too_large"


class BodyTimeout(BadRequest):
    """The request's body has not arrived in time."""

    http_status = 408
    kind = "body_timeout"


class NotFound(PierheadError):
    """What the request names does not exist."""

    grpc_status = grpc.StatusCode.NOT_FOUND
    http_status = 404
    kind = "not_found"


class DeadlineExceeded(PierheadError):
    """The request's deadline passed before there was an answer."""

    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    kind = "deadline_exceeded"


class Backpressure(PierheadError):
    """Every replica is full and so is the queue; nothing was done."""

    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 503
    kind = "backpressure"
    retry_after_s = 1.0


class Unavailable(PierheadError):
    """The service cannot answer now."""

    grpc_status = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    kind = "unavailable"
    retry_after_s: float | None = 1.0


class NoReplica(Unavailable):
    """No replica of the service could be reached in time; nothing was done."""

    kind = "no_replica"


class ScaledToZero(NoReplica):
    """An operator, or the compose files, set the service to 0 replicas: calls fail at once. Nothing was done."""

    kind = "scaled_to_zero"
    retry_after_s: float | None = 10.0


class Draining(Unavailable):
    """This replica finishes its requests and accepts no new ones; nothing was done."""

    kind = "draining"


class StoreUnavailable(Unavailable):
    """The shared store cannot be read or written now: the controller is down, or a bound of the store is reached."""

    kind = "store_unavailable"


class ReplicaDied(Unavailable):
    """The replica went away after it may have begun the call, which is therefore not repeated.

    502 and without Retry-After: whether the work was done is unknown, so the client has to decide.
    """

    http_status = 502
    kind = "replica_died"
    retry_after_s: float | None = None


class Broken(PierheadError):
    """Raised by `check_health`: this replica is broken and will not recover by itself. It is unhealthy at once.

    Any other exception may be temporary: a replica is unhealthy once three checks in a row have failed.
    """

    kind = "broken"


class ContentGone(PierheadError):
    """The content of a tensor in shared memory cannot be read, or sent: it was released, or never passed."""

    kind = "content_gone"


class UserCodeError(PierheadError):
    """A service raised an exception that is not a PierheadError. `traceback` holds the callee's, shortened."""

    kind = "internal"

    def __init__(self, message: str = "", *, error_id: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.error_id = error_id
        self.traceback = traceback

    def details(self) -> str:
        """The message, then the traceback, of which the oldest part is cut so that all fits into the header."""
        first = clip(self.message, MAX_DETAILS // 2)
        if not self.traceback:
            return first
        return clip(first + "\n" + clip(self.traceback, MAX_DETAILS - len(quote(first)) - 8, keep="end"), MAX_DETAILS)

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]  # the stubs are wrong
        """Adds the id under which the callee logged the exception."""
        return ((ERROR_KIND_KEY, self.kind), (ERROR_ID_KEY, self.error_id))


class RemoteError(PierheadError):
    """The callee ended the call with a status of its own choice (`context.abort(...)`)."""

    kind = "remote"

    def __init__(self, message: str, grpc_status: grpc.StatusCode) -> None:
        super().__init__(message)
        self.grpc_status = grpc_status
        self.http_status = HTTP_STATUS_OF.get(grpc_status, 500)


class SettingsError(PierheadError):
    """An environment variable cannot be used, so the start fails. Names the variable, its value, what is expected."""

    grpc_status = grpc.StatusCode.FAILED_PRECONDITION
    kind = "settings"


def cannot_listen(variable: str, host: str, port: int, error: Exception) -> SettingsError:
    """The error to raise when the port in an environment variable cannot be opened."""
    return SettingsError(
        f"{variable}: cannot listen on {host}:{port}: {error}; is another process there? {variable} sets another port, "
        "0 any free one"
    )


HTTP_STATUS_OF: dict[grpc.StatusCode, int] = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""gRPC statuses as HTTP statuses, where no class of ours has the status; every other status is a 500."""


def clip(text: str, limit: int, *, keep: str = "start") -> str:
    """Shorten `text` until its percent-encoded form (how gRPC sends it) takes at most `limit` bytes."""
    mark = "... [cut]"
    # Each character takes at least a byte, so only the first or last `limit` of a long text can fit.
    text = text[: limit + 1] if keep == "start" else text[-limit - 1 :]
    text = text.encode(errors="replace").decode()  # lone surrogates have no encoding
    if len(quote(text)) <= limit:
        return text
    low, high = 0, len(text)
    while low < high:  # the longest piece that fits: encoded length grows with the number of characters
        middle = (low + high + 1) // 2
        piece = text[:middle] if keep == "start" else text[-middle:]
        low, high = (middle, high) if len(quote(piece)) + len(quote(mark)) <= limit else (low, middle - 1)
    if low == 0:
        return ""
    return text[:low] + mark if keep == "start" else mark + text[-low:]
